#include "engine/measure.h"

#include <algorithm>
#include <functional>

#include "backend/dry_run.h"
#include "base/error.h"
#include "base/rng.h"
#include "engine/clock.h"
#include "engine/run.h"
#include "engine/transfer.h"

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

namespace {

// `denoise` counts every step as the first one. Runs the other layouts too: the arena must hold
// them, and their steps are counted as they are.
void count_layouts(Plan::Stage& denoise, DryRunBackend& dry, Run& run,
                   const AttentionStrategy& strategy, int num_steps) {
  if (strategy.num_layouts() < 2) return;
  std::vector<int64_t> steps(static_cast<size_t>(strategy.num_layouts()));
  for (int i = 0; i < num_steps; ++i)
    ++steps[static_cast<size_t>(strategy.layout_at(i, num_steps))];
  const int first = strategy.layout_at(0, num_steps);
  for (int layout = 0; layout < strategy.num_layouts(); ++layout) {
    dry.reset_stats();
    run.exercise(layout);
    auto calls = static_cast<double>(steps[static_cast<size_t>(layout)]);
    if (layout == first) calls -= num_steps;
    for (const auto& [op, stats] : dry.stats()) {
      denoise.flops += stats.flops * calls;
      denoise.bytes += stats.bytes * calls;
    }
  }
}

}  // namespace

Plan measure(const Checkpoint& checkpoint, const Settings& settings,
             const AttentionStrategy& strategy, std::vector<std::vector<int64_t>> ids,
             const Placement& placement) {
  DryRunBackend dry(placement.device, placement.fuses_weights);
  Transformer model(dry, checkpoint.transformer, placement.dtype);
  Vae autoencoder(dry, checkpoint.vae, vae_options(placement.device, placement.dtype));
  const MeshGroups groups = make_absent_groups(placement.mesh, placement.rank);
  // Checkpoints hold bf16, which the CPU reads as it is.
  const DType held = placement.device == DeviceKind::cpu ? DType::bf16 : placement.dtype;
  const Shard shard{groups.place().tp, groups.mesh.tp, nullptr};
  place_weights(
      dry, [&](WeightVisitor& v) { model.visit_und(v), model.visit_gen(v); }, held, shard);
  place_weights(
      dry, [&](WeightVisitor& v) { autoencoder.visit(v); }, held);
  std::optional<SoundDecoder> sound;
  if (checkpoint.makes_sound()) {
    sound.emplace(dry, *checkpoint.sound);
    place_weights(
        dry, [&](WeightVisitor& v) { sound->visit(v); }, SoundDecoder::kWeightType);
  }
  const auto dtype_of = [&](const std::string&) { return held; };
  const PartSizes sizes =
      part_sizes({model, autoencoder, sound ? &*sound : nullptr}, dtype_of, dtype_of, shard);
  const Footprint weights = footprint_of(sizes, placement.offload, placement.device);
  Plan plan;
  plan.weight_bytes = sizes.all();
  plan.resident_weight_bytes = weights.resident;
  plan.pinned_bytes = weights.pinned;

  Arena arena = Arena::measuring(dry.device());
  Run run({model, autoencoder, sound ? &*sound : nullptr}, arena, settings, strategy,
          std::move(ids), placement.tiling, &groups);
  const auto stage = [&](const char* name, int64_t calls, const auto& body) {
    dry.reset_stats();
    body();
    Plan::Stage measured;
    measured.name = name;
    measured.calls = calls;
    for (const auto& [op, stats] : dry.stats()) {
      measured.flops += stats.flops * static_cast<double>(calls);
      measured.bytes += stats.bytes * static_cast<double>(calls);
    }
    plan.stages.push_back(measured);
  };
  stage("prompt", 1, [&] { run.prefill(); });
  const int64_t chunks = settings.chunks();
  const bool encodes = settings.conditioning.encoded_frames > 0;
  if (settings.transfer) {
    const size_t controls = settings.transfer->hints.size();
    stage("encode", chunks, [&] {
      for (size_t i = 0; i < controls; ++i) run.encode_control(i, {});
      // The chunk that keeps more frames decides.
      Conditioning most = settings.conditioning;
      for (int64_t c = 0; c < std::min<int64_t>(chunks, 2); ++c) {
        Conditioning other = chunk_conditioning(settings, c, checkpoint.vae);
        if (other.encoded_frames > most.encoded_frames) most = std::move(other);
      }
      run.condition(std::move(most));
      run.encode({});
    });
  } else if (encodes) {
    stage("encode", 1, [&] { run.encode({}); });
  }
  if (Run::text_on(placement.device) == Run::Text::with_first_step) {
    // For its memory; its work is counted with the prompt and with a step.
    run.prefill(Run::Text::with_first_step);
    run.start(nullptr, NoiseType::fp32, {});
    run.step(0, nullptr);
  }
  stage("start", chunks, [&] { run.start(nullptr, NoiseType::fp32, {}); });
  stage("denoise", chunks * settings.schedule.num_steps(), [&] { run.step(0, nullptr); });
  count_layouts(plan.stages.back(), dry, run, strategy, settings.schedule.num_steps());
  stage("decode", chunks, [&] { run.decode([](const FrameGroup&) {}); });
  if (settings.sound_frames > 0) stage("sound", 1, [&] { run.decode_sound(); });
  plan.activation_bytes = static_cast<int64_t>(arena.peak());
  plan.state_bytes = static_cast<int64_t>(dry.peak_allocated());
  plan.peak_bytes = weights.most() + plan.activation_bytes + plan.state_bytes;
  plan.tokens = run.attention().sequence().size();
  plan.text_tokens = static_cast<int64_t>(run.branches().front().ids.size());
  plan.ranks = placement.mesh.world();
  return plan;
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
