#include "engine/run.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/error.h"
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

}  // namespace

Run::Run(Networks networks, Arena& arena, const Settings& settings,
         const AttentionStrategy& strategy, std::vector<std::vector<int64_t>> ids, VaeTiling tiling,
         const MeshGroups* groups)
    : networks_(networks),
      backend_(networks.transformer.backend()),
      arena_(arena),
      settings_(settings),
      tiling_(tiling),
      groups_(groups),
      cfg_(groups != nullptr ? groups->cfg.get() : nullptr),
      attention_(backend_, strategy,
                 make_sequence(settings, networks.transformer, strategy.token_order(), true),
                 networks.transformer.config().head_dim,
                 groups != nullptr ? groups->cp.get() : nullptr),
      conditioning_(settings.conditioning) {
  for (auto& list : ids) branches_.push_back({std::move(list), {}});
  contexts_.push_back({"conditional", 0, true, 1.0, {}});
  if (settings.transfer) {
    if (!settings.transfer->weights.empty())
      attention_.set_control_weights(settings.transfer->weights);
    controls_.resize(settings.transfer->hints.size());
    if (settings.transfer->amplifies()) {
      plain_attention_.emplace(
          backend_, strategy,
          make_sequence(settings, networks.transformer, strategy.token_order(), false),
          networks.transformer.config().head_dim, groups != nullptr ? groups->cp.get() : nullptr);
      contexts_.push_back({"control-free", 0, false, 0.0, {}});
    }
  }
  if (branches_.size() > 1) contexts_.push_back({"unconditional", 1, true, 0.0, {}});
}

Attention& Run::attention_of(const Context& context) {
  return context.sees_controls ? attention_ : *plain_attention_;
}

// The rank of the guidance group that evaluates a context.
int Run::owner(size_t context) const {
  return cfg_ != nullptr ? static_cast<int>(context) % cfg_->size() : 0;
}

bool Run::is_mine(size_t context) const {
  return cfg_ == nullptr || owner(context) == cfg_->rank();
}

void Run::with_text(const std::function<void()>& body) const {
  if (networks_.with_text)
    networks_.with_text(body);
  else
    body();
}

std::vector<Transformer::Prompt> Run::prompts() {
  std::vector<bool> needed(branches_.size(), false);
  for (size_t c = 0; c < contexts_.size(); ++c) {
    if (is_mine(c)) needed[contexts_[c].branch] = true;
  }
  std::vector<Transformer::Prompt> prompts;
  for (size_t b = 0; b < branches_.size(); ++b) {
    if (needed[b]) prompts.push_back({static_cast<int>(b), branches_[b].ids, &branches_[b].und});
  }
  return prompts;
}

void Run::read_text() {
  with_text([&] {
    Transformer& transformer = networks_.transformer;
    Transformer::TextPass(transformer, arena_, prompts(), attention_)
        .advance_to(transformer.last_layer());
  });
  text_waits_ = false;
}

void Run::prefill(Text when) {
  Transformer& transformer = networks_.transformer;
  const TransformerConfig& config = transformer.config();
  const int64_t temporal = networks_.vae.config().scale_factor_temporal;
  if (when == Text::now)
    read_text();
  else
    text_waits_ = true;
  for (size_t c = 0; c < contexts_.size(); ++c) {
    if (!is_mine(c)) continue;
    Context& context = contexts_[c];
    const Sequence& sequence = attention_of(context).sequence();
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
    context.rope = transformer.make_rope(positions, attention_of(context));
  }
}

void Run::condition(Conditioning conditioning) {
  conditioning_ = std::move(conditioning);
  clean_ = {};
}

bool Run::any_noisy_frame() const {
  const std::vector<bool>& noisy = conditioning_.noisy;
  return std::find(noisy.begin(), noisy.end(), true) != noisy.end();
}

// Latents of the whole canvas.
Tensor Run::encode_clip(std::span<const float> pixels, int64_t frames) {
  const VaeConfig& vae = networks_.vae.config();
  const int64_t h = settings_.canvas_height, w = settings_.canvas_width;
  Tensor input = backend_.allocate_tensor({3, frames, h, w}, DType::f32);
  upload(input.view, pixels);
  Tensor canvas =
      backend_.allocate_tensor({vae.z_dim, vae.latent_frames(frames), h / vae.scale_factor_spatial,
                                w / vae.scale_factor_spatial},
                               DType::f32);
  networks_.vae.encode(arena_, canvas.view, input.view, tiling_);
  return canvas;
}

void Run::encode(std::span<const float> pixels) {
  if (conditioning_.encoded_frames == 0) return;
  const Tensor canvas = encode_clip(pixels, conditioning_.encoded_frames);
  const View& z = canvas.view;
  clean_ = backend_.allocate_tensor(
      {z.dim(0), z.dim(1), settings_.latent_height, settings_.latent_width}, DType::f32);
  backend_.copy(clean_.view,
                z.slice(2, 0, settings_.latent_height).slice(3, 0, settings_.latent_width));
}

void Run::encode_control(size_t i, std::span<const float> pixels) {
  controls_.at(i) = encode_clip(pixels, settings_.transfer->chunk);
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

void Run::start(NormalGenerator* noise, NoiseType stream, std::span<const float> latents) {
  backend_.forget_replays();  // what they name is made anew
  if (!time_)
    time_ = backend_.allocate_tensor({networks_.transformer.config().hidden_size},
                                     networks_.transformer.dtype());
  const auto draw = [&](Stream& modality) {
    std::vector<float> values;
    if (noise != nullptr) {
      values.resize(static_cast<size_t>(modality.sample.view.numel()));
      noise->fill(values, stream);
    }
    upload(modality.sample.view, values);
  };
  const Settings& s = settings_;
  const TransformerConfig& config = networks_.transformer.config();
  vision_ = make_stream({config.latent_channel, s.latent_frames, s.latent_height, s.latent_width},
                        any_noisy_frame());
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

GenInput Run::input(bool with_controls) const {
  GenInput in;
  in.target = {vision_.sample.view, conditioning_.noisy};
  if (with_controls) {
    const std::vector<bool> clean(conditioning_.noisy.size(), false);
    for (const Tensor& control : controls_) in.controls.push_back({control.view, clean});
  }
  if (sound_) in.sound = sound_.sample.view;
  if (action_) {
    in.action = action_.sample.view;
    in.action_noisy.assign(static_cast<size_t>(settings_.action->chunk), settings_.action->noisy);
    in.action_domain = settings_.action->domain;
  }
  return in;
}

void Run::set_timestep(float timestep) {
  networks_.transformer.embed_time(arena_, time_.view, timestep);
}

// Of the timestep that was set.
Transformer::Evaluation Run::evaluation_of(size_t index) {
  Context& context = contexts_[index];
  GenOutput out{vision_.velocity[index].view, {}, {}};
  if (sound_) out.sound = sound_.velocity[index].view;
  if (action_) out.action = action_.velocity[index].view;
  return {static_cast<int>(index),        out,           input(context.sees_controls),
          &branches_[context.branch].und, &context.rope, &attention_of(context)};
}

std::vector<Transformer::Evaluation> Run::evaluations_of(std::span<const size_t> contexts) {
  std::vector<Transformer::Evaluation> evaluations;
  for (size_t c : contexts) evaluations.push_back(evaluation_of(c));
  return evaluations;
}

std::vector<std::span<const size_t>> Run::passes_of(std::span<const size_t> contexts) {
  const size_t at_once =
      networks_.transformer.stacks(evaluations_of(contexts)) ? contexts.size() : 1;
  std::vector<std::span<const size_t>> passes;
  for (size_t n = 0; n < contexts.size(); n += at_once)
    passes.push_back(contexts.subspan(n, at_once));
  return passes;
}

void Run::evaluate(std::span<const size_t> contexts, bool may_replay) {
  Transformer& transformer = networks_.transformer;
  const auto evaluation = [&] {
    Transformer::GenPass pass(transformer, arena_, evaluations_of(contexts), time_.view);
    pass.advance_to(transformer.last_layer());
    pass.finish();
  };
  std::string key = "contexts";
  for (size_t c : contexts) key += concat(" ", c);
  if (may_replay && replays_)
    attention_of(contexts_[contexts.front()]).replay(key, evaluation);
  else
    evaluation();
}

void Run::evaluate_with_text(std::span<const size_t> contexts) {
  Transformer& transformer = networks_.transformer;
  with_text([&] {
    const Arena::Scope scope(arena_);
    Transformer::TextPass text(transformer, arena_, prompts(), attention_);
    std::vector<std::unique_ptr<Transformer::GenPass>> passes;
    for (std::span<const size_t> together : passes_of(contexts)) {
      passes.push_back(std::make_unique<Transformer::GenPass>(
          transformer, arena_, evaluations_of(together), time_.view));
    }
    for (int layer = 0; layer <= transformer.last_layer(); ++layer) {
      text.advance_to(layer);
      for (const auto& pass : passes) pass->advance_to(layer);
    }
    for (const auto& pass : passes) pass->finish();
    // Passes end in the reverse order of their beginning.
    while (!passes.empty()) passes.pop_back();
  });
  text_waits_ = false;
}

void Run::exercise(int layout) {
  if (text_waits_) read_text();
  attention_.begin_layout(layout);
  if (plain_attention_) plain_attention_->begin_layout(layout);
  set_timestep(settings_.schedule.timesteps.front());
  for (size_t c = 0; c < contexts_.size(); ++c) {
    if (is_mine(c)) evaluate({&c, 1}, false);
  }
}

// Every rank of the guidance group gets what the others have evaluated: from here on all do the
// same.
void Run::share_velocities(const std::function<bool(size_t)>& counts) {
  if (cfg_ == nullptr || backend_.is_dry()) return;
  for (Stream* stream : {&vision_, &sound_, &action_}) {
    if (!*stream) continue;
    for (size_t c = 0; c < contexts_.size(); ++c) {
      if (counts(c)) cfg_->broadcast(stream->velocity[c].view, owner(c));
    }
  }
}

// What each context's velocity counts in the guided one.
void Run::set_factors(float timestep) {
  GuidanceFactors factors;
  if (settings_.transfer) {
    factors = transfer_guidance(settings_, static_cast<double>(timestep));
  } else if (branches_.size() > 1) {
    factors = {settings_.guidance_scale, 0, 1.0 - settings_.guidance_scale};
  }
  for (Context& context : contexts_) {
    context.factor = !context.sees_controls ? factors.plain
                     : context.branch == 0  ? factors.full
                                            : factors.negative;
  }
}

void Run::step(int i, NormalGenerator* noise) {
  const float timestep = settings_.schedule.timesteps[static_cast<size_t>(i)];
  set_factors(timestep);
  attention_.begin_step(i, settings_.schedule.num_steps());
  if (plain_attention_) plain_attention_->begin_step(i, settings_.schedule.num_steps());
  // A dry run sizes the step that evaluates everything.
  const auto counts = [&](size_t c) {
    return c == 0 || contexts_[c].factor != 0 || backend_.is_dry();
  };
  set_timestep(timestep);
  std::vector<size_t> counted;
  for (size_t c = 0; c < contexts_.size(); ++c) {
    if (counts(c) && is_mine(c)) counted.push_back(c);
  }
  if (text_waits_) {
    evaluate_with_text(counted);
  } else {
    for (std::span<const size_t> together : passes_of(counted)) evaluate(together, true);
  }
  share_velocities(counts);
  for (Stream* stream : {&vision_, &sound_, &action_}) {
    if (!*stream || contexts_.size() < 2) continue;
    std::vector<Term> terms;
    for (size_t c = 0; c < contexts_.size(); ++c) {
      if (counts(c))
        terms.push_back({static_cast<float>(contexts_[c].factor), stream->velocity[c].view});
    }
    backend_.lincomb(stream->velocity[0].view, terms);
  }
  if (action_) mask_action(action_.velocity[0].view);
  if (!backend_.is_dry()) require_finite(i, timestep);

  Tensor fresh;
  if (settings_.scheduler.kind == SchedulerConfig::Kind::flow_match_euler &&
      settings_.scheduler.stochastic_sampling) {
    // Drawn at every step, the last included, so that the generator stays where the reference has
    // it.
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
    if (!backend_.all_finite(stream->velocity[0].view)) name_non_finite(i, timestep);
  }
}

// The lowest of the values that the ranks of this run bring.
float Run::lowest_of_ranks(float value) const {
  if (everyone() == nullptr) return value;
  const Tensor mine = backend_.allocate_tensor({1}, DType::f32);
  const Tensor all = backend_.allocate_tensor({everyone()->size()}, DType::f32);
  backend_.fill(mine.view, value);
  everyone()->all_gather(all.view, mine.view);
  const std::vector<float> values = download(all.view);
  return *std::min_element(values.begin(), values.end());
}

float Run::first_non_finite(size_t context) {
  Transformer& transformer = networks_.transformer;
  const int layers = transformer.last_layer() + 1;
  float first = INFINITY;
  const auto look = [&](int place, View hidden) {
    if (first == INFINITY && !backend_.all_finite(hidden)) first = static_cast<float>(place);
  };
  const Context& of = contexts_[context];
  with_text([&] {
    UndCache unused;
    const Transformer::Prompt prompt{static_cast<int>(of.branch), branches_[of.branch].ids,
                                     &unused};
    Transformer::TextPass pass(transformer, arena_, {&prompt, 1}, attention_,
                               Transformer::LastTextLayer::whole);
    for (int layer = 0; layer < layers; ++layer) {
      pass.advance_to(layer);
      look(layer, pass.hidden(0));
    }
  });
  const std::array<size_t, 1> alone{context};
  Transformer::GenPass pass(transformer, arena_, evaluations_of(alone), time_.view);
  for (int layer = 0; layer < layers; ++layer) {
    pass.advance_to(layer);
    // Padding holds anything.
    look(layers + layer, pass.hidden(0).slice(0, 0, attention_of(of).share().rows));
  }
  return first;
}

// Runs the step again and looks at every layer: slow, but it happens once, before giving up. Ranks
// that share the run evaluate in step, whatever each has found.
void Run::name_non_finite(int i, float timestep) {
  const Transformer& transformer = networks_.transformer;
  const int layers = transformer.last_layer() + 1;
  // Context, tower and layer as one number, in the order they run.
  float first = INFINITY;
  for (size_t c = 0; c < contexts_.size(); ++c) {
    if ((c > 0 && contexts_[c].factor == 0) || !is_mine(c)) continue;
    first = std::min(first,
                     static_cast<float>(2 * layers) * static_cast<float>(c) + first_non_finite(c));
  }
  first = lowest_of_ranks(first);
  std::string where = "the output head or the guidance sum";
  if (first != INFINITY) {
    const auto place = static_cast<int>(first);
    where = concat("layer ", place % layers, " of the ",
                   place / layers % 2 == 0 ? "text" : "generation", " tower, ",
                   contexts_[static_cast<size_t>(place / layers / 2)].name, " branch");
  }
  fail(ErrorKind::numeric, "step ", i, " (timestep ", timestep,
       "): the velocity is not finite; first seen after ", where,
       ". The weights are damaged or overflow in ", name_of(transformer.dtype()),
       "; nothing was written");
}

void Run::decode(const Vae::FrameSink& sink) {
  backend_.forget_replays();  // they hold on to the backend's scratch memory
  networks_.vae.decode(arena_, vision_.sample.view, tiling_, sink, everyone());
}

bool Run::shares_decode() const {
  return networks_.vae.shares_decode(settings_.latent_height, settings_.latent_width, tiling_,
                                     everyone());
}

std::vector<std::vector<float>> Run::decode_sound() {
  if (!sound_) return {};
  const SoundConfig& config = networks_.sound->config();
  const int64_t samples = config.hop_size * settings_.sound_frames;
  std::vector<float> host(static_cast<size_t>(config.out_channels * samples));
  networks_.sound->decode(arena_,
                          make_mut_view(host.data(), {config.out_channels, samples}, DType::f32),
                          sound_.sample.view);
  std::vector<std::vector<float>> channels;
  for (int64_t c = 0; c < config.out_channels; ++c) {
    channels.emplace_back(host.begin() + c * samples, host.begin() + (c + 1) * samples);
  }
  return channels;
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
