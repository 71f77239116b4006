// The life of a request on one backend, one function a stage. The same code serves a real run and
// the dry run that sizes it: with a DryRunBackend and a measuring arena nothing is read or written.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "base/rng.h"
#include "dist/world.h"
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
  // Runs `body` while the text tower's weights are in place; empty: they always are.
  std::function<void(const std::function<void()>& body)> with_text = {};
};

// A prompt and what the text tower makes of it.
struct Branch {
  std::vector<int64_t> ids;
  UndCache und;
};

class Run {
 public:
  // `ids`: one list, or conditional and unconditional. `groups`: of the ranks that share the run,
  // or null. The referenced objects outlive the run.
  Run(Networks networks, Arena& arena, const Settings& settings, const AttentionStrategy& strategy,
      std::vector<std::vector<int64_t>> ids, VaeTiling tiling, const MeshGroups* groups = nullptr);

  // Text tower of every branch and the rotary tables of every context. When the text may wait for
  // the first step, its layers run beside that step's layers, each of which needs only the text
  // layer of its number: bringing the text tower's weights then hides behind the step, or the other
  // way round.
  enum class Text : uint8_t { now, with_first_step };
  // The CPU has its weights in place.
  static Text text_on(DeviceKind device) {
    return device == DeviceKind::cpu ? Text::now : Text::with_first_step;
  }
  void prefill(Text when = Text::now);
  // What is fixed from here on; before, it is what the settings say of the first chunk.
  void condition(Conditioning conditioning);
  // Conditioning pixels, planar [3, encoded_frames, H, W]; empty in a dry run. Skipped without any.
  void encode(std::span<const float> pixels);
  // Pixels of the i-th control, planar [3, chunk, H, W]; empty in a dry run.
  void encode_control(size_t i, std::span<const float> pixels);
  // Initial state of a chunk from the generator, in the reference's order: vision, sound, action.
  // `latents` replaces the vision noise and what is conditioned. No generator in a dry run.
  void start(NormalGenerator* noise, NoiseType stream, std::span<const float> latents);
  // Evaluates the current state once per branch with this layout of the strategy and forgets the
  // velocities: nothing that a step reads changes. After start().
  void exercise(int layout);
  // One denoising step: every branch, guidance, solver. Throws Error{numeric} naming step and layer
  // when a velocity is not finite.
  void step(int i, NormalGenerator* noise);
  // Frames in order; a dry run does not call `sink`. Of all ranks when they share it: an empty sink
  // then only helps the others.
  void decode(const Vae::FrameSink& sink);
  bool shares_decode() const;
  // [channels, samples]: whole latent frames of sound. Empty without sound.
  std::vector<std::vector<float>> decode_sound();

  std::vector<float> latents() const;  // host copy, [C, T, h, w]
  std::vector<float> action() const;  // host copy, [chunk, raw width]; empty when none is predicted
  Attention& attention() { return attention_; }
  const std::vector<Branch>& branches() const { return branches_; }
  // Whether steps may be replayed where the backend can (Backend::replay). Off at first.
  void set_replay(bool on) { replays_ = on; }
  // Whether dispatch() will list the attention calls made from here on.
  void set_recording(bool on);
  std::vector<DispatchRecord> dispatch() const;
  // Of the guidance evaluations, by their index in the dispatch records.
  std::vector<std::string> evaluation_names() const;

 private:
  // One evaluation of the guidance.
  struct Context {
    const char* name = "";
    size_t branch = 0;  // index of its prompt
    bool sees_controls = true;
    double factor = 0;  // of this step; 0: not evaluated
    GenRope rope;
  };
  // State of one modality that is being denoised.
  struct Stream {
    Tensor sample;
    std::vector<Tensor> velocity;  // per context
    std::unique_ptr<Solver> solver;
    explicit operator bool() const { return static_cast<bool>(sample); }
  };

  void with_text(const std::function<void()>& body) const;
  // The prompts that this rank evaluates, with places for what the text tower makes of them.
  std::vector<Transformer::Prompt> prompts();
  void read_text();
  Stream make_stream(Shape shape, bool solved);
  void upload(MutView out, std::span<const float> host);
  std::vector<float> download(View x) const;
  void keep_conditioned(MutView latents);
  void mask_action(MutView action);
  Tensor encode_clip(std::span<const float> pixels, int64_t frames);
  bool any_noisy_frame() const;
  Attention& attention_of(const Context& context);
  int owner(size_t context) const;
  bool is_mine(size_t context) const;
  void share_velocities(const std::function<bool(size_t)>& counts);
  void set_factors(float timestep);
  GenInput input(bool with_controls) const;
  void set_timestep(float timestep);
  Transformer::Evaluation evaluation_of(size_t context);
  std::vector<Transformer::Evaluation> evaluations_of(std::span<const size_t> contexts);
  // Groups of contexts that one GenPass evaluates.
  std::vector<std::span<const size_t>> passes_of(std::span<const size_t> contexts);
  void evaluate(std::span<const size_t> contexts, bool may_replay);
  void evaluate_with_text(std::span<const size_t> contexts);
  // The first layer of a context after which a value is not finite, counted through both towers
  // (generation behind text); infinite: none.
  float first_non_finite(size_t context);
  Communicator* everyone() const { return groups_ != nullptr ? groups_->everyone() : nullptr; }
  float lowest_of_ranks(float value) const;
  void require_finite(int step, float timestep);
  [[noreturn]] void name_non_finite(int step, float timestep);

  Networks networks_;
  Backend& backend_;
  Arena& arena_;
  const Settings& settings_;
  VaeTiling tiling_;
  const MeshGroups* groups_;
  Communicator* cfg_;  // group that shares out the contexts, or null
  Attention attention_;
  std::optional<Attention> plain_attention_;  // without the controls
  std::vector<Branch> branches_;
  std::vector<Context> contexts_;
  Conditioning conditioning_;
  std::vector<Tensor> controls_;  // clean latents of transfer's controls
  Tensor clean_;  // conditioned latents [C, conditioned frames prefix, h, w]; empty without any
  Stream vision_, sound_, action_;
  Tensor time_;  // the timestep as the transformer embeds it
  bool replays_ = false;
  bool text_waits_ = false;  // for the first step
};

}  // namespace orrery
