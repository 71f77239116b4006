// One forward of every transformer case: positions, rope tables, time embedding, both towers after
// every layer, velocities of every modality.
#include <string>
#include <vector>

#include "attention/attention.h"
#include "golden.h"
#include "model/transformer.h"
#include "model/weights.h"

namespace orrery {
namespace {

// fp32 against fp32, sums in another order: the reference and an independent implementation agree
// to 3e-6 on these cases, so 2e-5 leaves room for order alone.
constexpr double kTolerance = 2e-5;
// Rotary tables are computed from identical fp32 angles; only the library's cos and sin may differ,
// by about one ulp of values up to 1, on top of the last-place freedom of the fp32 power
// (docs/internals/transformer.md).
constexpr double kRopeTolerance = 1e-6;

class TransformerGolden : public testing::TestWithParam<std::string> {};

std::vector<float> host(Backend& backend, const View& x) {
  Tensor copy = allocate_host_tensor(x.shape, DType::f32);
  Tensor dense = backend.allocate_tensor(x.shape, DType::f32);
  backend.copy(dense.view, x);
  backend.download(copy.view, dense.view);
  const float* data = copy.view.as<float>();
  return {data, data + x.numel()};
}

Tensor device(Backend& backend, const std::vector<float>& values, Shape shape) {
  Tensor tensor = backend.allocate_tensor(shape, DType::f32);
  backend.upload(tensor.view, make_view(values.data(), shape, DType::f32));
  return tensor;
}

Shape without_batch(const Shape& shape) {
  Shape out;
  for (int i = 1; i < shape.rank(); ++i) out.push_back(shape[i]);
  return out;
}

std::vector<bool> flags(const std::vector<int64_t>& set, int64_t size) {
  std::vector<bool> out(static_cast<size_t>(size), false);
  for (int64_t i : set) out[static_cast<size_t>(i)] = true;
  return out;
}

TEST_P(TransformerGolden, OneForward) {
  const auto folder = golden::directory() / "transformer" / GetParam();
  const Json info = Json::load(folder / "case.json");
  const golden::Tensors want(folder / "tensors.safetensors");
  auto backend = make_backend(golden::engine_options());
  Arena arena(backend->allocate(size_t{256} << 20));

  const auto config = TransformerConfig::from_json(Json::load(folder / "transformer/config.json"));
  Transformer model(*backend, config, DType::f32);
  LoadOptions options;
  if (backend->device() != DeviceKind::cpu) options.hold = DType::f32;
  options.ignored = Transformer::is_unused;
  const WeightStore store = load_weights(
      *backend, Safetensors::open_folder(folder / "transformer"),
      [&](WeightVisitor& v) { model.visit_und(v), model.visit_gen(v); }, options);

  const std::vector<int64_t> ids = want.integers("input_ids");
  const auto text = static_cast<int64_t>(ids.size());
  const double fps = info.at("fps").as_double();
  constexpr int64_t kTemporal = 4;

  // Latents and the sequence.
  const Shape latent_shape = without_batch(want.shape("vision_latent"));
  const Tensor latent = device(*backend, want.floats("vision_latent"), latent_shape);
  Tensor sound, action;
  Sequence sequence;
  sequence.grid = model.token_grid(latent_shape[1], latent_shape[2], latent_shape[3]);
  GenInput in;
  in.target = {latent.view, flags(want.integers("noisy_frames"), latent_shape[1])};
  if (want.has("sound_latent")) {
    sound = device(*backend, want.floats("sound_latent"), want.shape("sound_latent"));
    in.sound = sound.view;
    sequence.sound_tokens = in.sound.dim(1);
  }
  if (want.has("action_latent")) {
    action = device(*backend, want.floats("action_latent"), want.shape("action_latent"));
    in.action = action.view;
    in.action_noisy = flags(want.integers("action_noisy"), in.action.dim(0));
    in.action_domain = info.at("action_domain").as_int();
    sequence.action_tokens = in.action.dim(0);
  }

  // Positions and tables, rebuilt from the grid.
  Positions gen;
  append_item(gen, config, text, sequence.grid, video_rate(fps, kTemporal));
  if (in.sound) append_item(gen, config, text, {sequence.sound_tokens, 1, 1}, sound_rate(config));
  if (in.action) {
    append_item(gen, config, text, {sequence.action_tokens, 1, 1}, action_rate(fps, kTemporal));
  }
  Positions all = text_positions(text);
  all.insert(all.end(), gen.begin(), gen.end());
  const std::vector<float> ids_want = want.floats("position_ids");
  ASSERT_EQ(ids_want.size(), 3 * all.size());
  for (size_t axis = 0; axis < 3; ++axis) {
    for (size_t i = 0; i < all.size(); ++i) {
      ASSERT_EQ(all[i][axis], ids_want[axis * all.size() + i]) << "axis " << axis << " token " << i;
    }
  }
  const RopeTable table = rope_table(config, all);
  const std::vector<float> cos_want = want.floats("rope.cos"), sin_want = want.floats("rope.sin");
  const auto half = static_cast<size_t>(config.head_dim / 2);
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < 2 * half; ++j) {
      ASSERT_NEAR(table.cos[i * half + j % half], cos_want[i * 2 * half + j], kRopeTolerance);
      ASSERT_NEAR(table.sin[i * half + j % half], sin_want[i * 2 * half + j], kRopeTolerance);
    }
  }

  const Tensor time = backend->allocate_tensor({config.hidden_size}, DType::f32);
  model.embed_time(arena, time.view, static_cast<float>(info.at("timestep").as_double()));
  EXPECT_LT(golden::relative_error(host(*backend, time.view), want.floats("time_embed")),
            kTolerance);

  const auto expect_layer = [&](const std::string& name, View hidden) {
    ASSERT_TRUE(want.has(name)) << name;
    EXPECT_LT(golden::relative_error(host(*backend, hidden), want.floats(name)), kTolerance)
        << name;
  };
  const AttentionInventory inventory{static_cast<int>(config.num_hidden_layers),
                                     {AttentionRole::und, AttentionRole::gen}};
  const AttentionStrategy strategy = AttentionStrategy::dense(inventory);
  Attention attention(*backend, strategy, sequence, config.head_dim);
  UndCache und;
  {
    const Transformer::Prompt prompt{0, ids, &und};
    Transformer::TextPass pass(model, arena, {&prompt, 1}, attention,
                               Transformer::LastTextLayer::whole);
    for (int layer = 0; layer <= model.last_layer(); ++layer) {
      pass.advance_to(layer);
      expect_layer(concat("layer", layer, ".und"), pass.hidden(0));
    }
  }
  const GenRope rope = model.make_rope(gen, attention);
  attention.begin_step(0, 1);
  const Tensor vision_out = backend->allocate_tensor(latent_shape, DType::f32);
  Tensor sound_out, action_out;
  GenOutput out{vision_out.view, {}, {}};
  if (in.sound) out.sound = (sound_out = backend->allocate_tensor(in.sound.shape, DType::f32)).view;
  if (in.action)
    out.action = (action_out = backend->allocate_tensor(in.action.shape, DType::f32)).view;
  const Transformer::Evaluation evaluation{0, out, in, &und, &rope, &attention};
  Transformer::GenPass pass(model, arena, {&evaluation, 1}, time.view);
  for (int layer = 0; layer <= model.last_layer(); ++layer) {
    pass.advance_to(layer);
    expect_layer(concat("layer", layer, ".gen"), pass.hidden(0));
  }
  pass.finish();

  EXPECT_LT(golden::relative_error(host(*backend, out.vision), want.floats("out.vision")),
            kTolerance);
  if (in.sound) {
    EXPECT_LT(golden::relative_error(host(*backend, out.sound), want.floats("out.sound")),
              kTolerance);
  }
  if (in.action) {
    EXPECT_LT(golden::relative_error(host(*backend, out.action), want.floats("out.action")),
              kTolerance);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, TransformerGolden, testing::ValuesIn(golden::cases("transformer")),
                         [](const auto& test) { return test.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TransformerGolden);

}  // namespace
}  // namespace orrery
