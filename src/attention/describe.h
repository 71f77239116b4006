// What a strategy came to, for people: the resolved table, and what each preset's kernel became on
// a backend.
#pragma once

#include <string>
#include <vector>

#include "attention/strategy.h"
#include "backend/backend.h"

namespace orrery {

// One preset tried on a backend with a small call (B62): which implementation ran, and how far its
// output lies from the same attention in double precision on the host.
struct PresetTrial {
  std::string preset;
  std::string implementation;  // empty when the backend refused
  double relative_error = 0;
  std::string failure;  // why it cannot run here; empty when it can
};

// Tries every preset of the strategy that a layout uses. Heads are those of one rank.
std::vector<PresetTrial> try_presets(const AttentionStrategy& strategy, Backend& backend,
                                     int64_t heads, int64_t kv_heads, int64_t head_dim,
                                     DType dtype);
// Throws Error{unsupported} that names every preset that cannot run or is not exact.
void require_presets(const std::vector<PresetTrial>& trials);

// Source, presets (with what the trials found, when there are any), schedule for num_steps (0:
// leave it out), and layout x role x layers with runs of layers folded: "layers 0, 3..14".
std::string describe(const AttentionStrategy& strategy, const std::vector<PresetTrial>& trials = {},
                     int num_steps = 0);
// "0, 3..14, 35" from ascending layers.
std::string layer_ranges(const std::vector<int>& layers);

}  // namespace orrery
