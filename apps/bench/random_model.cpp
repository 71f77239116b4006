#include "bench/random_model.h"

#include "backend/dry_run.h"
#include "engine/measure.h"
#include "model/random_weights.h"
#include "model/weight_layout.h"

namespace orrery {

namespace {

// Seeds of the weights.
constexpr int64_t kTextSeed = 1, kGenerationSeed = 2, kVaeSeed = 3, kLayerSeed = 4;

}  // namespace

RandomModel::RandomModel(BenchRank& rank, TransformerConfig config, With with, Offload offload)
    : rank_(rank),
      transformer_(*rank.backend, config, rank.dtype),
      vae_(*rank.backend, rank.vae_config, vae_options(rank.backend->device(), rank.dtype)),
      strategy_(strategy_from(inventory_of(config), rank.options.attention, nullptr)) {
  Backend& backend = *rank.backend;
  const auto random = [&](const auto& visit, int64_t seed) {
    return random_weights(backend, visit, rank.dtype, seed, rank.shard());
  };
  // As the engine has it: on a device the text tower is never there as a whole, and after the
  // prompts not at all.
  std::function<void(const std::function<void()>&)> with_text;
  if (backend.device() == DeviceKind::cpu) {
    und_ = random([&](WeightVisitor& v) { transformer_.visit_und(v); }, kTextSeed);
  } else {
    with_text = [this](const std::function<void()>& body) { with_random_text(body); };
  }
  if (offload == Offload::layer) {
    gen_ =
        random([&](WeightVisitor& v) { transformer_.visit_ends(Tower::gen, v); }, kGenerationSeed);
    gen_layers_ = layers_in_turn(Tower::gen);
  } else {
    gen_ = random([&](WeightVisitor& v) { transformer_.visit_gen(v); }, kGenerationSeed);
  }
  if (with == With::transformer_and_vae) {
    vae_weights_ = random_weights(
        backend, [&](WeightVisitor& v) { vae_.visit(v); }, rank.dtype, kVaeSeed);
  }
  request_.rng = RngKind::cuda;
  arena_.emplace(backend.allocate(arena_bytes(with)));
  networks_.emplace(Networks{transformer_, vae_, nullptr, with_text});
}

std::unique_ptr<Run> RandomModel::run(bool text_with_first_step) {
  RunOptions options;
  options.groups = &rank_.groups;
  options.text_with_first_step = text_with_first_step;
  options.replays = rank_.replays && rank_.groups.mesh.world() == 1;
  return std::make_unique<Run>(*networks_, *arena_,
                               RunInputs{rank_.settings, strategy_, rank_.prompts(), &request_},
                               options);
}

// A few different layers in host memory stand for all: what is copied is as much.
std::unique_ptr<LayerStream> RandomModel::layers_in_turn(Tower tower) {
  constexpr int kDistinct = 4;
  auto layers = LayerStream::random(
      *rank_.backend, static_cast<int>(transformer_.config().num_hidden_layers),
      [this, tower](int i, WeightVisitor& v) { transformer_.visit_layer(tower, i, v); },
      rank_.dtype, kLayerSeed, kDistinct, rank_.shard());
  transformer_.set_stream(tower, layers.get());
  return layers;
}

// Making what files would hold is not part of a run.
void RandomModel::with_random_text(const std::function<void()>& body) {
  std::optional<WeightStore> ends;
  std::unique_ptr<LayerStream> layers;
  making_ += rank_.seconds([&] {
    ends = random_weights(
        *rank_.backend, [&](WeightVisitor& v) { transformer_.visit_ends(Tower::und, v); },
        rank_.dtype, kTextSeed, rank_.shard());
    layers = layers_in_turn(Tower::und);
  });
  body();
  making_ += rank_.seconds([&] {
    transformer_.set_stream(Tower::und, nullptr);
    layers.reset();
    ends.reset();
  });
}

// Counts the flops of a step on the way.
size_t RandomModel::arena_bytes(With with) {
  DryRunBackend dry(rank_.backend->device(), rank_.backend->fuses_weights());
  Transformer model(dry, transformer_.config(), rank_.dtype);
  Vae vae(dry, rank_.vae_config, vae_options(dry.device(), rank_.dtype));
  const MeshGroups absent = make_absent_groups(rank_.groups.mesh, rank_.groups.rank);
  place_weights(dry, [&](WeightVisitor& v) { model.visit_und(v), model.visit_gen(v); }, rank_.dtype,
                {absent.place().tp, absent.mesh.tp, absent.tp.get()});
  place_weights(
      dry, [&](WeightVisitor& v) { vae.visit(v); }, rank_.dtype);
  Arena arena = Arena::measuring(dry.device());
  RunOptions options;
  options.groups = &absent;
  options.text_with_first_step = text_runs_with_first_step(dry.device());
  Run run({model, vae, nullptr}, arena, {rank_.settings, strategy_, rank_.prompts()}, options);
  for (const Stage& stage : stages_of(rank_.settings)) {
    if (stage.kind == StageKind::decode && with != With::transformer_and_vae) continue;
    if (stage.kind != StageKind::denoise) {
      run.perform(stage);
      continue;
    }
    // The first may read the text beside it; the others are alike.
    run.perform(stage.unit(0));
    run.perform({StageKind::noise});
    dry.reset_stats();
    run.perform(stage.unit(0));
    step_flops_ = total_flops(dry.stats());
  }
  return arena.peak();
}

RandomDecoder::RandomDecoder(BenchRank& rank)
    : rank_(rank),
      vae_(*rank.backend, rank.vae_config, vae_options(rank.backend->device(), rank.dtype)),
      weights_(random_weights(
          *rank.backend, [&](WeightVisitor& v) { vae_.visit(v); }, rank.dtype, kVaeSeed)),
      arena_(Arena::measuring(rank.backend->device())) {
  const Settings& settings = rank.settings;
  const Shape shape{rank.vae_config.z_dim, settings.latent_frames, settings.latent_height,
                    settings.latent_width};
  DryRunBackend dry(rank.backend->device(), rank.backend->fuses_weights());
  Vae model(dry, rank.vae_config, vae_options(dry.device(), rank.dtype));
  place_weights(
      dry, [&](WeightVisitor& v) { model.visit(v); }, rank.dtype);
  const MeshGroups absent = make_absent_groups(rank.groups.mesh, rank.groups.rank);
  model.decode(arena_, dry.allocate_tensor(shape, DType::f32).view, {}, {}, absent.everyone());
  flops_ = total_flops(dry.stats());
  arena_ = Arena(rank.backend->allocate(arena_.peak()));
  latents_ = rank.normals(shape, 1);
}

void RandomDecoder::decode(const Vae::FrameSink& sink) {
  vae_.decode(arena_, latents_.view, {}, rank_.leads() ? sink : Vae::FrameSink(),
              rank_.groups.everyone());
}

}  // namespace orrery
