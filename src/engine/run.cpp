#include "engine/run.h"

#include <algorithm>

#include "base/error.h"
#include "engine/backends.h"
#include "engine/transfer.h"

namespace orrery {

namespace {

Sequence make_sequence(const Settings& s, const Transformer& transformer, const TokenOrder& order,
                       bool with_controls) {
  Sequence sequence;
  sequence.grid = transformer.token_grid(s.latent_frames, s.latent_height, s.latent_width);
  if (s.transfer && with_controls) {
    sequence.control_tokens =
        static_cast<int64_t>(s.transfer->hints.size()) * sequence.video_tokens();
  }
  sequence.sound_tokens = s.sound_frames;
  sequence.action_tokens = s.action ? s.action->chunk : 0;
  sequence.order = order;
  return sequence;
}

Communicator* group_of(const RunOptions& options, std::unique_ptr<Communicator> MeshGroups::*axis) {
  return options.groups != nullptr ? (options.groups->*axis).get() : nullptr;
}

}  // namespace

Run::Run(Networks networks, Arena& arena, RunInputs inputs, RunOptions options)
    : networks_(std::move(networks)),
      backend_(networks_.transformer.backend()),
      arena_(arena),
      settings_(inputs.settings),
      strategy_(inputs.strategy),
      request_(inputs.request),
      options_(options),
      cfg_(group_of(options, &MeshGroups::cfg)),
      attention_(backend_, strategy_,
                 make_sequence(settings_, networks_.transformer, strategy_.token_order(), true),
                 networks_.transformer.config().head_dim, group_of(options, &MeshGroups::cp)),
      warm_up_(strategy_, {settings_.transfer && settings_.transfer->weights.size() > 1
                               ? AttentionRole::gen_multi_control
                               : AttentionRole::gen}),
      conditioning_(settings_.conditioning) {
  for (auto& list : inputs.ids) branches_.push_back({std::move(list), {}});
  contexts_.push_back({"conditional", 0, true, 1.0, {}});
  if (settings_.transfer) {
    if (!settings_.transfer->weights.empty())
      attention_.set_control_weights(settings_.transfer->weights);
    controls_.resize(settings_.transfer->hints.size());
    if (settings_.transfer->amplifies()) {
      plain_attention_.emplace(
          backend_, strategy_,
          make_sequence(settings_, networks_.transformer, strategy_.token_order(), false),
          networks_.transformer.config().head_dim, group_of(options, &MeshGroups::cp));
      contexts_.push_back({"control-free", 0, false, 0.0, {}});
    }
  }
  if (branches_.size() > 1) contexts_.push_back({"unconditional", 1, true, 0.0, {}});
  set_recording(options_.records);
}

void Run::perform(const Stage& stage, const RunHooks& hooks) {
  const bool has_text = static_cast<bool>(contexts_.front().rope.cos) || !is_mine(0);
  const bool has_noise = static_cast<bool>(vision_);
  const auto after = [&](bool done, const char* what) {
    require(done, "run: the stage ", name_of(stage.kind), " comes after ", what);
  };
  hooks_ = &hooks;
  const struct Reset {
    const RunHooks*& hooks;
    ~Reset() { hooks = nullptr; }
  } reset{hooks_};
  switch (stage.kind) {
    case StageKind::prompt: read_prompts(); break;
    case StageKind::encode: encode(stage.chunk); break;
    case StageKind::noise: draw_noise(stage.chunk); break;
    case StageKind::warm_up:
      after(has_text && has_noise, "prompt and noise");
      warm_up_layouts();
      break;
    case StageKind::denoise:
      after(has_text && has_noise, "prompt and noise");
      for (int64_t i = stage.begin; i < stage.begin + stage.count; ++i) {
        const int layout = strategy_.layout_at(static_cast<int>(i), settings_.schedule.num_steps());
        warm_up_.exercise({layout, attention_.generation_role()},
                          [&] { step(static_cast<int>(i)); });
        if (hooks.unit) hooks.unit(i + 1 - stage.begin);
      }
      break;
    case StageKind::decode:
      after(has_noise, "noise");
      decode(stage.chunk, hooks);
      break;
    case StageKind::sound:
      after(has_noise, "noise");
      sound_track_ = decode_sound();
      break;
    case StageKind::check_prompt:
    case StageKind::load:
    case StageKind::check_frames:
      fail(ErrorKind::invalid_argument, "run: the stage ", name_of(stage.kind),
           " belongs to the engine");
  }
}

void Run::pause() const {
  if (hooks_ != nullptr && hooks_->pause) hooks_->pause();
}

Communicator* Run::everyone() const {
  return options_.groups != nullptr ? options_.groups->everyone() : nullptr;
}

Attention& Run::attention_of(const Context& context) {
  return context.sees_controls ? attention_ : *plain_attention_;
}

// The text tower of every branch and the rotary tables of every context.
void Run::read_prompts() {
  set_precision(Tower::und, networks_.transformer.config().quantisation.policy.text);
  if (options_.text_with_first_step)
    text_waits_ = true;
  else
    read_text();
  for (size_t c = 0; c < contexts_.size(); ++c) {
    if (!is_mine(c)) continue;
    contexts_[c].rope =
        networks_.transformer.make_rope(positions_of(contexts_[c]), attention_of(contexts_[c]));
  }
}

Positions Run::positions_of(const Context& context) const {
  const TransformerConfig& config = networks_.transformer.config();
  const int64_t temporal = networks_.vae.config().scale_factor_temporal;
  const Sequence& sequence = (context.sees_controls ? attention_ : *plain_attention_).sequence();
  const auto text = static_cast<int64_t>(branches_[context.branch].ids.size());
  Positions positions;
  // Controls stand where the target stands: the same places and times.
  const int64_t items = 1 + sequence.control_tokens / sequence.video_tokens();
  for (int64_t i = 0; i < items; ++i) {
    append_item(positions, config, text, sequence.grid, video_rate(settings_.fps, temporal));
  }
  if (sequence.sound_tokens > 0) {
    append_item(positions, config, text, {sequence.sound_tokens, 1, 1}, sound_rate(config));
  }
  if (sequence.action_tokens > 0) {
    append_item(positions, config, text, {sequence.action_tokens, 1, 1},
                action_rate(settings_.fps, temporal));
  }
  return positions;
}

bool Run::any_noisy_frame() const {
  const std::vector<bool>& noisy = conditioning_.noisy;
  return std::find(noisy.begin(), noisy.end(), true) != noisy.end();
}

Run::Stream Run::make_stream(Shape shape, bool solved) {
  Stream stream;
  stream.sample = backend_.allocate_tensor(shape, DType::f32);
  for (size_t i = 0; i < contexts_.size(); ++i) {
    stream.velocity.push_back(backend_.allocate_tensor(shape, DType::f32));
  }
  if (solved) {
    stream.solver =
        std::make_unique<Solver>(backend_, settings_.scheduler, settings_.schedule, shape);
  }
  return stream;
}

void Run::fill_with_noise(Stream& stream) {
  std::vector<float> values;
  if (noise_) {
    values.resize(static_cast<size_t>(stream.sample.view.numel()));
    const bool bf16 = draws_bf16(request_->noise_dtype, networks_.transformer.dtype());
    bf16 ? noise_->fill_bf16(values) : noise_->fill(values);
  }
  upload(stream.sample.view, values);
}

// The initial state of a chunk, drawn in the reference's order: vision, sound, action. Given
// latents replace the vision noise and what is conditioned.
void Run::draw_noise(int64_t chunk) {
  backend_.forget_replays();  // what they name is made anew
  const Settings& s = settings_;
  const TransformerConfig& config = networks_.transformer.config();
  const bool reseeds = s.transfer && s.transfer->reseeds;
  if (request_ != nullptr && (!noise_ || reseeds)) {
    noise_.emplace(request_->rng, s.seed + (reseeds ? chunk : 0));
  }
  if (!time_) time_ = backend_.allocate_tensor({config.hidden_size}, networks_.transformer.dtype());
  vision_ = make_stream({config.latent_channel, s.latent_frames, s.latent_height, s.latent_width},
                        any_noisy_frame());
  fill_with_noise(vision_);
  keep_conditioned(vision_.sample.view);
  if (request_ != nullptr && request_->latents)
    upload(vision_.sample.view, request_->latents->values);
  if (s.sound_frames > 0) {
    sound_ = make_stream({config.sound_dim, s.sound_frames}, true);
    fill_with_noise(sound_);
  }
  if (s.action) {
    action_ = make_stream({s.action->chunk, config.action_dim}, s.action->noisy);
    fill_with_noise(action_);  // forward dynamics draws too: the generator advances
    if (s.action->noisy)
      mask_action(action_.sample.view);
    else
      upload(action_.sample.view, s.action->clean);
  }
}

// Conditioned frames hold their clean latents, exactly, at every step.
void Run::keep_conditioned(MutView latents) {
  if (!clean_) return;
  for (int64_t t = 0; t < settings_.latent_frames; ++t) {
    if (conditioning_.noisy[static_cast<size_t>(t)]) continue;
    backend_.copy(latents.slice(1, t, 1), clean_.view.slice(1, t, 1));
  }
}

// Channels past the embodiment's raw width are 0 in samples and velocities.
void Run::mask_action(MutView action) {
  const int64_t raw = settings_.action->raw_width;
  if (raw < action.dim(1)) backend_.fill(action.slice(1, raw, action.dim(1) - raw), 0);
}

void Run::upload(MutView out, std::span<const float> host) {
  require(backend_.is_dry() || static_cast<int64_t>(host.size()) == out.numel(),
          "upload: ", host.size(), " values for ", out.shape);
  backend_.upload(out, make_view(host.data(), out.shape, DType::f32));
}

std::vector<float> Run::download(View x) const {
  std::vector<float> host(static_cast<size_t>(x.numel()));
  backend_.download(make_mut_view(host.data(), x.shape, DType::f32), x);
  return host;
}

std::vector<DispatchRecord> Run::dispatch() const {
  std::vector<DispatchRecord> records = attention_.records();
  if (plain_attention_) {
    const std::vector<DispatchRecord>& plain = plain_attention_->records();
    records.insert(records.end(), plain.begin(), plain.end());
  }
  return records;
}

std::vector<std::string> Run::evaluation_names() const {
  std::vector<std::string> names;
  for (const Context& context : contexts_) names.emplace_back(context.name);
  return names;
}

void Run::set_recording(bool on) {
  attention_.set_recording(on);
  if (plain_attention_) plain_attention_->set_recording(on);
}

std::vector<float> Run::latents() const { return download(vision_.sample.view); }

std::vector<float> Run::action() const {
  if (!action_ || !settings_.action->noisy) return {};
  const std::vector<float> all = download(action_.sample.view);
  const int64_t width = action_.sample.view.dim(1), raw = settings_.action->raw_width;
  std::vector<float> out;
  for (int64_t row = 0; row < settings_.action->chunk; ++row) {
    out.insert(out.end(), all.begin() + row * width, all.begin() + row * width + raw);
  }
  return out;
}

}  // namespace orrery
