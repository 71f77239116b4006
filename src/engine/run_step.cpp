// The denoising of a run: evaluations, guidance and solver steps.
#include <algorithm>
#include <array>
#include <cmath>

#include "base/error.h"
#include "engine/run.h"
#include "engine/transfer.h"

namespace orrery {

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
    Transformer::TextPass pass(transformer, arena_, prompts(), attention_);
    for (int layer = 0; layer <= transformer.last_layer(); ++layer) {
      pause();
      pass.advance_to(layer);
    }
  });
  text_waits_ = false;
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
  const bool replays = may_replay && options_.replays;
  const auto evaluation = [&] {
    Transformer::GenPass pass(transformer, arena_, evaluations_of(contexts), time_.view);
    for (int layer = 0; layer <= transformer.last_layer(); ++layer) {
      if (!replays) pause();
      pass.advance_to(layer);
    }
    pass.finish();
  };
  if (!replays) return evaluation();
  std::string key = "contexts";
  for (size_t c : contexts) key += concat(" ", c);
  if (precision_ == Precision::a16) key += " a16";
  attention_of(contexts_[contexts.front()]).replay(key, evaluation);
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
      pause();
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
  networks_.transformer.embed_time(arena_, time_.view, settings_.schedule.timesteps.front());
  for (size_t c = 0; c < contexts_.size(); ++c) {
    if (is_mine(c)) evaluate({&c, 1}, false);
  }
}

// What runs here is not part of the dispatch records.
void Run::warm_up_layouts() {
  set_recording(false);
  for (const WarmUpTarget& target : warm_up_.pending()) {
    warm_up_.exercise(target, [&] { exercise(target.layout); });
  }
  set_recording(options_.records);
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

// Evaluates the contexts that count and are this rank's.
void Run::evaluate_all(const std::function<bool(size_t)>& counts) {
  std::vector<size_t> counted;
  for (size_t c = 0; c < contexts_.size(); ++c) {
    if (counts(c) && is_mine(c)) counted.push_back(c);
  }
  if (text_waits_) return evaluate_with_text(counted);
  for (std::span<const size_t> together : passes_of(counted)) evaluate(together, true);
}

// The guided velocity, in place of the first context's.
void Run::combine(const std::function<bool(size_t)>& counts) {
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
}

void Run::solve(int i) {
  Tensor fresh;
  if (settings_.scheduler.kind == SchedulerConfig::Kind::flow_match_euler &&
      settings_.scheduler.stochastic_sampling) {
    // Drawn at every step, the last included, so that the generator stays where the reference has
    // it.
    fresh = backend_.allocate_tensor(vision_.sample.view.shape, DType::f32);
    std::vector<float> values;
    if (noise_) {
      values.resize(static_cast<size_t>(fresh.view.numel()));
      noise_->fill(values);
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

// Of 8-bit weights. A dry run sizes what needs most: products whose inputs are rounded first.
void Run::set_precision(Tower tower, Precision precision) {
  if (backend_.is_dry()) precision = Precision::native;
  networks_.transformer.set_precision(tower, precision);
  if (tower == Tower::gen) precision_ = precision;
}

void Run::step(int i) {
  const int num_steps = settings_.schedule.num_steps();
  const float timestep = settings_.schedule.timesteps[static_cast<size_t>(i)];
  set_factors(timestep);
  attention_.begin_step(i, num_steps);
  if (plain_attention_) plain_attention_->begin_step(i, num_steps);
  // A dry run sizes the step that evaluates everything.
  const auto counts = [&](size_t c) {
    return c == 0 || contexts_[c].factor != 0 || backend_.is_dry();
  };
  const StepPolicy& policy = networks_.transformer.config().quantisation.policy;
  set_precision(Tower::gen, policy.at(i, num_steps));
  networks_.transformer.embed_time(arena_, time_.view, timestep);
  evaluate_all(counts);
  share_velocities(counts);
  combine(counts);
  if (!backend_.is_dry()) require_finite(i, timestep);
  solve(i);
}

void Run::require_finite(int i, float timestep) {
  for (const Stream* stream : {&vision_, &sound_, &action_}) {
    if (!*stream) continue;
    if (!backend_.all_finite(stream->velocity[0].view)) name_non_finite(i, timestep);
  }
}

// The lowest of the values that the ranks of this run bring.
float Run::lowest_of_ranks(float value) const {
  Communicator* ranks = everyone();
  if (ranks == nullptr) return value;
  const Tensor mine = backend_.allocate_tensor({1}, DType::f32);
  const Tensor all = backend_.allocate_tensor({ranks->size()}, DType::f32);
  backend_.fill(mine.view, value);
  ranks->all_gather(all.view, mine.view);
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

}  // namespace orrery
