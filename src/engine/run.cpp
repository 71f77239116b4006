#include "engine/run.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace orrery {

namespace {

Sequence make_sequence(const Settings& s, const Transformer& transformer, const TokenOrder& order) {
  Sequence sequence;
  sequence.grid = transformer.token_grid(s.latent_frames, s.latent_height, s.latent_width);
  sequence.sound_tokens = s.sound_frames;
  sequence.action_tokens = s.action ? s.action->chunk : 0;
  sequence.order = order;
  return sequence;
}

bool all_finite(std::span<const float> values) {
  // A sum of finite floats times zero is zero; NaN and infinity survive. Vectorises.
  float sum = 0;
  for (float value : values) sum += value * 0.0f;
  return sum == 0.0f;
}

}  // namespace

Run::Run(Networks networks, Arena& arena, const Settings& settings, const AttentionStrategy& strategy,
         std::vector<std::vector<int64_t>> ids, VaeTiling tiling)
    : networks_(networks),
      backend_(networks.transformer.backend()),
      arena_(arena),
      settings_(settings),
      tiling_(tiling),
      attention_(backend_, strategy, make_sequence(settings, networks.transformer, strategy.token_order()),
                 networks.transformer.config().head_dim) {
  for (auto& list : ids) branches_.push_back({std::move(list), {}, {}});
}

void Run::prefill() {
  Transformer& transformer = networks_.transformer;
  const TransformerConfig& config = transformer.config();
  const Sequence& sequence = attention_.sequence();
  const int64_t temporal = networks_.vae.config().scale_factor_temporal;
  for (Branch& branch : branches_) {
    branch.und = transformer.prefill(arena_, branch.ids);
    Positions positions;
    const auto text = static_cast<int64_t>(branch.ids.size());
    append_item(positions, config, text, sequence.grid, video_rate(settings_.fps, temporal));
    if (sequence.sound_tokens > 0) {
      append_item(positions, config, text, {sequence.sound_tokens, 1, 1}, sound_rate(config));
    }
    if (sequence.action_tokens > 0) {
      append_item(positions, config, text, {sequence.action_tokens, 1, 1}, action_rate(settings_.fps, temporal));
    }
    branch.rope = transformer.make_rope(positions, sequence.order, sequence);
  }
}

void Run::encode(std::span<const float> pixels) {
  if (!settings_.encodes) return;
  const VaeConfig& vae = networks_.vae.config();
  const int64_t frames = settings_.encoded_frames, latent_frames = vae.latent_frames(frames);
  const int64_t h = settings_.canvas_height, w = settings_.canvas_width;
  const int64_t lh = h / vae.scale_factor_spatial, lw = w / vae.scale_factor_spatial;
  Tensor input = backend_.allocate_tensor({3, frames, h, w}, DType::f32);
  upload(input.view, pixels);
  Tensor canvas = backend_.allocate_tensor({vae.z_dim, latent_frames, lh, lw}, DType::f32);
  networks_.vae.encode(arena_, canvas.view, input.view, tiling_);
  clean_ = backend_.allocate_tensor(
      {vae.z_dim, latent_frames, settings_.latent_height, settings_.latent_width}, DType::f32);
  backend_.copy(clean_.view,
                canvas.view.slice(2, 0, settings_.latent_height).slice(3, 0, settings_.latent_width));
}

Run::Stream Run::make_stream(Shape shape, bool solved) {
  Stream stream;
  stream.sample = backend_.allocate_tensor(shape, DType::f32);
  for (size_t i = 0; i < branches_.size(); ++i) {
    stream.velocity.push_back(backend_.allocate_tensor(shape, DType::f32));
  }
  if (solved) {
    stream.solver = std::make_unique<Solver>(backend_, settings_.scheduler, settings_.schedule, shape);
  }
  return stream;
}

void Run::start(NormalGenerator* noise, bool noise_bf16, std::span<const float> latents) {
  const auto draw = [&](Stream& stream) {
    std::vector<float> values;
    if (noise != nullptr) {
      values.resize(static_cast<size_t>(stream.sample.view.numel()));
      noise_bf16 ? noise->fill_bf16(values) : noise->fill(values);
    }
    upload(stream.sample.view, values);
  };
  const Settings& s = settings_;
  const TransformerConfig& config = networks_.transformer.config();
  vision_ = make_stream({config.latent_channel, s.latent_frames, s.latent_height, s.latent_width},
                        s.any_noisy_frame());
  draw(vision_);
  keep_conditioned(vision_.sample.view);
  if (!latents.empty()) upload(vision_.sample.view, latents);
  if (s.sound_frames > 0) {
    sound_ = make_stream({config.sound_dim, s.sound_frames}, true);
    draw(sound_);
  }
  if (s.action) {
    action_ = make_stream({s.action->chunk, config.action_dim}, s.action->noisy);
    draw(action_);  // forward dynamics draws too: the generator advances
    if (s.action->noisy) mask_action(action_.sample.view);
    else upload(action_.sample.view, s.action->clean);
  }
}

// Conditioned frames hold their clean latents, exactly, at every step.
void Run::keep_conditioned(MutView latents) {
  if (!clean_) return;
  for (int64_t t = 0; t < settings_.latent_frames; ++t) {
    if (settings_.noisy[static_cast<size_t>(t)]) continue;
    backend_.copy(latents.slice(1, t, 1), clean_.view.slice(1, t, 1));
  }
}

// Channels past the embodiment's raw width are 0 in samples and velocities.
void Run::mask_action(MutView action) {
  const int64_t raw = settings_.action->raw_width;
  if (raw < action.dim(1)) backend_.fill(action.slice(1, raw, action.dim(1) - raw), 0);
}

GenInput Run::input(float timestep) const {
  GenInput in;
  in.target = {vision_.sample.view, settings_.noisy};
  if (sound_) in.sound = sound_.sample.view;
  if (action_) {
    in.action = action_.sample.view;
    in.action_noisy.assign(static_cast<size_t>(settings_.action->chunk), settings_.action->noisy);
    in.action_domain = settings_.action->domain;
  }
  in.timestep = timestep;
  return in;
}

void Run::evaluate(size_t b, float timestep) {
  GenOutput out{vision_.velocity[b].view, {}, {}};
  if (sound_) out.sound = sound_.velocity[b].view;
  if (action_) out.action = action_.velocity[b].view;
  attention_.begin_branch(static_cast<int>(b));
  networks_.transformer.velocity(arena_, out, input(timestep), branches_[b].und, branches_[b].rope, attention_);
}

void Run::step(int i, NormalGenerator* noise) {
  const float timestep = settings_.schedule.timesteps[static_cast<size_t>(i)];
  attention_.begin_step(i, settings_.schedule.num_steps());
  for (size_t b = 0; b < branches_.size(); ++b) evaluate(b, timestep);

  const auto guidance = static_cast<float>(settings_.guidance_scale);
  for (Stream* stream : {&vision_, &sound_, &action_}) {
    if (!*stream || branches_.size() < 2) continue;
    const MutView v = stream->velocity[0].view;
    backend_.lincomb(v, {{guidance, v}, {1.0f - guidance, stream->velocity[1].view}});
  }
  if (action_) mask_action(action_.velocity[0].view);
  if (!backend_.is_dry()) require_finite(i, timestep);

  Tensor fresh;
  if (settings_.scheduler.kind == SchedulerConfig::Kind::flow_match_euler &&
      settings_.scheduler.stochastic_sampling) {
    // Drawn at every step, the last included, so that the generator stays where the reference has it.
    fresh = backend_.allocate_tensor(vision_.sample.view.shape, DType::f32);
    std::vector<float> values;
    if (noise != nullptr) {
      values.resize(static_cast<size_t>(fresh.view.numel()));
      noise->fill(values);
    }
    upload(fresh.view, values);
  }
  for (Stream* stream : {&vision_, &sound_, &action_}) {
    if (!*stream || !stream->solver) continue;
    stream->solver->step(i, stream->sample.view, stream->velocity[0].view, fresh.view);
  }
  keep_conditioned(vision_.sample.view);
  if (action_ && settings_.action->noisy) mask_action(action_.sample.view);
}

void Run::require_finite(int i, float timestep) {
  for (const Stream* stream : {&vision_, &sound_, &action_}) {
    if (!*stream) continue;
    const View v = stream->velocity[0].view;
    host_check_.resize(static_cast<size_t>(v.numel()));
    backend_.download(make_mut_view(host_check_.data(), v.shape, DType::f32), v);
    if (!all_finite(host_check_)) name_non_finite(i, timestep);
  }
}

// Runs the step again with a probe after every layer: slow, but it happens once, before giving up.
void Run::name_non_finite(int i, float timestep) {
  std::string where;
  Transformer& transformer = networks_.transformer;
  const char* branch_name = "";
  transformer.set_probe([&](Tower tower, int layer, View hidden) {
    if (!where.empty()) return;
    Tensor values = backend_.allocate_tensor(hidden.shape, DType::f32);
    backend_.copy(values.view, hidden);
    if (all_finite(download(values.view))) return;
    where = concat("layer ", layer, " of the ", tower == Tower::und ? "text" : "generation", " tower, ",
                   branch_name, " branch");
  });
  for (size_t b = 0; b < branches_.size() && where.empty(); ++b) {
    branch_name = b == 0 ? "conditional" : "unconditional";
    transformer.prefill(arena_, branches_[b].ids);
    if (where.empty()) evaluate(b, timestep);
  }
  transformer.set_probe({});
  fail(ErrorKind::numeric, "step ", i, " (timestep ", timestep, "): the velocity is not finite; first seen after ",
       where.empty() ? "the output head or the guidance sum" : where,
       ". The weights are damaged or overflow in ", name_of(transformer.dtype()),
       "; nothing was written");
}

void Run::decode(const Vae::FrameSink& sink) { networks_.vae.decode(arena_, vision_.sample.view, tiling_, sink); }

std::vector<std::vector<float>> Run::decode_sound() {
  if (!sound_) return {};
  const SoundConfig& config = networks_.sound->config();
  const int64_t samples = config.hop_size * settings_.sound_frames;
  std::vector<float> host(static_cast<size_t>(config.out_channels * samples));
  networks_.sound->decode(arena_, make_mut_view(host.data(), {config.out_channels, samples}, DType::f32),
                          sound_.sample.view);
  std::vector<std::vector<float>> channels;
  for (int64_t c = 0; c < config.out_channels; ++c) {
    channels.emplace_back(host.begin() + c * samples, host.begin() + (c + 1) * samples);
  }
  return channels;
}

void Run::upload(MutView out, std::span<const float> host) {
  require(backend_.is_dry() || static_cast<int64_t>(host.size()) == out.numel(), "upload: ", host.size(),
          " values for ", out.shape);
  backend_.upload(out, make_view(host.data(), out.shape, DType::f32));
}

std::vector<float> Run::download(View x) const {
  std::vector<float> host(static_cast<size_t>(x.numel()));
  backend_.download(make_mut_view(host.data(), x.shape, DType::f32), x);
  return host;
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
