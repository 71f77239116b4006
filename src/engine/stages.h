// The stages of a request, listed once: generating, planning and measuring walk this list.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "engine/settings.h"

namespace orrery {

enum class StageKind : uint8_t {
  check_prompt,  // by the guardrail
  prompt,        // the text tower, rotary tables
  encode,        // controls and conditioning of a chunk, through the VAE
  noise,         // the initial state of a chunk
  load,          // the generation tower's weights, where they do not stay
  warm_up,       // every attention layout once
  denoise,
  decode,
  sound,
  check_frames,  // by the guardrail
};
// As people read it; both checks are "guardrail".
std::string_view name_of(StageKind kind);

// A stage of one chunk. Its units are denoising steps, frames that a decode adds to the result, or
// one for the whole.
struct Stage {
  StageKind kind = StageKind::prompt;
  int64_t chunk = 0;
  int64_t begin = 0;  // first unit
  int64_t count = 1;  // units
  // Unit i alone.
  Stage unit(int64_t i) const { return {kind, chunk, i, 1}; }
};

// What the engine adds to what the settings ask for.
struct StageOptions {
  bool guardrail = false;
  bool loads = false;
  bool warms_up = false;
};

// In the order in which they run.
std::vector<Stage> stages_of(const Settings& settings, const StageOptions& options = {});

// Of a chunk: frames at its beginning that repeat the chunk before, and frames that it adds to the
// result.
int64_t repeated_frames(const Settings& settings, int64_t chunk);
int64_t fresh_frames(const Settings& settings, int64_t chunk);

}  // namespace orrery
