// The VAE's tensors and how its two halves are built from them.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "model/vae.h"

namespace orrery {

struct ConvWeights {
  View weight, bias;
};

struct ResnetWeights {
  int64_t in = 0, out = 0;
  View norm1, norm2;
  ConvWeights conv1, conv2;
  ConvWeights shortcut;  // 1x1x1, only where in != out
};

struct ImageAttentionWeights {
  View norm;
  ConvWeights to_qkv, proj;
};

// A level of the encoder (resampling halves) or of the decoder (doubles).
struct LevelWeights {
  int64_t in = 0, out = 0;
  bool resamples = false;  // in height and width
  bool temporal = false;   // in time too
  std::vector<ResnetWeights> resnets;
  ConvWeights resample, time_conv;
  int64_t time_factor() const { return temporal ? 2 : 1; }
  int64_t space_factor() const { return resamples ? 2 : 1; }
};

// One half of the network. The middle block stands before the levels in the decoder, after them in
// the encoder.
struct HalfWeights {
  int64_t in = 0, out = 0, middle = 0;
  ConvWeights conv_in;
  std::vector<LevelWeights> levels;
  std::array<ResnetWeights, 2> middle_resnets;
  ImageAttentionWeights attention;
  View norm_out;
  ConvWeights conv_out;
};

struct VaeWeights {
  HalfWeights encoder, decoder;
  ConvWeights quant, post_quant;  // 1x1x1
};

// The structure of both halves with empty slots.
VaeWeights vae_structure(const VaeConfig& config);
void visit(VaeWeights& weights, const VaeConfig& config, WeightVisitor& visitor);

}  // namespace orrery
