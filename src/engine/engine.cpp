#include "orrery/engine.h"

#include <ctime>

#include "attention/describe.h"
#include "attention/warm_up.h"
#include "base/error.h"
#include "engine/backends.h"
#include "engine/clock.h"
#include "engine/fingerprint.h"
#include "engine/guardrail.h"
#include "engine/measure.h"
#include "engine/model_weights.h"
#include "engine/ranks.h"
#include "engine/report.h"
#include "engine/run.h"
#include "engine/settings.h"
#include "engine/transfer.h"

namespace orrery {

namespace {

std::string summary(const Settings& s) {
  std::string line = concat(name_of(s.mode), ", ", s.width, "x", s.height, ", ", s.frames,
                            s.frames == 1 ? " frame" : " frames at ");
  if (s.frames > 1) line += concat(s.fps, " fps");
  return line + concat(", ", s.schedule.num_steps(), " steps, guidance ", s.guidance_scale,
                       ", seed ", s.seed, ", sampler: ", s.scheduler_note);
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
  MeshGroups groups;
  std::unique_ptr<ModelWeights> weights;
  double open_seconds = 0;

  State(const std::filesystem::path& model, const EngineOptions& given, World& world, int rank,
        int64_t host_memory);
  void load(int64_t host_memory);
  void use(AttentionStrategy chosen);
  bool warms_up() const;
  Placement placement(const Request& request) const;
  Offload offload() const { return offload_on(backend->device(), options.offload); }
  void notice(const std::string& sentence) const {
    if (options.log) options.log(sentence);
  }
};

Engine::State::State(const std::filesystem::path& model, const EngineOptions& given, World& world,
                     int rank, int64_t host_memory)
    : path(model),
      options(given),
      checkpoint(read_checkpoint(model)),
      tokenizer(Tokenizer::load(checkpoint.folder.text_tokenizer.folder)),
      backend(make_backend(given)),
      dtype(activation_type(given, *backend)),
      strategy(strategy_of(checkpoint, given.attention)),
      groups(connect(world, mesh_of(given), rank, *backend)) {
  use(std::move(strategy));
  load(host_memory);
}

void Engine::State::use(AttentionStrategy chosen) {
  // The built-in strategy needs no trial: what it runs is what every other is held against.
  if (chosen.source() != "default") {
    const TransformerConfig& config = checkpoint.transformer;
    require_presets(try_presets(chosen, *backend, config.num_attention_heads,
                                config.num_key_value_heads, config.head_dim, dtype));
  }
  std::string layouts;
  for (int i = 0; i < chosen.num_layouts(); ++i)
    layouts += (i > 0 ? ", " : "") + chosen.layout_name(i);
  notice(concat("attention strategy from: ", chosen.source(), "; layouts: ", layouts));
  strategy = std::move(chosen);
}

bool Engine::State::warms_up() const {
  if (options.warm_up != WarmUpMode::automatic) return options.warm_up == WarmUpMode::on;
  return backend->device() != DeviceKind::cpu && strategy.num_layouts() > 1;
}

void Engine::State::load(int64_t host_memory) {
  transformer = std::make_unique<Transformer>(*backend, checkpoint.transformer, dtype);
  vae = std::make_unique<Vae>(*backend, checkpoint.vae, vae_options(backend->device(), dtype));
  if (checkpoint.makes_sound()) sound = std::make_unique<SoundDecoder>(*backend, *checkpoint.sound);

  // The CPU reads bf16 weights from the mapping; a device holds them in the type it computes in.
  LoadOptions of;
  if (backend->device() != DeviceKind::cpu) of.dtype = dtype;
  of.ignored = Transformer::is_unused;
  of.shard = {groups.place().tp, groups.mesh.tp, groups.tp.get()};
  // One rank for each slice looks at its numbers; a fault ends all.
  of.check_finite = groups.place().cp == 0 && groups.place().cfg == 0;
  ModelWeights::Options use;
  use.offload = offload();
  use.host_memory = host_memory;
  use.transformer = of;
  use.vae.dtype = of.dtype;
  use.vae.check_finite = groups.leads();
  for (const LoraFile& lora : options.lora) use.lora.push_back({lora.file, lora.scale});
  use.check_sound = groups.leads();
  weights = std::make_unique<ModelWeights>(*backend, ModelNetworks{*transformer, *vae, sound.get()},
                                           checkpoint.folder, std::move(use));
  for (const std::string& sentence : weights->notices()) notice(sentence);
  if (options.offload != offload()) {
    notice(concat("offload ", name_of(options.offload),
                  " has nothing to do on the CPU, which reads weights in the mapped files"));
  }
}

Placement Engine::State::placement(const Request& request) const {
  return {backend->device(),
          backend->fuses_weights(),
          dtype,
          {request.vae_tiling},
          groups.mesh,
          groups.rank,
          offload()};
}

struct Engine::Ranks {
  std::shared_ptr<World> world;  // outlives the states' groups
  std::vector<std::unique_ptr<State>> states;

  State& first() { return *states.front(); }
  // The request on one rank; empty where another one leads.
  // `available`: bytes that the rank may allocate.
  static Result generate(State& state, const Request& request, int64_t available,
                         const ProgressCallback& progress, std::stop_token stop);
  // body(rank, its place in `states`) on every rank of this process. When one fails, no other waits
  // for it.
  void run(const std::function<void(int rank, size_t place)>& body) {
    const int begin = world->local().front();
    world->run([&](int rank) { body(rank, static_cast<size_t>(rank - begin)); },
               [&] {
                 for (const auto& state : states) {
                   if (state) abort(state->groups);
                 }
               });
  }
  // Each on its own thread: ranks on devices part in good order only together.
  ~Ranks() {
    if (states.empty()) return;  // the world could not be opened
    try {
      run([&](int, size_t place) { states[place].reset(); });
    } catch (const std::exception&) {
      // Threads are missing, not more: the states end on this one.
    }
  }
};

Engine::Engine(std::unique_ptr<Ranks> ranks) : ranks_(std::move(ranks)) {}
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;
Engine::~Engine() = default;

Engine Engine::open(const std::filesystem::path& model, const EngineOptions& options) {
  const auto start = Clock::now();
  check_mesh(options, read_checkpoint(model).transformer);
  auto ranks = std::make_unique<Ranks>();
  ranks->world = make_world(options);
  World& world = *ranks->world;
  std::vector<std::unique_ptr<Engine::State>> opened(world.local().size());
  const int begin = world.local().front();
  // Asked before the first rank takes its share.
  const int64_t host_memory = available_host_memory() / std::ssize(opened);
  world.run([&](int rank) {
    opened[static_cast<size_t>(rank - begin)] = std::make_unique<State>(
        model, options_of_rank(options, world, rank), world, rank, host_memory);
  });
  ranks->states = std::move(opened);
  for (const auto& state : ranks->states) state->open_seconds = seconds_since(start);
  return Engine(std::move(ranks));
}

void Engine::use_attention(const std::string& attention) {
  for (const auto& state : ranks_->states) state->use(strategy_of(state->checkpoint, attention));
}

std::string Engine::device_description() const {
  const std::string one = ranks_->first().backend->description();
  const int count = ranks_->world->size();
  return count == 1 ? one : concat(count, " ranks, each ", one);
}
double Engine::open_seconds() const { return ranks_->first().open_seconds; }

std::string Engine::describe(const Request& request) const {
  return concat(summary(resolve(request, ranks_->first().checkpoint)), ", ",
                name_of(ranks_->first().dtype));
}

namespace {

// Times stages, reports progress, and stops between units of work.
class Stages {
 public:
  Stages(Backend& backend, RunRecord& record, const ProgressCallback& progress,
         std::stop_token stop)
      : backend_(backend), record_(record), progress_(progress), stop_(std::move(stop)) {}

  template <typename Body>
  void run(const std::string& name, int64_t total, const Body& body) {
    name_ = name;
    total_ = total;
    start_ = Clock::now();
    const std::clock_t processor = std::clock();
    backend_.reset_stats();
    report(0);
    body();
    backend_.synchronize();
    record_.stages.push_back({name, seconds_since(start_), total_flops(backend_.stats()),
                              static_cast<double>(std::clock() - processor) / CLOCKS_PER_SEC});
    add(record_.operations, backend_.stats());
    report(total);
  }
  void report(int64_t done) const {
    if (progress_) progress_({name_, done, total_, seconds_since(start_)});
    if (stop_.stop_requested())
      fail(ErrorKind::cancelled, "stopped during ", name_, " (", done, " of ", total_, ")");
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

// Every layout once; what ran here is not part of the dispatch report.
void exercise_layouts(WarmUp& warm_up, Run& run,
                      const std::function<void(const std::string&)>& log) {
  run.set_recording(false);
  try {
    for (const WarmUpTarget& target : warm_up.pending()) {
      warm_up.exercise(target, [&] { run.exercise(target.layout); });
    }
  } catch (const std::exception&) {
    if (log) log("warm-up: " + warm_up.summary());
    throw;
  }
  run.set_recording(true);
}

// Controls and what is fixed of chunk `index`: frames of the given video, or those carried over.
void encode_chunk(Run& run, const Request& request, const Settings& settings, const VaeConfig& vae,
                  int64_t index, const std::vector<float>& carried, int threads) {
  const TransferSettings& transfer = *settings.transfer;
  for (size_t i = 0; i < transfer.order.size(); ++i) {
    run.encode_control(i, control_pixels(request, settings, i, index, threads));
  }
  const Conditioning conditioning = chunk_conditioning(settings, index, vae);
  run.condition(conditioning);
  if (conditioning.encoded_frames == 0) return;
  run.encode(index == 0 ? conditioning_pixels(request, settings) : carried);
}

// Takes the decoded frames of one chunk: to 8 bits into the result, without those that repeat the
// chunk before and those past the end; the last ones as they are for the next chunk.
class ChunkFrames {
 public:
  ChunkFrames(Backend& backend, const Settings& settings, int64_t index, Frames& out)
      : backend_(backend),
        out_(out),
        plane_(settings.height * settings.width),
        limit_(settings.frames) {
    if (!settings.transfer) return;
    const TransferSettings& transfer = *settings.transfer;
    skipped_ = index == 0 ? 0 : transfer.conditional;
    if (index + 1 == transfer.chunks || transfer.conditional == 0) return;
    // Only what the causal encoder reads for the latents that are kept.
    kept_begin_ = transfer.chunk - transfer.conditional;
    kept_count_ = (transfer.conditional - 1) / 4 * 4 + 1;
    carried_.resize(static_cast<size_t>(3 * kept_count_ * plane_));
  }

  void take(const FrameGroup& group) {
    host_.resize(static_cast<size_t>(group.bytes.numel()));
    const MutView bytes = make_mut_view(host_.data(), group.bytes.shape, DType::u8);
    backend_.download(bytes, group.bytes);
    for (int64_t i = 0; i < bytes.dim(0); ++i, ++taken_) {
      const int64_t kept = taken_ - kept_begin_;
      if (kept >= 0 && kept < kept_count_) carry(group.pixels.select(0, i), kept);
      if (taken_ < skipped_ || out_.count == limit_) continue;
      const uint8_t* pixels = bytes.select(0, i).as<uint8_t>();
      out_.rgb.insert(out_.rgb.end(), pixels, pixels + plane_ * 3);
      ++out_.count;
    }
  }
  int64_t taken() const { return taken_; }
  std::vector<float> carried() { return std::move(carried_); }

 private:
  void carry(View frame, int64_t at) {
    std::vector<float> pixels(static_cast<size_t>(frame.numel()));
    backend_.download(make_mut_view(pixels.data(), frame.shape, DType::f32), frame);
    for (int64_t p = 0; p < plane_; ++p) {
      for (int64_t c = 0; c < 3; ++c) {
        carried_[static_cast<size_t>((c * kept_count_ + at) * plane_ + p)] =
            pixels[static_cast<size_t>(p * 3 + c)];
      }
    }
  }

  Backend& backend_;
  Frames& out_;
  int64_t plane_, limit_;
  int64_t skipped_ = 0, taken_ = 0;
  int64_t kept_begin_ = 0, kept_count_ = 0;
  std::vector<uint8_t> host_;
  std::vector<float> carried_;
};

}  // namespace

Result Engine::generate(const Request& request, const ProgressCallback& progress,
                        std::stop_token stop) {
  const ProgressCallback silent;
  std::vector<Result> results(ranks_->states.size());
  // Asked for all ranks before the first of them takes its share.
  std::vector<int64_t> available;
  for (const auto& state : ranks_->states) {
    available.push_back(available_memory(*state->backend, std::ssize(ranks_->states)));
  }
  ranks_->run([&](int rank, size_t place) {
    renew(ranks_->states[place]->groups);
    results[place] = Ranks::generate(*ranks_->states[place], request, available[place],
                                     rank == 0 ? progress : silent, stop);
  });
  return std::move(results.front());
}

namespace {
// What a run allocates beside the weights that are there already.
int64_t needed(const Plan& plan) { return plan.peak_bytes - plan.resident_weight_bytes; }
}  // namespace

Result Engine::Ranks::generate(State& state, const Request& request, int64_t available,
                               const ProgressCallback& progress, std::stop_token stop) {
  Backend& backend = *state.backend;
  const Settings settings = resolve(request, state.checkpoint);
  check_mesh(state.options, state.checkpoint.transformer, &settings);
  for (const std::string& sentence : settings.notices) state.notice(sentence);

  const Guardrail guardrail(state.options.guardrail, state.options.guardrail_timeout);
  require(!guardrail.is_set() || state.options.safety_check,
          "a guardrail is given and the safety check is switched off; leave one of them out");
  if (!guardrail.is_set() && state.options.safety_check &&
      state.checkpoint.folder.enable_safety_checker) {
    state.notice(
        "no guardrail is set (--guardrail): the licence of this model asks for one; the check is "
        "recorded as " +
        std::string(kGuardrailSkipped));
  }

  RunRecord record;
  record.open_seconds = state.open_seconds;
  record.offload = name_of(state.options.offload);
  record.mesh = state.groups.mesh;
  record.device = backend.description();
  record.dtype = name_of(state.dtype);
  record.attention_source = state.strategy.source();
  record.lora = state.options.lora;
  Stages stages(backend, record, progress, std::move(stop));
  const auto waiting = [&] { stages.report(0); };
  // Rank 0 speaks for all: it asks the guardrail, decodes what comes out and writes the report.
  const bool leads = state.groups.leads();
  if (guardrail.is_set() && leads)
    stages.run("guardrail", 1, [&] { guardrail.check_prompt(request, waiting); });

  Result result;
  std::optional<Arena> arena;
  std::optional<Run> run;
  std::optional<NormalGenerator> noise;
  stages.run("prompt", 1, [&] {
    auto ids = prompt_lists(state.checkpoint, state.tokenizer, settings);
    record.text_tokens = static_cast<int64_t>(ids.front().size());
    if (ids.size() > 1) record.negative_tokens = static_cast<int64_t>(ids.back().size());
    Placement placement = state.placement(request);
    Plan plan = measure(state.checkpoint, settings, state.strategy, ids, placement);
    if (needed(plan) > available && !placement.tiling.enabled && state.groups.mesh.world() == 1) {
      placement.tiling.enabled = true;
      const int64_t whole = needed(plan);
      plan = measure(state.checkpoint, settings, state.strategy, ids, placement);
      state.notice(concat("the VAE works in tiles: whole frames would need ", whole / 1000000,
                          " MB, ", available / 1000000, " are free"));
    }
    require(needed(plan) <= available, ErrorKind::out_of_memory, "this request needs ",
            needed(plan) / 1000000, " MB beside the weights, but ", available / 1000000,
            " are free; ask for fewer frames or a smaller size",
            backend.device() == DeviceKind::cpu ? "" : ", or use --offload model or layer");
    record.arena_bytes = plan.activation_bytes;
    record.weight_bytes = plan.weight_bytes;
    record.resident_weight_bytes = plan.resident_weight_bytes;
    record.pinned_bytes = plan.pinned_bytes;
    arena.emplace(backend.allocate(static_cast<size_t>(plan.activation_bytes)));
    const auto with_text = [&weights = *state.weights](const std::function<void()>& body) {
      const ModelWeights::Use text(weights, Part::text);
      body();
    };
    run.emplace(Networks{*state.transformer, *state.vae, state.sound.get(), with_text}, *arena,
                settings, state.strategy, std::move(ids), placement.tiling, &state.groups);
    run->set_recording(true);
    run->set_replay(state.options.graphs && state.offload() != Offload::layer &&
                    state.groups.mesh.world() == 1);
    record.generation_tokens = run->attention().sequence().size();
    backend.set_profiling(state.options.profile);
    run->prefill(Run::text_on(backend.device()));
  });
  const int steps = settings.schedule.num_steps();
  result.frames.height = settings.height;
  result.frames.width = settings.width;
  result.frames.rgb.reserve(
      static_cast<size_t>(settings.frames * settings.height * settings.width * 3));
  record.noise_type = noise_type_of(request, state.dtype);
  noise.emplace(request.rng, settings.seed);
  WarmUp warm_up(state.strategy, {run->attention().generation_role()});
  std::vector<float> carried;  // what the next chunk takes over, planar
  for (int64_t chunk = 0; chunk < settings.chunks(); ++chunk) {
    if (settings.transfer && settings.transfer->reseeds)
      noise.emplace(request.rng, settings.seed + chunk);
    if (settings.transfer) {
      stages.run("encode", 1, [&] {
        const ModelWeights::Use vae(*state.weights, Part::vae);
        encode_chunk(*run, request, settings, state.checkpoint.vae, chunk, carried,
                     cpu_threads(state.options));
      });
    } else if (settings.conditioning.encoded_frames > 0) {
      stages.run("encode", 1, [&] {
        const ModelWeights::Use vae(*state.weights, Part::vae);
        run->encode(conditioning_pixels(request, settings));
      });
    }
    run->start(&*noise, record.noise_type,
               request.latents ? request.latents->values : std::vector<float>{});
    std::optional<ModelWeights::Use> generation;
    const auto bring_generation = [&] { generation.emplace(*state.weights, Part::generation); };
    if (state.weights->has(Part::generation))
      bring_generation();
    else
      stages.run("load", 1, bring_generation);
    if (chunk == 0 && state.warms_up()) {
      stages.run("warm-up", 1, [&] { exercise_layouts(warm_up, *run, state.options.log); });
    }
    stages.run("denoise", steps, [&] {
      for (int i = 0; i < steps; ++i) {
        const auto begin = Clock::now();
        const WarmUpTarget target{state.strategy.layout_at(i, steps),
                                  run->attention().generation_role()};
        warm_up.exercise(target, [&] { run->step(i, &*noise); });
        record.step_seconds.push_back(seconds_since(begin));
        if (record.first_step_seconds == 0)
          record.first_step_seconds = seconds_since_process_start();
        stages.report(i + 1);
      }
    });
    generation.reset();
    // The ranks decode together. The next chunk takes over decoded frames, on every rank; the last
    // one's are rank 0's alone.
    const bool wants = leads || chunk + 1 < settings.chunks();
    if (!wants && !run->shares_decode()) return {};
    const int64_t fresh = settings.frames - result.frames.count;
    stages.run("decode", settings.transfer ? std::min(fresh, settings.transfer->chunk) : fresh,
               [&] {
                 const ModelWeights::Use vae(*state.weights, Part::vae);
                 if (!wants) return run->decode({});
                 ChunkFrames made(backend, settings, chunk, result.frames);
                 run->decode([&](const FrameGroup& group) {
                   made.take(group);
                   stages.report(made.taken());
                 });
                 carried = made.carried();
               });
    if (!wants) return {};
  }
  if (settings.sound_frames > 0) {
    stages.run("sound", 1, [&] { result.sound = run->decode_sound(); });
    result.sampling_rate = state.checkpoint.sound->sampling_rate;
  }
  backend.set_profiling(false);

  result.fps = settings.fps;
  if (guardrail.is_set()) {
    stages.run("guardrail", 1, [&] { guardrail.check_frames(result.frames, result.fps, waiting); });
  }
  record.guardrail = guardrail.is_set()           ? kGuardrailApproved
                     : state.options.safety_check ? kGuardrailSkipped
                                                  : kGuardrailDeclined;
  result.latents = {{1, state.checkpoint.vae.z_dim, settings.latent_frames, settings.latent_height,
                     settings.latent_width},
                    run->latents()};
  if (std::vector<float> action = run->action(); !action.empty()) {
    result.action =
        FloatTensor{{settings.action->chunk, settings.action->raw_width}, std::move(action)};
  }
  record.dispatch = run->dispatch();
  record.evaluations = run->evaluation_names();
  record.load = state.weights->load_time();
  record.device_memory = backend.memory();
  record.warm_up = warm_up_json(warm_up, state.strategy);
  result.attention = attention_use(record.dispatch);
  result.report = report_json(request, settings, record).dump(1);
  result.metadata = {{"comment", metadata_json(request, settings, record).dump()},
                     {"encoder_engine", "orrery " + version()}};
  return result;
}

Outline check_request(const std::filesystem::path& model, const Request& request,
                      const EngineOptions& options) {
  const Checkpoint checkpoint = read_checkpoint(model);
  const Settings settings = resolve(request, checkpoint);
  check_mesh(options, checkpoint.transformer, &settings);
  prompt_lists(checkpoint, Tokenizer::load(checkpoint.folder.text_tokenizer.folder), settings);
  const int64_t sampling_rate = settings.sound_frames > 0 ? checkpoint.sound->sampling_rate : 0;
  return {settings.frames, settings.height,   settings.width,
          sampling_rate,   summary(settings), fingerprint(request, settings, options)};
}

Plan plan_request(const std::filesystem::path& model, const Request& request,
                  const EngineOptions& options) {
  const Checkpoint checkpoint = read_checkpoint(model);
  const Settings settings = resolve(request, checkpoint);
  check_mesh(options, checkpoint.transformer, &settings);
  auto ids =
      prompt_lists(checkpoint, Tokenizer::load(checkpoint.folder.text_tokenizer.folder), settings);
  const std::unique_ptr<Backend> backend = make_backend(options);
  const DType dtype = activation_type(options, *backend);
  const AttentionStrategy strategy = strategy_of(checkpoint, options.attention);
  Plan plan = measure(checkpoint, settings, strategy, std::move(ids),
                      {backend->device(),
                       backend->fuses_weights(),
                       dtype,
                       {request.vae_tiling},
                       mesh_of(options),
                       0,
                       offload_on(backend->device(), options.offload)});
  plan.summary = summary(settings);
  const double rate = gemm_ceiling(*backend, dtype);
  plan.ceiling = concat("floor: flops at ", static_cast<int64_t>(rate * 1e-9),
                        " GFLOP/s, the rate of one large ", name_of(dtype),
                        " matrix product measured here (", backend->description(), ")");
  for (Plan::Stage& stage : plan.stages) stage.floor_seconds = stage.flops / rate;
  return plan;
}

std::string inspect_attention(const std::filesystem::path& model, const std::string& attention,
                              const EngineOptions& options) {
  const Checkpoint checkpoint = read_checkpoint(model);
  const AttentionStrategy strategy = strategy_of(checkpoint, attention);
  const std::unique_ptr<Backend> backend = make_backend(options);
  const TransformerConfig& config = checkpoint.transformer;
  const auto trials =
      try_presets(strategy, *backend, config.num_attention_heads, config.num_key_value_heads,
                  config.head_dim, activation_type(options, *backend));
  return orrery::describe(strategy, trials);
}

std::vector<int64_t> tokenize(const std::filesystem::path& model, const std::string& text) {
  return Tokenizer::load(open_model_folder(model).text_tokenizer.folder).encode(text);
}

std::string detokenize(const std::filesystem::path& model, const std::vector<int64_t>& ids) {
  return Tokenizer::load(open_model_folder(model).text_tokenizer.folder).decode(ids);
}

std::string version() { return "0.1.0"; }

}  // namespace orrery
