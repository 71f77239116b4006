// A request on one backend: its stages one by one, in the order that stages_of() lists them. The
// same code serves a real run and the dry run that sizes it: with a DryRunBackend, a measuring
// arena and no request nothing is read or written.
//
// run.cpp has its construction, noise and results, run_step.cpp the denoising, run_frames.cpp what
// goes through the VAE.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/warm_up.h"
#include "base/rng.h"
#include "dist/world.h"
#include "engine/settings.h"
#include "engine/stages.h"
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

// What a run is made from; all of it outlives the run.
struct RunInputs {
  const Settings& settings;
  const AttentionStrategy& strategy;
  std::vector<std::vector<int64_t>> ids;  // one prompt, or conditional and unconditional
  const Request* request = nullptr;       // pixels, noise, latents; null: a dry run reads none
};

struct RunOptions {
  VaeTiling tiling;
  const MeshGroups* groups = nullptr;  // of the ranks that share the run; null: it is alone
  // Whether the text's layers run beside the first step's layers, each of which needs only the text
  // layer of its number: bringing the text tower's weights then hides behind the step, or the other
  // way round.
  bool text_with_first_step = false;
  bool replays = false;  // steps may be replayed where the backend can (Backend::replay)
  bool records = false;  // dispatch() lists the attention calls
  int num_threads = 1;   // for pictures that are resized or filtered on the host
};

// What is called in the course of a stage; each may be empty.
struct RunHooks {
  // Units of the stage that are finished: denoising steps or frames.
  std::function<void(int64_t finished)> unit = {};
  // Frames of the result, u8 [count, H, W, 3] in host memory.
  std::function<void(const uint8_t* rgb, int64_t count)> frames = {};
  // Between layers, and between frames that go through the VAE together, but not within a step that
  // may be replayed. May throw; the run is of no use then.
  std::function<void()> pause = {};
};

class Run {
 public:
  Run(Networks networks, Arena& arena, RunInputs inputs, RunOptions options = {});

  // Performs one of stages_of(settings), or some of a denoise's steps. Refuses a stage whose
  // predecessors have not run. Stages of the guardrail and of loading are the engine's, and refused
  // too. A denoising step throws Error{numeric} naming step and layer when a velocity is not
  // finite. A decode of several ranks is collective when shares_decode(); a rank whose hooks take
  // no frames then helps, and keeps what the next chunk continues from.
  void perform(const Stage& stage, const RunHooks& hooks = {});

  // Evaluates the current state once per branch with this layout of the strategy and forgets the
  // velocities: nothing that a step reads changes. After the noise stage.
  void exercise(int layout);

  bool shares_decode() const;
  // Whether the next chunk continues decoded frames of this one: then every rank decodes it.
  bool continues(int64_t chunk) const;

  std::vector<float> latents() const;  // host copy, [C, T, h, w]
  std::vector<float> action() const;  // host copy, [chunk, raw width]; empty when none is predicted
  std::vector<std::vector<float>> take_sound() { return std::move(sound_track_); }
  Attention& attention() { return attention_; }
  const std::vector<Branch>& branches() const { return branches_; }
  const WarmUp& warm_up() const { return warm_up_; }
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

  // run.cpp
  void read_prompts();
  Positions positions_of(const Context& context) const;
  void draw_noise(int64_t chunk);
  Stream make_stream(Shape shape, bool solved);
  void fill_with_noise(Stream& stream);
  void keep_conditioned(MutView latents);
  void mask_action(MutView action);
  bool any_noisy_frame() const;
  Attention& attention_of(const Context& context);
  Communicator* everyone() const;
  void set_recording(bool on);
  void pause() const;
  void upload(MutView out, std::span<const float> host);
  std::vector<float> download(View x) const;

  // run_frames.cpp
  void encode(int64_t chunk);
  Tensor encode_clip(std::span<const float> pixels, int64_t frames);
  void decode(int64_t chunk, const RunHooks& hooks);
  std::vector<std::vector<float>> decode_sound();

  // run_step.cpp
  void warm_up_layouts();
  void set_precision(Tower tower, Precision precision);
  void step(int i);
  void evaluate_all(const std::function<bool(size_t)>& counts);
  void combine(const std::function<bool(size_t)>& counts);
  void solve(int i);
  int owner(size_t context) const;
  bool is_mine(size_t context) const;
  void share_velocities(const std::function<bool(size_t)>& counts);
  void set_factors(float timestep);
  GenInput input(bool with_controls) const;
  void with_text(const std::function<void()>& body) const;
  // The prompts that this rank evaluates, with places for what the text tower makes of them.
  std::vector<Transformer::Prompt> prompts();
  void read_text();
  Transformer::Evaluation evaluation_of(size_t context);
  std::vector<Transformer::Evaluation> evaluations_of(std::span<const size_t> contexts);
  // Groups of contexts that one GenPass evaluates.
  std::vector<std::span<const size_t>> passes_of(std::span<const size_t> contexts);
  void evaluate(std::span<const size_t> contexts, bool may_replay);
  void evaluate_with_text(std::span<const size_t> contexts);
  void require_finite(int step, float timestep);
  // The first layer of a context after which a value is not finite, counted through both towers
  // (generation behind text); infinite: none.
  float first_non_finite(size_t context);
  float lowest_of_ranks(float value) const;
  [[noreturn]] void name_non_finite(int step, float timestep);

  Networks networks_;
  Backend& backend_;
  Arena& arena_;
  const Settings& settings_;
  const AttentionStrategy& strategy_;
  const Request* request_;
  RunOptions options_;
  Communicator* cfg_;  // group that shares out the contexts, or null
  Attention attention_;
  std::optional<Attention> plain_attention_;  // without the controls
  WarmUp warm_up_;
  std::vector<Branch> branches_;
  std::vector<Context> contexts_;
  Conditioning conditioning_;
  std::optional<NormalGenerator> noise_;  // none in a dry run
  std::vector<Tensor> controls_;          // clean latents of transfer's controls
  Tensor clean_;  // conditioned latents [C, conditioned frames prefix, h, w]; empty without any
  std::vector<float> carried_;  // frames that the next chunk continues, planar
  Stream vision_, sound_, action_;
  Tensor time_;  // the timestep as the transformer embeds it
  std::vector<std::vector<float>> sound_track_;
  bool text_waits_ = false;                  // for the first step
  Precision precision_ = Precision::native;  // of the generation tower
  const RunHooks* hooks_ = nullptr;          // of the stage that runs
};

}  // namespace orrery
