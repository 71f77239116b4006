// Action domains of the public checkpoints: which weights a domain uses and how wide its raw
// actions are. The table is that of the public pipeline.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace orrery {

struct Embodiment {
  std::string_view name;
  int64_t domain;     // row of the per-domain weights; several embodiments may share one
  int64_t raw_width;  // 0: no canonical width, not usable for actions
};

// Throws Error{invalid_argument} that lists the known names.
const Embodiment& find_embodiment(std::string_view name);

}  // namespace orrery
