// A transformer of any shape evaluated by one rank of any mesh, on any backend.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "dist/world.h"
#include "model/layer_stream.h"
#include "model/transformer.h"
#include "model/weights.h"

namespace orrery::dist {

// Inputs of one evaluation, the same on every rank.
struct MeshInputs {
  std::vector<int64_t> ids;
  std::vector<float> latent, sound, action;
  Shape latent_shape, sound_shape, action_shape;  // of rank 0 when absent
  std::vector<bool> noisy, action_noisy;
  std::array<int64_t, 3> tile{1, 1, 1};
};

inline std::vector<float> normals(int64_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(engine);
  return values;
}

// Random inputs: `frames` latent frames of height x width, the first clean; sound and actions where
// the config has them.
inline MeshInputs random_inputs(const TransformerConfig& config, int64_t text, int64_t frames,
                                int64_t height, int64_t width) {
  MeshInputs in;
  for (int64_t i = 0; i < text; ++i) in.ids.push_back((i * 7 + 3) % config.vocab_size);
  in.latent_shape = {config.latent_channel, frames, height, width};
  in.latent = normals(in.latent_shape.numel(), 1);
  in.noisy.assign(static_cast<size_t>(frames), true);
  if (frames > 1) in.noisy[0] = false;
  if (config.sound_gen) {
    in.sound_shape = {config.sound_dim, 7};
    in.sound = normals(in.sound_shape.numel(), 2);
  }
  if (config.action_gen) {
    in.action_shape = {5, config.action_dim};
    in.action = normals(in.action_shape.numel(), 3);
    in.action_noisy.assign(5, true);
  }
  return in;
}

struct MeshOutputs {
  std::vector<float> values;  // vision, sound, action of every step, one after the other
  int64_t kept_blocks = 0, all_blocks = 0;
  int64_t weight_bytes = 0;
};

// What keeps a rank's slices of a model.
struct RankWeights {
  WeightStore store;
  std::unique_ptr<LayerStream> und, gen;  // null: that tower's layers are in the store
  int64_t device_bytes() const {
    return store.bytes() + (und ? und->device_bytes() : 0) + (gen ? gen->device_bytes() : 0);
  }
};

using MakeWeights = std::function<RankWeights(Transformer& model, const Shard& shard)>;

inline VisitFunction both_towers(Transformer& model) {
  return [&model](WeightVisitor& v) { model.visit_und(v), model.visit_gen(v); };
}

// How one rank gets the stored weights.
struct StoredOptions {
  // Layers take turns: the text tower's from the files, the generation's from copies.
  bool streams = false;
  std::optional<DType> dtype = {};  // of LoadOptions, as the next
  std::function<Tensor(const std::string& name, const View& stored)> adapt = {};
};

inline RankWeights stored_weights(const Safetensors& files, Transformer& model, const Shard& shard,
                                  const StoredOptions& how) {
  Backend& backend = model.backend();
  LoadOptions options;
  // A configuration may have fewer layers than the files.
  options.ignored = [](std::string_view name) {
    return Transformer::is_unused(name) || name.starts_with("layers.");
  };
  if (how.dtype) options.hold = *how.dtype;
  options.shard = shard;
  options.adapt = how.adapt;
  check_weights(files, both_towers(model), options);
  RankWeights held;
  if (!how.streams) {
    held.store = fill_weights(backend, files, both_towers(model), options);
    return held;
  }
  const VisitFunction ends = [&](WeightVisitor& v) {
    model.visit_ends(Tower::und, v), model.visit_ends(Tower::gen, v);
  };
  held.store = fill_weights(backend, files, ends, options);
  const auto layer_of = [&model](Tower tower) {
    return [&model, tower](int i, WeightVisitor& v) { model.visit_layer(tower, i, v); };
  };
  const auto layers = static_cast<int>(model.config().num_hidden_layers);
  held.und = LayerStream::mapped(backend, layers, layer_of(Tower::und), files, options);
  held.gen = LayerStream::pinned(backend, layers, layer_of(Tower::gen), files, options);
  return held;
}

// The prompt once, then `steps` evaluations with activations of `dtype`.
inline MeshOutputs evaluate(Backend& backend, DType dtype, const MakeWeights& weights,
                            const TransformerConfig& config, const MeshInputs& inputs,
                            const AttentionStrategy& strategy, int steps,
                            const MeshGroups& groups) {
  Arena arena(backend.allocate(size_t{256} << 20));
  Transformer model(backend, config, dtype);
  const RankWeights held = weights(model, {groups.place().tp, groups.mesh.tp, groups.tp.get()});
  model.set_stream(Tower::und, held.und.get());
  model.set_stream(Tower::gen, held.gen.get());

  const auto device = [&](const std::vector<float>& values, Shape shape) {
    Tensor tensor = backend.allocate_tensor(shape, DType::f32);
    backend.upload(tensor.view, make_view(values.data(), shape, DType::f32));
    return tensor;
  };
  const Tensor latent = device(inputs.latent, inputs.latent_shape);
  Tensor sound, action, sound_out, action_out;
  Sequence sequence;
  sequence.order.tile = inputs.tile;
  sequence.grid =
      model.token_grid(inputs.latent_shape[1], inputs.latent_shape[2], inputs.latent_shape[3]);
  GenInput in;
  in.target = {latent.view, inputs.noisy};
  const Tensor vision_out = backend.allocate_tensor(inputs.latent_shape, DType::f32);
  GenOutput out{vision_out.view, {}, {}};
  const auto text = static_cast<int64_t>(inputs.ids.size());
  Positions positions;
  append_item(positions, config, text, sequence.grid, video_rate(24, 4));
  if (!inputs.sound.empty()) {
    sound = device(inputs.sound, inputs.sound_shape);
    in.sound = sound.view;
    sequence.sound_tokens = in.sound.dim(1);
    append_item(positions, config, text, {sequence.sound_tokens, 1, 1}, sound_rate(config));
    out.sound = (sound_out = backend.allocate_tensor(in.sound.shape, DType::f32)).view;
  }
  if (!inputs.action.empty()) {
    action = device(inputs.action, inputs.action_shape);
    in.action = action.view;
    in.action_noisy = inputs.action_noisy;
    in.action_domain = 1;
    sequence.action_tokens = in.action.dim(0);
    append_item(positions, config, text, {sequence.action_tokens, 1, 1}, action_rate(24, 4));
    out.action = (action_out = backend.allocate_tensor(in.action.shape, DType::f32)).view;
  }

  Attention attention(backend, strategy, sequence, config.head_dim, groups.cp.get());
  attention.set_recording(true);
  UndCache und;
  const Transformer::Prompt prompt{0, inputs.ids, &und};
  Transformer::TextPass(model, arena, {&prompt, 1}, attention).advance_to(model.last_layer());
  const GenRope rope = model.make_rope(positions, attention);
  const Tensor time = backend.allocate_tensor({config.hidden_size}, dtype);
  model.embed_time(arena, time.view, 437);
  const Transformer::Evaluation evaluation{0, out, in, &und, &rope, &attention};
  MeshOutputs result;
  result.weight_bytes = held.device_bytes();
  for (int step = 0; step < steps; ++step) {
    attention.begin_step(step, steps);
    Transformer::GenPass pass(model, arena, {&evaluation, 1}, time.view);
    pass.advance_to(model.last_layer());
    pass.finish();
    for (const View& view : {View(out.vision), View(out.sound), View(out.action)}) {
      if (!view) continue;
      std::vector<float> values(static_cast<size_t>(view.numel()));
      backend.download(make_mut_view(values.data(), view.shape, DType::f32), view);
      result.values.insert(result.values.end(), values.begin(), values.end());
    }
  }
  for (const DispatchRecord& record : attention.records()) {
    result.kept_blocks += record.kept_blocks;
    result.all_blocks += record.all_blocks;
  }
  return result;
}

}  // namespace orrery::dist
