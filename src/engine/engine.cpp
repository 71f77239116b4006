#include "orrery/engine.h"

#include <chrono>
#include <cmath>

#include "attention/describe.h"
#include "base/error.h"
#include "engine/backends.h"
#include "engine/guardrail.h"
#include "engine/measure.h"
#include "engine/report.h"
#include "engine/run.h"
#include "engine/settings.h"
#include "model/lora.h"

namespace orrery {

namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string summary(const Settings& s) {
  std::string line = concat(name_of(s.mode), ", ", s.width, "x", s.height, ", ", s.frames,
                            s.frames == 1 ? " frame" : " frames at ");
  if (s.frames > 1) line += concat(s.fps, " fps");
  return line + concat(", ", s.schedule.num_steps(), " steps, guidance ", s.guidance_scale, ", seed ", s.seed,
                       ", sampler: ", s.scheduler_note);
}

uint8_t to_8bit(float value) {
  // [-1, 1] to [0, 255], half to even as the reference rounds.
  const float unit = std::min(std::max(value * 0.5f + 0.5f, 0.0f), 1.0f);
  return static_cast<uint8_t>(std::nearbyint(unit * 255.0f));
}

}  // namespace

struct Engine::State {
  std::filesystem::path path;
  EngineOptions options;
  Checkpoint checkpoint;
  Tokenizer tokenizer;
  std::unique_ptr<Backend> backend;
  DType dtype;
  AttentionStrategy strategy;
  std::unique_ptr<Transformer> transformer;
  std::unique_ptr<Vae> vae;
  std::unique_ptr<SoundDecoder> sound;
  WeightStore und_weights, gen_weights, vae_weights;
  double open_seconds = 0;

  State(const std::filesystem::path& model, const EngineOptions& given);
  void load();
  Placement placement(const Request& request) const;
  void notice(const std::string& sentence) const {
    if (options.log) options.log(sentence);
  }
};

Engine::State::State(const std::filesystem::path& model, const EngineOptions& given)
    : path(model),
      options(given),
      checkpoint(read_checkpoint(model)),
      tokenizer(Tokenizer::load(model / "text_tokenizer")),
      backend(make_backend(given)),
      dtype(activation_type(given, *backend)),
      strategy(strategy_of(checkpoint, given.attention)) {
  load();
}

void Engine::State::load() {
  transformer = std::make_unique<Transformer>(*backend, checkpoint.transformer, dtype);
  vae = std::make_unique<Vae>(*backend, checkpoint.vae, vae_options(backend->device(), dtype));

  // The CPU reads bf16 weights from the mapping; a device holds them in the type it computes in.
  LoadOptions of;
  if (backend->device() != DeviceKind::cpu) of.dtype = dtype;
  of.ignored = Transformer::is_unused;
  const Safetensors files = Safetensors::open_folder(path / "transformer");
  const VisitFunction und = [&](WeightVisitor& v) { transformer->visit_und(v); };
  const VisitFunction gen = [&](WeightVisitor& v) { transformer->visit_gen(v); };
  const VisitFunction both = [&](WeightVisitor& v) { und(v), gen(v); };
  std::vector<LoraAdapters::Source> sources;
  for (const LoraFile& lora : options.lora) sources.push_back({lora.file, lora.scale});
  const LoraAdapters adapters(sources, both);
  check_weights(files, both, of);
  if (!adapters.empty()) {
    of.adapt = [&](const std::string& name, const View& stored) { return adapters.merged(name, stored); };
  }
  und_weights = fill_weights(*backend, files, und, of);
  gen_weights = fill_weights(*backend, files, gen, of);

  of.ignored = {};
  of.adapt = {};
  vae_weights = load_weights(*backend, Safetensors::open_folder(path / "vae"),
                             [&](WeightVisitor& v) { vae->visit(v); }, of);
  if (checkpoint.sound && checkpoint.transformer.sound_gen) {
    sound = std::make_unique<SoundDecoder>(*backend, *checkpoint.sound,
                                           Safetensors::open_folder(path / "sound_tokenizer"));
  }
}

Placement Engine::State::placement(const Request& request) const {
  return {backend->device(), backend->fuses_weights(), dtype, {request.vae_tiling}};
}

Engine::Engine(std::unique_ptr<State> state) : state_(std::move(state)) {}
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;
Engine::~Engine() = default;

Engine Engine::open(const std::filesystem::path& model, const EngineOptions& options) {
  const auto start = Clock::now();
  auto state = std::make_unique<State>(model, options);
  state->open_seconds = seconds_since(start);
  return Engine(std::move(state));
}


std::string Engine::device_description() const { return state_->backend->description(); }
double Engine::open_seconds() const { return state_->open_seconds; }

std::string Engine::describe(const Request& request) const {
  return concat(summary(resolve(request, state_->checkpoint)), ", ", name_of(state_->dtype));
}

namespace {

double total_flops(const OpTable& table) {
  double flops = 0;
  for (const auto& [name, op] : table) flops += op.flops;
  return flops;
}

// Times stages, reports progress, and stops between units of work.
class Stages {
 public:
  Stages(Backend& backend, RunRecord& record, const ProgressCallback& progress, std::stop_token stop)
      : backend_(backend), record_(record), progress_(progress), stop_(std::move(stop)) {}

  template <typename Body>
  void run(const std::string& name, int64_t total, const Body& body) {
    name_ = name;
    total_ = total;
    start_ = Clock::now();
    backend_.reset_stats();
    report(0);
    body();
    backend_.synchronize();
    record_.stages.push_back({name, seconds_since(start_), total_flops(backend_.stats())});
    for (const auto& [op, stats] : backend_.stats()) {
      if (stats.seconds == 0) continue;
      OpStats& sum = record_.operations[op];
      sum.calls += stats.calls;
      sum.flops += stats.flops;
      sum.bytes += stats.bytes;
      sum.seconds += stats.seconds;
    }
    report(total);
  }
  void report(int64_t done) const {
    if (progress_) progress_({name_, done, total_, seconds_since(start_)});
    if (stop_.stop_requested()) fail(ErrorKind::cancelled, "stopped during ", name_, " (", done, " of ", total_, ")");
  }

 private:
  Backend& backend_;
  RunRecord& record_;
  const ProgressCallback& progress_;
  std::stop_token stop_;
  std::string name_;
  int64_t total_ = 0;
  Clock::time_point start_;
};

}  // namespace

Result Engine::generate(const Request& request, const ProgressCallback& progress, std::stop_token stop) {
  State& state = *state_;
  Backend& backend = *state.backend;
  const Settings settings = resolve(request, state.checkpoint);
  for (const std::string& sentence : settings.notices) state.notice(sentence);

  const Guardrail guardrail(state.options.guardrail, state.options.guardrail_timeout);
  if (!guardrail.is_set() && state.checkpoint.folder.enable_safety_checker) {
    state.notice("no guardrail is set (--guardrail): the licence of this model asks for one; the check is recorded as " +
                 std::string(kGuardrailSkipped));
  }

  RunRecord record;
  record.open_seconds = state.open_seconds;
  record.device = backend.description();
  record.dtype = name_of(state.dtype);
  record.attention_source = state.strategy.source();
  record.lora = state.options.lora;
  Stages stages(backend, record, progress, std::move(stop));
  const auto waiting = [&] { stages.report(0); };
  if (guardrail.is_set()) stages.run("guardrail", 1, [&] { guardrail.check_prompt(request, waiting); });

  Result result;
  std::optional<Arena> arena;
  std::optional<Run> run;
  std::optional<NormalGenerator> noise;
  stages.run("prompt", 1, [&] {
    auto ids = prompt_lists(state.checkpoint, state.tokenizer, settings);
    record.text_tokens = static_cast<int64_t>(ids.front().size());
    if (ids.size() > 1) record.negative_tokens = static_cast<int64_t>(ids.back().size());
    const Plan plan = measure(state.checkpoint, settings, state.strategy, ids, state.placement(request));
    record.arena_bytes = plan.activation_bytes;
    record.weight_bytes = state.und_weights.bytes() + state.gen_weights.bytes() + state.vae_weights.bytes();
    arena.emplace(backend.allocate(static_cast<size_t>(plan.activation_bytes)));
    run.emplace(Networks{*state.transformer, *state.vae, state.sound.get()}, *arena, settings, state.strategy,
                std::move(ids), VaeTiling{request.vae_tiling});
    run->attention().set_recording(true);
    record.generation_tokens = run->attention().sequence().size();
    backend.set_profiling(state.options.profile);
    run->prefill();
  });
  if (settings.encodes) {
    stages.run("encode", 1, [&] { run->encode(conditioning_pixels(request, settings)); });
  }
  const int steps = settings.schedule.num_steps();
  stages.run("denoise", steps, [&] {
    noise.emplace(request.rng == "cuda" ? RngKind::cuda : RngKind::cpu, settings.seed);
    run->start(&*noise, request.noise_dtype == "bf16", request.latents ? request.latents->values : std::vector<float>{});
    for (int i = 0; i < steps; ++i) {
      const auto begin = Clock::now();
      run->step(i, &*noise);
      record.step_seconds.push_back(seconds_since(begin));
      stages.report(i + 1);
    }
  });
  result.frames.height = settings.height;
  result.frames.width = settings.width;
  stages.run("decode", settings.frames, [&] {
    result.frames.rgb.reserve(static_cast<size_t>(settings.frames * settings.height * settings.width * 3));
    run->decode([&](View frames) {
      const float* pixels = frames.as<float>();
      for (int64_t i = 0; i < frames.numel(); ++i) result.frames.rgb.push_back(to_8bit(pixels[i]));
      result.frames.count += frames.dim(0);
      stages.report(result.frames.count);
    });
  });
  if (settings.sound_frames > 0) {
    stages.run("sound", 1, [&] { result.sound = run->decode_sound(); });
    result.sampling_rate = state.checkpoint.sound->sampling_rate;
  }
  backend.set_profiling(false);

  result.fps = settings.fps;
  if (guardrail.is_set()) {
    stages.run("guardrail", 1, [&] { guardrail.check_frames(result.frames, result.fps, waiting); });
  }
  record.guardrail = guardrail.is_set() ? kGuardrailApproved : kGuardrailSkipped;
  result.latents = {{1, state.checkpoint.vae.z_dim, settings.latent_frames, settings.latent_height,
                     settings.latent_width},
                    run->latents()};
  if (std::vector<float> action = run->action(); !action.empty()) {
    result.action = FloatTensor{{settings.action->chunk, settings.action->raw_width}, std::move(action)};
  }
  record.dispatch = run->attention().records();
  result.report = report_json(request, settings, record).dump(1);
  result.metadata = {{"comment", metadata_json(request, settings, record).dump()},
                     {"encoder_engine", "orrery " + version()}};
  return result;
}

Outline check_request(const std::filesystem::path& model, const Request& request) {
  const Checkpoint checkpoint = read_checkpoint(model);
  const Settings settings = resolve(request, checkpoint);
  prompt_lists(checkpoint, Tokenizer::load(model / "text_tokenizer"), settings);
  return {settings.frames, settings.height, settings.width, summary(settings)};
}

Plan plan_request(const std::filesystem::path& model, const Request& request, const EngineOptions& options) {
  const Checkpoint checkpoint = read_checkpoint(model);
  const Settings settings = resolve(request, checkpoint);
  auto ids = prompt_lists(checkpoint, Tokenizer::load(model / "text_tokenizer"), settings);
  const std::unique_ptr<Backend> backend = make_backend(options);
  const DType dtype = activation_type(options, *backend);
  const AttentionStrategy strategy = strategy_of(checkpoint, options.attention);
  Plan plan = measure(checkpoint, settings, strategy, std::move(ids),
                      {backend->device(), backend->fuses_weights(), dtype, {request.vae_tiling}});
  plan.summary = summary(settings);
  const double rate = gemm_ceiling(*backend, dtype);
  plan.ceiling = concat("floor: flops at ", static_cast<int64_t>(rate * 1e-9), " GFLOP/s, the rate of one large ",
                        name_of(dtype), " matrix product measured here (", backend->description(), ")");
  for (Plan::Stage& stage : plan.stages) stage.floor_seconds = stage.flops / rate;
  return plan;
}

std::string inspect_attention(const std::filesystem::path& model, const std::string& attention,
                              const EngineOptions& options) {
  const Checkpoint checkpoint = read_checkpoint(model);
  const AttentionStrategy strategy = strategy_of(checkpoint, attention);
  const std::unique_ptr<Backend> backend = make_backend(options);
  const TransformerConfig& config = checkpoint.transformer;
  const auto trials = try_presets(strategy, *backend, config.num_attention_heads, config.num_key_value_heads,
                                  config.head_dim, activation_type(options, *backend));
  return orrery::describe(strategy, trials);
}

std::vector<int64_t> tokenize(const std::filesystem::path& model, const std::string& text) {
  return Tokenizer::load(model / "text_tokenizer").encode(text);
}

std::string detokenize(const std::filesystem::path& model, const std::vector<int64_t>& ids) {
  return Tokenizer::load(model / "text_tokenizer").decode(ids);
}

std::string version() { return "0.1.0"; }

}  // namespace orrery
