// The sound tokenizer's decoder: latents (25 frames a second in the released model) to a waveform.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "base/json.h"
#include "io/safetensors.h"
#include "tensor/tensor.h"

namespace orrery {

struct SoundConfig {
  int64_t sampling_rate = 48000;
  int64_t latent_dim = 64;  // vocoder_input_dim
  int64_t dec_dim = 320;
  std::vector<int64_t> dec_c_mults{1, 2, 4, 8, 16};
  std::vector<int64_t> dec_strides{2, 4, 5, 6,
                                   8};  // as in the file; the decoder runs them backwards
  int64_t out_channels = 2;
  int64_t hop_size = 1920;  // samples of one latent frame: the product of the strides

  // Refuses architecture values it does not know, and contradictions, by name.
  static SoundConfig from_json(const Json& config);
  // Latent frames for a clip: ceil(trunc(num_frames / fps * sampling_rate) / hop_size).
  int64_t latent_frames(int64_t num_frames, double fps) const;
};

struct SoundWeights;

// Immutable after construction; one per backend. Always computes in f32: bf16 would leave about
// eight bits of the waveform.
class SoundDecoder {
 public:
  // Folds weight norm in f32 and loads the decoder. Accepts (g, v) pairs and folded weights, the
  // block and the flat layout of names, and a wrapper prefix on every name; ignores everything that
  // is not the decoder's.
  SoundDecoder(Backend& backend, SoundConfig config, const Safetensors& files);
  ~SoundDecoder();
  const SoundConfig& config() const { return config_; }

  // latents [latent_dim, T] f32 on the backend -> wave [out_channels, hop_size * T] f32,
  // contiguous, in host memory, clamped to [-1, 1]. The whole clip at once: the arena holds three
  // tensors of the widest stage. A dry run leaves `wave` alone. Throws Error{numeric} naming what
  // is not finite.
  void decode(Arena& arena, MutView wave, View latents);

 private:
  Backend& backend_;
  SoundConfig config_;
  std::unique_ptr<SoundWeights> weights_;
};

}  // namespace orrery
