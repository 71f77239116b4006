// The sound tokenizer's decoder: latents (25 frames a second in the released model) to a waveform.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "base/json.h"
#include "model/weights.h"

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
  // Channels between the levels; level 0 is the waveform's end.
  int64_t width(size_t level) const { return dec_dim * (level == 0 ? 1 : dec_c_mults[level - 1]); }
};

struct SoundWeights;

// How files hold the decoder: (g, v) pairs of weight norm, folded in f32, or folded weights; names
// by block or by position; a wrapper's prefix on every name. What is not the decoder's is ignored.
// Throws Error{corrupt} when the files hold no decoder.
LoadOptions sound_loading(const SoundConfig& config, const Safetensors& files);

// Immutable after construction and loading; one per backend. Always computes in f32: bf16 would
// leave about eight bits of the waveform.
class SoundDecoder {
 public:
  static constexpr DType kWeightType = DType::f32;
  SoundDecoder(Backend& backend, SoundConfig config);
  ~SoundDecoder();
  const SoundConfig& config() const { return config_; }
  void visit(WeightVisitor& visitor);

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
