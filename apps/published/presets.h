// The published model sizes, as the configs that their checkpoints carry. For benchmarks and random
// checkpoints; nothing else reads them.
#pragma once

#include <string_view>

#include "base/json.h"

namespace orrery {

struct ModelPreset {
  Json transformer;
  Json vae;
  Json sound;  // null: no sound
};

// nano, super or edge; throws Error{invalid_argument} otherwise.
ModelPreset model_preset(std::string_view name);

}  // namespace orrery
