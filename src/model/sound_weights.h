// The sound decoder's tensors: folded, in f32, on the backend.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "model/sound.h"

namespace orrery {

struct SnakeWeights {
  View alpha, beta;  // [C]
};

struct SoundConvWeights {
  View weight;  // [out, in, k]; transposed: [in, out, k]
  View bias;    // empty for the last convolution
};

struct SoundUnitWeights {
  SnakeWeights snake1, snake2;
  SoundConvWeights conv1, conv2;
};

struct SoundBlockWeights {
  int64_t in = 0, out = 0, stride = 0;
  SnakeWeights snake1;
  SoundConvWeights conv_t1;
  std::array<SoundUnitWeights, 3> units;
};

struct SoundWeights {
  SoundConvWeights conv1, conv2;
  SnakeWeights snake1;
  std::vector<SoundBlockWeights> blocks;
};

// The decoder's blocks with empty slots.
SoundWeights sound_structure(const SoundConfig& config);
// Lists the tensors under the names of the released model (decoder.block.0.res_unit1.conv1.weight),
// weight norm folded.
void visit(SoundWeights& weights, const SoundConfig& config, WeightVisitor& visitor);

}  // namespace orrery
