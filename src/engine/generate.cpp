// A request on one rank: the engine's walk through its stages.
#include <optional>

#include "base/error.h"
#include "engine/backends.h"
#include "engine/guardrail.h"
#include "engine/rank_state.h"
#include "engine/ranks.h"
#include "engine/report.h"
#include "engine/run.h"
#include "engine/teller.h"
#include "orrery/version.h"

namespace orrery {

namespace {

// What a run allocates beside the weights that are there already.
int64_t needed(const Plan& plan) { return plan.peak_bytes - plan.resident_weight_bytes; }

// A request may be checked and planned without pixels, but not run.
void require_pixels(const Request& request) {
  const auto check = [](const char* what, const Frames& frames) {
    const int64_t bytes = frames.count * frames.height * frames.width * 3;
    require(std::ssize(frames.rgb) == bytes, what, ": ", frames.count, " frames of ", frames.width,
            "x", frames.height, " are ", bytes, " bytes of RGB, but ", frames.rgb.size(),
            " are given");
  };
  if (request.image) check("image", *request.image);
  if (request.video) check("video", *request.video);
  if (!request.transfer) return;
  for (const Control& control : request.transfer->controls) check("control video", control.video);
}

class Generation {
 public:
  Generation(RankState& state, const Request& request, int64_t available, const Events& events,
             std::stop_token stop);
  Result run();

 private:
  // Rank 0 speaks for all: it asks the guardrail, decodes what comes out and writes the report.
  bool leads() const { return state_.groups.leads(); }
  bool takes_part(const Stage& stage) const;
  bool is_shared(const Stage& stage) const;
  void perform(const Stage& stage);
  void prepare();
  Measured measure_within(const std::vector<std::vector<int64_t>>& ids, Placement& placement);
  void warm_up(const Stage& stage);
  void check_frames();
  void keep(const uint8_t* rgb, int64_t count);
  void tell_frames(int64_t first, int64_t count) const;
  void finish();

  RankState& state_;
  Backend& backend_;
  const Request& request_;
  const Events& events_;
  int64_t available_;
  Settings settings_;
  Guardrail guardrail_;
  std::vector<Stage> stages_;
  Teller teller_;
  RunHooks hooks_;
  RunRecord record_;
  Result result_;
  std::optional<Arena> arena_;
  std::optional<Run> run_;
  std::optional<ModelWeights::Use> generation_;  // the tower's weights
};

Generation::Generation(RankState& state, const Request& request, int64_t available,
                       const Events& events, std::stop_token stop)
    : state_(state),
      backend_(*state.backend),
      request_(request),
      events_(events),
      available_(available),
      settings_(resolve(request, state.checkpoint())),
      guardrail_(state.options.guardrail, state.options.guardrail_timeout),
      stages_(stages_of(settings_, {guardrail_.is_set(), !state.weights->has(Part::generation),
                                    state.warms_up()})),
      teller_(backend_, events.progress, StopWish(std::move(stop), state.groups.agreement.get()),
              Forecast(stages_, state.rates,
                       [this](int64_t step) {
                         return state_.strategy.layout_at(static_cast<int>(step),
                                                          settings_.schedule.num_steps());
                       }),
              settings_.chunks()) {
  check_mesh(state.options, state.checkpoint().transformer, &settings_);
  require_pixels(request);
  for (const std::string& sentence : settings_.notices) state.notice(sentence);
  require(!guardrail_.is_set() || state.options.safety_check,
          "a guardrail is given and the safety check is switched off; leave one of them out");
  if (!guardrail_.is_set() && state.options.safety_check &&
      state.checkpoint().folder.enable_safety_checker) {
    state.notice(
        concat("no guardrail is set (--guardrail): the licence of this model asks for one; the "
               "check is recorded as ",
               kGuardrailSkipped));
  }
  hooks_.unit = [this](int64_t units) { teller_.finished(units); };
  hooks_.pause = [this] { teller_.pause(); };
  if (leads()) hooks_.frames = [this](const uint8_t* rgb, int64_t count) { keep(rgb, count); };
  result_.frames.height = settings_.height;
  result_.frames.width = settings_.width;
}

Result Generation::run() {
  for (const Stage& stage : stages_) {
    if (takes_part(stage)) teller_.run(stage, is_shared(stage), [&] { perform(stage); });
  }
  state_.rates = teller_.rates();
  backend_.set_profiling(false);
  if (!leads()) return {};
  finish();
  return std::move(result_);
}

bool Generation::is_shared(const Stage& stage) const {
  switch (stage.kind) {
    case StageKind::check_prompt:
    case StageKind::sound:
    case StageKind::check_frames: return false;
    // The ranks decode together where they can. What the next chunk continues is wanted on every
    // rank, what comes out on rank 0 alone.
    case StageKind::decode: return run_->shares_decode() || run_->continues(stage.chunk);
    default: return true;
  }
}

bool Generation::takes_part(const Stage& stage) const { return leads() || is_shared(stage); }

void Generation::perform(const Stage& stage) {
  switch (stage.kind) {
    case StageKind::check_prompt:
      return guardrail_.check_prompt(request_, [this] { teller_.wait(); });
    case StageKind::check_frames: return check_frames();
    case StageKind::load:
      generation_.emplace(*state_.weights, Part::generation, hooks_.pause);
      return;
    case StageKind::prompt: prepare(); return run_->perform(stage, hooks_);
    case StageKind::warm_up: return warm_up(stage);
    case StageKind::denoise:
      if (!generation_) generation_.emplace(*state_.weights, Part::generation);
      run_->perform(stage, hooks_);
      generation_.reset();
      return;
    case StageKind::encode:
    case StageKind::decode: {
      const ModelWeights::Use vae(*state_.weights, Part::vae);
      return run_->perform(stage, hooks_);
    }
    case StageKind::noise: return run_->perform(stage, hooks_);
    case StageKind::sound:
      run_->perform(stage, hooks_);
      result_.sound = run_->take_sound();
      result_.sampling_rate = state_.checkpoint().sound->sampling_rate;
      return;
  }
}

// The plan of the request; when whole frames have no room, with the VAE in tiles.
Measured Generation::measure_within(const std::vector<std::vector<int64_t>>& ids,
                                    Placement& placement) {
  const auto measured = [&] {
    return measure(state_.checkpoint(), settings_, state_.strategy, ids, placement);
  };
  placement.budget = available_ + state_.weights->resident_bytes();
  Measured found = measured();
  const auto room = [&] { return available_ + state_.weights->freed_by(found.plan.text_stays); };
  if (needed(found.plan) > room() && !placement.tiling.enabled && state_.groups.mesh.world() == 1) {
    placement.tiling.enabled = true;
    const int64_t whole = needed(found.plan);
    found = measured();
    state_.notice(concat("the VAE works in tiles: whole frames would need ", whole / 1000000,
                         " MB, ", room() / 1000000, " are free"));
  }
  require(needed(found.plan) <= room(), ErrorKind::out_of_memory, "this request needs ",
          needed(found.plan) / 1000000, " MB beside the weights, but ", room() / 1000000,
          " are free; ask for fewer frames or a smaller size",
          backend_.device() == DeviceKind::cpu ? "" : ", or use --offload model or layer");
  return found;
}

// Everything that the run stands on, sized by a dry run.
void Generation::prepare() {
  auto ids = prompt_lists(state_.checkpoint(), state_.files->tokenizer, settings_);
  record_.text_tokens = static_cast<int64_t>(ids.front().size());
  if (ids.size() > 1) record_.negative_tokens = static_cast<int64_t>(ids.back().size());
  Placement placement = state_.placement(request_);
  Measured measured = measure_within(ids, placement);
  const Plan& plan = measured.plan;
  teller_.set_costs(std::move(measured.costs));
  result_.memory.arena = plan.activation_bytes;
  result_.memory.weights = plan.weight_bytes;
  result_.memory.resident_weights = plan.resident_weight_bytes;
  result_.memory.pinned = plan.pinned_bytes;
  result_.memory.text_stays = plan.text_stays;
  state_.weights->keep_text(plan.text_stays);
  arena_.emplace(backend_.allocate(static_cast<size_t>(plan.activation_bytes)));
  const auto with_text = [&weights = *state_.weights](const std::function<void()>& body) {
    const ModelWeights::Use text(weights, Part::text);
    body();
  };
  RunOptions options;
  options.tiling = placement.tiling;
  options.groups = &state_.groups;
  options.text_with_first_step = text_runs_with_first_step(backend_.device());
  options.replays = state_.options.graphs && state_.offload() != Offload::layer &&
                    state_.groups.mesh.world() == 1;
  options.records = true;
  options.num_threads = cpu_threads(state_.options);
  run_.emplace(Networks{*state_.transformer, *state_.vae, state_.sound.get(), with_text}, *arena_,
               RunInputs{settings_, state_.strategy, std::move(ids), &request_}, options);
  record_.generation_tokens = run_->attention().sequence().size();
  backend_.set_profiling(state_.options.profile);
  if (leads()) {
    result_.frames.rgb.reserve(
        static_cast<size_t>(settings_.frames * settings_.height * settings_.width * 3));
  }
}

void Generation::warm_up(const Stage& stage) {
  try {
    run_->perform(stage, hooks_);
  } catch (const std::exception&) {
    state_.notice("warm-up: " + run_->warm_up().summary());
    throw;
  }
}

void Generation::keep(const uint8_t* rgb, int64_t count) {
  Frames& frames = result_.frames;
  frames.rgb.insert(frames.rgb.end(), rgb, rgb + count * frames.height * frames.width * 3);
  frames.count += count;
  // Nobody sees what the guardrail has not approved.
  if (!guardrail_.is_set()) tell_frames(frames.count - count, count);
}

void Generation::tell_frames(int64_t first, int64_t count) const {
  const Frames& frames = result_.frames;
  if (events_.frames)
    events_.frames({first, count, frames.height, frames.width, frames.frame(first)});
}

void Generation::check_frames() {
  guardrail_.check_frames(result_.frames, settings_.fps, [this] { teller_.wait(); });
  tell_frames(0, result_.frames.count);
}

void Generation::finish() {
  const Checkpoint& checkpoint = state_.checkpoint();
  result_.fps = settings_.fps;
  result_.latents = {{1, checkpoint.vae.z_dim, settings_.latent_frames, settings_.latent_height,
                      settings_.latent_width},
                     run_->latents()};
  if (std::vector<float> action = run_->action(); !action.empty()) {
    result_.action =
        FloatTensor{{settings_.action->chunk, settings_.action->raw_width}, std::move(action)};
  }
  result_.times = teller_.times();
  result_.times.open_seconds = state_.open_seconds;
  result_.memory.peak_resident = peak_resident_bytes();
  const MemoryState device = backend_.memory();
  result_.memory.device_peak = device.peak;
  result_.memory.device_free = device.free;
  result_.memory.device_total = device.total;

  record_.times = result_.times;
  record_.memory = result_.memory;
  record_.offload = name_of(state_.options.offload);
  record_.mesh = state_.groups.mesh;
  record_.device = backend_.description();
  record_.dtype = name_of(state_.dtype);
  record_.attention_source = state_.strategy.source();
  record_.lora = state_.options.lora;
  record_.engine = engine_json(state_.files->path, state_.options);
  record_.operations = teller_.operations();
  record_.dispatch = run_->dispatch();
  record_.evaluations = run_->evaluation_names();
  record_.load = state_.weights->load_time();
  record_.warm_up = warm_up_json(run_->warm_up(), state_.strategy);
  record_.guardrail = guardrail_.is_set()           ? kGuardrailApproved
                      : state_.options.safety_check ? kGuardrailSkipped
                                                    : kGuardrailDeclined;
  result_.attention = attention_use(record_.dispatch);
  result_.report = report_json(request_, settings_, record_).dump(1);
  result_.metadata = {{"comment", metadata_json(request_, settings_, record_).dump()},
                      {"encoder_engine", "orrery " + version()}};
}

}  // namespace

Result generate(RankState& state, const Request& request, int64_t available, const Events& events,
                std::stop_token stop) {
  return Generation(state, request, available, events, std::move(stop)).run();
}

}  // namespace orrery
