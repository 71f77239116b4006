#include "orrery/engine.h"

#include "attention/describe.h"
#include "base/error.h"
#include "engine/backends.h"
#include "engine/clock.h"
#include "engine/fingerprint.h"
#include "engine/measure.h"
#include "engine/rank_state.h"
#include "engine/ranks.h"
#include "engine/settings.h"

namespace orrery {

namespace {

std::string summary(const Settings& s) {
  std::string line = concat(name_of(s.mode), ", ", s.width, "x", s.height, ", ", s.frames,
                            s.frames == 1 ? " frame" : " frames at ");
  if (s.frames > 1) line += concat(s.fps, " fps");
  return line + concat(", ", s.schedule.num_steps(), " steps, guidance ", s.guidance_scale,
                       ", seed ", s.seed, ", sampler: ", s.scheduler_note);
}

Outline outline(const ModelFiles& model, const Request& request, const EngineOptions& options) {
  const Checkpoint& checkpoint = model.checkpoint;
  const Settings settings = resolve(request, checkpoint);
  check_mesh(options, checkpoint.transformer, &settings);
  prompt_lists(checkpoint, model.tokenizer, settings);
  const int64_t sampling_rate = settings.sound_frames > 0 ? checkpoint.sound->sampling_rate : 0;
  return {settings.frames, settings.height,   settings.width,
          sampling_rate,   summary(settings), fingerprint(request, settings, options)};
}

void set_floors(Plan& plan, const DeviceProfile& profile) {
  const double rate = profile.flops_per_second;
  if (rate == 0) {
    plan.ceiling = "floor: none, since the rate of this device has not been measured";
    return;
  }
  plan.ceiling = concat("floor: flops at ", static_cast<int64_t>(rate * 1e-9),
                        " GFLOP/s, the rate of one large ",
                        profile.dtype == ComputeType::bf16 ? "bf16" : "f32",
                        " matrix product measured here (", profile.description, ")");
  for (Plan::Stage& stage : plan.stages) stage.floor_seconds = stage.flops / rate;
}

// Of rank 0.
Plan planned(const ModelFiles& model, const Request& request, const EngineOptions& options,
             const AttentionStrategy& strategy, const DeviceProfile& profile, int64_t budget) {
  const Settings settings = resolve(request, model.checkpoint);
  check_mesh(options, model.checkpoint.transformer, &settings);
  const DeviceKind device = profile.is_cpu ? DeviceKind::cpu : DeviceKind::cuda;
  const DType dtype = profile.dtype == ComputeType::bf16 ? DType::bf16 : DType::f32;
  const Placement placement{device,
                            profile.fuses_weights,
                            dtype,
                            {request.vae_tiling},
                            mesh_of(options),
                            0,
                            offload_on(device, options.offload),
                            options.resident,
                            budget};
  Plan plan = measure(model.checkpoint, settings, strategy,
                      prompt_lists(model.checkpoint, model.tokenizer, settings), placement)
                  .plan;
  plan.summary = summary(settings);
  set_floors(plan, profile);
  return plan;
}

DeviceProfile profile_of(const Backend& backend, DType dtype) {
  DeviceProfile profile;
  profile.description = backend.description();
  profile.is_cpu = backend.device() == DeviceKind::cpu;
  profile.fuses_weights = backend.fuses_weights();
  profile.dtype = dtype == DType::bf16 ? ComputeType::bf16 : ComputeType::fp32;
  const MemoryState memory = backend.memory();
  profile.free_bytes = memory.free;
  profile.total_bytes = memory.total;
  return profile;
}

}  // namespace

struct Engine::Ranks {
  std::shared_ptr<World> world;  // outlives the states' groups
  std::shared_ptr<const ModelFiles> files;
  EngineOptions options;
  DeviceProfile profile;  // of rank 0's device, idle
  std::vector<std::unique_ptr<RankState>> states;

  RankState& first() { return *states.front(); }
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
  auto ranks = std::make_unique<Ranks>();
  ranks->files = std::make_shared<const ModelFiles>(model);
  ranks->options = options;
  check_mesh(options, ranks->files->checkpoint.transformer);
  ranks->world = make_world(options);
  World& world = *ranks->world;
  std::vector<std::unique_ptr<RankState>> opened(world.local().size());
  const int begin = world.local().front();
  // Asked before the first rank takes its share.
  const int64_t host_memory = available_host_memory() / std::ssize(opened);
  world.run([&](int rank) {
    opened[static_cast<size_t>(rank - begin)] = std::make_unique<RankState>(
        ranks->files, options_of_rank(options, world, rank), world, rank, host_memory);
  });
  ranks->states = std::move(opened);
  ranks->profile = profile_of(*ranks->first().backend, ranks->first().dtype);
  for (const auto& state : ranks->states) state->open_seconds = seconds_since(start);
  return Engine(std::move(ranks));
}

void Engine::use_attention(const std::string& attention) {
  for (const auto& state : ranks_->states) state->use(strategy_of(state->checkpoint(), attention));
  ranks_->options.attention = attention;
}

const std::string& Engine::attention() const { return ranks_->options.attention; }

std::string Engine::device_description() const {
  const std::string& one = ranks_->profile.description;
  const int count = ranks_->world->size();
  return count == 1 ? one : concat(count, " ranks, each ", one);
}
double Engine::open_seconds() const { return ranks_->first().open_seconds; }

std::string Engine::describe(const Request& request) const {
  return concat(summary(resolve(request, ranks_->files->checkpoint)), ", ",
                name_of(ranks_->first().dtype));
}

Outline Engine::check(const Request& request) const {
  return outline(*ranks_->files, request, ranks_->options);
}

Plan Engine::plan(const Request& request) const {
  const RankState& state = ranks_->first();
  return planned(*ranks_->files, request, ranks_->options, state.strategy, ranks_->profile,
                 ranks_->profile.free_bytes + state.weights->resident_bytes());
}

const DeviceProfile& Engine::profile() const { return ranks_->profile; }

void Engine::measure_rate() {
  if (ranks_->profile.flops_per_second > 0) return;
  RankState& state = ranks_->first();
  ranks_->profile.flops_per_second = gemm_ceiling(*state.backend, state.dtype);
}

Result Engine::generate(const Request& request, const Events& events, std::stop_token stop) {
  const Events silent;
  std::vector<Result> results(ranks_->states.size());
  // Asked for all ranks before the first of them takes its share.
  std::vector<int64_t> available;
  for (const auto& state : ranks_->states) {
    available.push_back(available_memory(*state->backend, std::ssize(ranks_->states)));
  }
  ranks_->run([&](int rank, size_t place) {
    RankState& state = *ranks_->states[place];
    renew(state.groups);
    results[place] =
        orrery::generate(state, request, available[place], rank == 0 ? events : silent, stop);
  });
  return std::move(results.front());
}

Outline check_request(const std::filesystem::path& model, const Request& request,
                      const EngineOptions& options) {
  return outline(ModelFiles(model), request, options);
}

Plan plan_request(const std::filesystem::path& model, const Request& request,
                  const EngineOptions& options) {
  const std::unique_ptr<Backend> backend = make_backend(options);
  const DType dtype = activation_type(options, *backend);
  DeviceProfile profile = profile_of(*backend, dtype);
  Plan plan = plan_request(model, request, options, profile);
  // Once the request is known to be a good one.
  profile.flops_per_second = gemm_ceiling(*backend, dtype);
  set_floors(plan, profile);
  return plan;
}

Plan plan_request(const std::filesystem::path& model, const Request& request,
                  const EngineOptions& options, const DeviceProfile& profile) {
  const ModelFiles files(model);
  return planned(files, request, options, strategy_of(files.checkpoint, options.attention), profile,
                 profile.free_bytes);
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

}  // namespace orrery
