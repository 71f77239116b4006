// The life of a request on one backend, one function a stage. The same code serves a real run and the
// dry run that sizes it: with a DryRunBackend and a measuring arena nothing is read or written.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "base/rng.h"
#include "engine/settings.h"
#include "model/scheduler.h"
#include "model/sound.h"
#include "model/transformer.h"
#include "model/vae.h"

namespace orrery {

struct Networks {
  Transformer& transformer;
  Vae& vae;
  SoundDecoder* sound = nullptr;
};

// One evaluation context of the guidance: a prompt and what follows from its length.
struct Branch {
  std::vector<int64_t> ids;
  UndCache und;
  GenRope rope;
};

class Run {
 public:
  // `ids`: one list, or conditional and unconditional. The referenced objects outlive the run.
  Run(Networks networks, Arena& arena, const Settings& settings, const AttentionStrategy& strategy,
      std::vector<std::vector<int64_t>> ids, VaeTiling tiling);

  // Text tower of every branch and the rotary tables.
  void prefill();
  // Conditioning pixels, planar [3, encoded_frames, H, W]; empty in a dry run. Skipped without any.
  void encode(std::span<const float> pixels);
  // Initial state from the generator, in the reference's order: vision, sound, action. `latents`
  // replaces the vision noise and what is conditioned. No generator in a dry run.
  void start(NormalGenerator* noise, bool noise_bf16, std::span<const float> latents);
  // One denoising step: every branch, guidance, solver. Throws Error{numeric} naming step and layer when
  // a velocity is not finite.
  void step(int i, NormalGenerator* noise);
  // Frames in order, f32 [n, H, W, 3] in host memory, valid during the call.
  void decode(const Vae::FrameSink& sink);
  // [channels, samples]: whole latent frames of sound. Empty without sound.
  std::vector<std::vector<float>> decode_sound();

  std::vector<float> latents() const;  // host copy, [C, T, h, w]
  std::vector<float> action() const;   // host copy, [chunk, raw width]; empty when none is predicted
  Attention& attention() { return attention_; }
  const std::vector<Branch>& branches() const { return branches_; }

 private:
  // State of one modality that is being denoised.
  struct Stream {
    Tensor sample;
    std::vector<Tensor> velocity;  // per branch
    std::unique_ptr<Solver> solver;
    explicit operator bool() const { return static_cast<bool>(sample); }
  };

  Stream make_stream(Shape shape, bool solved);
  void upload(MutView out, std::span<const float> host);
  std::vector<float> download(View x) const;
  void keep_conditioned(MutView latents);
  void mask_action(MutView action);
  GenInput input(float timestep) const;
  void evaluate(size_t branch, float timestep);
  void require_finite(int step, float timestep);
  [[noreturn]] void name_non_finite(int step, float timestep);

  Networks networks_;
  Backend& backend_;
  Arena& arena_;
  const Settings& settings_;
  VaeTiling tiling_;
  Attention attention_;
  std::vector<Branch> branches_;
  Tensor clean_;  // conditioned latents [C, conditioned frames prefix, h, w]; empty without any
  Stream vision_, sound_, action_;
  std::vector<float> host_check_;
};

}  // namespace orrery
