#include "engine/measure.h"

#include <algorithm>
#include <functional>

#include "backend/dry_run.h"
#include "base/error.h"
#include "base/rng.h"
#include "engine/clock.h"
#include "engine/run.h"
#include "engine/transfer.h"
#include "model/weight_layout.h"

namespace orrery {

std::vector<std::vector<int64_t>> prompt_lists(const Checkpoint& checkpoint,
                                               const Tokenizer& tokenizer,
                                               const Settings& settings) {
  std::vector<std::vector<int64_t>> lists{prompt_ids(tokenizer, settings.conditional)};
  require_prompt_fits(lists.front(), "--prompt");
  if (settings.guided()) {
    lists.push_back(prompt_ids(tokenizer, settings.unconditional));
    require_prompt_fits(lists.back(), "--negative-prompt");
  }
  for (const auto& ids : lists) {
    for (int64_t id : ids) {
      require(id < checkpoint.transformer.vocab_size, ErrorKind::corrupt,
              checkpoint.folder.folder.string(), ": the tokenizer makes id ", id,
              ", the transformer's vocabulary ends at ", checkpoint.transformer.vocab_size);
    }
  }
  return lists;
}

VaeOptions vae_options(DeviceKind device, DType dtype) {
  VaeOptions options;
  // The CPU has no fast bf16; a device decodes in the type its weights are held in.
  options.dtype = device == DeviceKind::cpu ? DType::f32 : dtype;
  return options;
}

bool text_runs_with_first_step(DeviceKind device) { return device != DeviceKind::cpu; }

namespace {

double moved(const OpTable& table) {
  double bytes = 0;
  for (const auto& [op, stats] : table) bytes += stats.bytes;
  return bytes;
}

// The dry run of one request.
class DryRequest {
 public:
  DryRequest(const Checkpoint& checkpoint, const Settings& settings,
             const AttentionStrategy& strategy, std::vector<std::vector<int64_t>> ids,
             const Placement& placement);
  Measured measure();

 private:
  RunInputs inputs() const { return {settings_, strategy_, ids_, nullptr}; }
  RunOptions options() const { return {placement_.tiling, &groups_}; }
  Networks networks() { return {model_, vae_, sound_ ? &*sound_ : nullptr}; }
  PartSizes place_weights_here();
  void run_text_beside_first_step();
  void walk(Run& run);
  void add(const Stage& stage, int64_t times);
  void count_layouts(Run& run);

  const Settings& settings_;
  const AttentionStrategy& strategy_;
  std::vector<std::vector<int64_t>> ids_;
  const Placement& placement_;
  DryRunBackend dry_;
  Transformer model_;
  Vae vae_;
  MeshGroups groups_;
  std::optional<SoundDecoder> sound_;
  Arena arena_;
  Measured out_;
};

DryRequest::DryRequest(const Checkpoint& checkpoint, const Settings& settings,
                       const AttentionStrategy& strategy, std::vector<std::vector<int64_t>> ids,
                       const Placement& placement)
    : settings_(settings),
      strategy_(strategy),
      ids_(std::move(ids)),
      placement_(placement),
      dry_(placement.device, placement.fuses_weights),
      model_(dry_, checkpoint.transformer, placement.dtype),
      vae_(dry_, checkpoint.vae, vae_options(placement.device, placement.dtype)),
      groups_(make_absent_groups(placement.mesh, placement.rank)),
      arena_(Arena::measuring(dry_.device())) {
  if (checkpoint.makes_sound()) sound_.emplace(dry_, *checkpoint.sound);
}

// Gives the weights addresses and returns what they take.
PartSizes DryRequest::place_weights_here() {
  // Checkpoints hold bf16, which the CPU reads as it is.
  const DType held = placement_.device == DeviceKind::cpu ? DType::bf16 : placement_.dtype;
  const HoldRule hold = model_.config().quantisation.hold_rule(held);
  const Shard shard{groups_.place().tp, groups_.mesh.tp, nullptr};
  place_weights(
      dry_, [&](WeightVisitor& v) { model_.visit_und(v), model_.visit_gen(v); }, hold, shard);
  place_weights(
      dry_, [&](WeightVisitor& v) { vae_.visit(v); }, held);
  if (sound_) {
    place_weights(
        dry_, [&](WeightVisitor& v) { sound_->visit(v); }, SoundDecoder::kWeightType);
  }
  return part_sizes({model_, vae_, sound_ ? &*sound_ : nullptr},
                    {hold, shard, placement_.fuses_weights}, held);
}

// For its memory; its work is counted with the prompt and with a step.
void DryRequest::run_text_beside_first_step() {
  RunOptions beside = options();
  beside.text_with_first_step = true;
  Run run(networks(), arena_, inputs(), beside);
  for (const Stage& stage : stages_of(settings_)) {
    if (stage.kind == StageKind::denoise) return run.perform(stage.unit(0));
    run.perform(stage);
  }
}

// What the dry run has just done, so many times, to the stage's sums.
void DryRequest::add(const Stage& stage, int64_t times) {
  auto& stages = out_.plan.stages;
  const std::string_view name = name_of(stage.kind);
  auto entry = std::find_if(stages.begin(), stages.end(),
                            [&](const Plan::Stage& s) { return s.name == name; });
  if (entry == stages.end()) {
    stages.emplace_back().name = name;
    entry = stages.end() - 1;
  }
  entry->calls += times;
  for (const auto& [op, stats] : dry_.stats()) {
    entry->flops += stats.flops * static_cast<double>(times);
    entry->bytes += stats.bytes * static_cast<double>(times);
  }
}

// Every stage of the first chunk once, and of the second, which stands for all later ones.
void DryRequest::walk(Run& run) {
  const RunHooks frames{{}, [](const uint8_t*, int64_t) {}, {}};
  for (const Stage& stage : stages_of(settings_)) {
    if (stage.chunk > 1 && stage.kind != StageKind::sound) continue;
    const int64_t chunks = stage.chunk == 0 ? 1 : settings_.chunks() - 1;
    dry_.reset_stats();
    if (stage.kind == StageKind::denoise) {
      run.perform(stage.unit(0));
      add(stage, chunks * stage.count);
      if (stage.chunk == 0) count_layouts(run);
      continue;
    }
    run.perform(stage, frames);
    add(stage, stage.kind == StageKind::sound ? 1 : chunks);
    const double flops = total_flops(dry_.stats());
    if (flops > 0) out_.costs.unit_flops[stage.kind] = flops / static_cast<double>(stage.count);
  }
}

// So far a step counts as one of the first step's layout. Runs the other layouts too: the arena
// must hold them, and their steps are counted as they are.
void DryRequest::count_layouts(Run& run) {
  const double first_step = total_flops(dry_.stats());
  const int layouts = strategy_.num_layouts(), steps = settings_.schedule.num_steps();
  out_.costs.step_flops.assign(static_cast<size_t>(layouts), first_step);
  if (layouts < 2) return;
  std::vector<double> flops, bytes;
  for (int layout = 0; layout < layouts; ++layout) {
    dry_.reset_stats();
    run.exercise(layout);
    flops.push_back(total_flops(dry_.stats()));
    bytes.push_back(moved(dry_.stats()));
  }
  const auto first = static_cast<size_t>(strategy_.layout_at(0, steps));
  Plan::Stage& denoise = out_.plan.stages.back();
  const auto chunks = static_cast<double>(settings_.chunks());
  for (int layout = 0; layout < layouts; ++layout) {
    const auto l = static_cast<size_t>(layout);
    out_.costs.step_flops[l] += flops[l] - flops[first];
  }
  for (int i = 0; i < steps; ++i) {
    const auto l = static_cast<size_t>(strategy_.layout_at(i, steps));
    denoise.flops += chunks * (flops[l] - flops[first]);
    denoise.bytes += chunks * (bytes[l] - bytes[first]);
  }
}

Measured DryRequest::measure() {
  Plan& plan = out_.plan;
  const PartSizes sizes = place_weights_here();
  if (text_runs_with_first_step(placement_.device)) run_text_beside_first_step();
  Run run(networks(), arena_, inputs(), options());
  walk(run);
  plan.activation_bytes = static_cast<int64_t>(arena_.peak());
  plan.state_bytes = static_cast<int64_t>(dry_.peak_allocated());
  const int64_t beside = plan.activation_bytes + plan.state_bytes;
  plan.text_stays = keeps_text(placement_.resident, sizes, placement_.offload, placement_.device,
                               beside, placement_.budget);
  const Footprint weights =
      footprint_of(sizes, placement_.offload, placement_.device, plan.text_stays);
  plan.weight_bytes = sizes.all();
  plan.resident_weight_bytes = weights.resident;
  plan.pinned_bytes = weights.pinned;
  plan.peak_bytes = weights.most() + beside;
  plan.tokens = run.attention().sequence().size();
  plan.text_tokens = static_cast<int64_t>(run.branches().front().ids.size());
  plan.ranks = placement_.mesh.world();
  return std::move(out_);
}

}  // namespace

Measured measure(const Checkpoint& checkpoint, const Settings& settings,
                 const AttentionStrategy& strategy, std::vector<std::vector<int64_t>> ids,
                 const Placement& placement) {
  return DryRequest(checkpoint, settings, strategy, std::move(ids), placement).measure();
}

namespace {

// Work a second of the fastest of four calls.
double best_rate(Backend& backend, double work, const std::function<void()>& call) {
  double best = 0;
  for (int i = 0; i < 4; ++i) {
    backend.synchronize();
    const auto start = Clock::now();
    call();
    backend.synchronize();
    best = std::max(best, work / seconds_since(start));
  }
  return best;
}

// [n, n] of normal numbers, a block of rows repeated: constant data draws less power and runs at
// clocks that no model sees.
Tensor normal_matrix(Backend& backend, int64_t n, DType dtype) {
  constexpr int64_t kRows = 64;
  std::vector<float> values(static_cast<size_t>(kRows * n));
  NormalGenerator(RngKind::cuda, 1).fill(values);
  const Tensor block = backend.allocate_tensor({kRows, n}, DType::f32);
  backend.upload(block.view, make_view(values.data(), {kRows, n}, DType::f32));
  Tensor matrix = backend.allocate_tensor({n, n}, dtype);
  backend.copy(matrix.view.reshape({n / kRows, kRows, n}),
               View(block.view).unsqueeze(0).expand(0, n / kRows));
  backend.synchronize();
  return matrix;
}

}  // namespace

double gemm_ceiling(Backend& backend, DType dtype) {
  const int64_t n = backend.device() == DeviceKind::cpu ? 1024 : 8192;
  const Tensor x = normal_matrix(backend, n, dtype), w = normal_matrix(backend, n, dtype);
  const Tensor out = backend.allocate_tensor({n, n}, dtype);
  const auto size = static_cast<double>(n);
  return best_rate(backend, 2.0 * size * size * size,
                   [&] { backend.linear(out.view, x.view, w.view); });
}

double copy_ceiling(Backend& backend) {
  const int64_t n = backend.device() == DeviceKind::cpu ? int64_t{1} << 24 : int64_t{1} << 28;
  const Tensor x = backend.allocate_tensor({n}, DType::f32),
               out = backend.allocate_tensor({n}, DType::f32);
  backend.fill(x.view, 1);
  return best_rate(backend, 2.0 * static_cast<double>(x.view.bytes()),
                   [&] { backend.copy(out.view, x.view); });
}

}  // namespace orrery
