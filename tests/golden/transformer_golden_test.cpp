// One forward of every transformer case: positions, rope tables, time embedding, both towers after
// every layer, velocities of every modality.
#include <string>
#include <vector>

#include "attention/attention.h"
#include "golden.h"
#include "model/transformer.h"

namespace orrery {
namespace {

// fp32 against fp32, sums in another order: the reference and an independent implementation agree
// to 3e-6 on these cases, so 2e-5 leaves room for order alone.
constexpr double kTolerance = 2e-5;
// Rotary tables are computed from identical fp32 angles; only the library's cos and sin may differ,
// by about one ulp of values up to 1, on top of the last-place freedom of the fp32 power
// (docs/internals/transformer.md).
constexpr double kRopeTolerance = 1e-6;

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

class TransformerGolden : public testing::TestWithParam<std::string> {
 protected:
  static constexpr int64_t kTemporal = 4;

  TransformerGolden()
      : folder_(golden::directory() / "transformer" / GetParam()),
        info_(Json::load(folder_ / "case.json")),
        want_(folder_ / "tensors.safetensors"),
        backend_(make_backend(golden::engine_options())),
        arena_(backend_->allocate(size_t{256} << 20)),
        config_(TransformerConfig::from_json(Json::load(folder_ / "transformer/config.json"))),
        model_(*backend_, config_, DType::f32),
        ids_(want_.integers("input_ids")) {
    LoadOptions options;
    if (backend_->device() != DeviceKind::cpu) options.hold = DType::f32;
    options.ignored = Transformer::is_unused;
    store_ = load_weights(
        *backend_, Safetensors::open_folder(folder_ / "transformer"),
        [&](WeightVisitor& v) { model_.visit_und(v), model_.visit_gen(v); }, options);
    read_inputs();
    const auto text = static_cast<int64_t>(ids_.size());
    const double fps = info_.at("fps").as_double();
    append_item(positions_, config_, text, sequence_.grid, video_rate(fps, kTemporal));
    if (in_.sound)
      append_item(positions_, config_, text, {sequence_.sound_tokens, 1, 1}, sound_rate(config_));
    if (in_.action) {
      append_item(positions_, config_, text, {sequence_.action_tokens, 1, 1},
                  action_rate(fps, kTemporal));
    }
  }

  // Latents, and the places of velocities like them.
  void read_inputs() {
    const auto place = [&](const char* name, Shape shape, View& in, MutView& out) {
      inputs_.push_back(device(*backend_, want_.floats(name), shape));
      in = inputs_.back().view;
      inputs_.push_back(backend_->allocate_tensor(shape, DType::f32));
      out = inputs_.back().view;
    };
    place("vision_latent", without_batch(want_.shape("vision_latent")), in_.target.latent,
          out_.vision);
    const Shape& latent = in_.target.latent.shape;
    in_.target.noisy = flags(want_.integers("noisy_frames"), latent[1]);
    sequence_.grid = model_.token_grid(latent[1], latent[2], latent[3]);
    if (want_.has("sound_latent")) {
      place("sound_latent", want_.shape("sound_latent"), in_.sound, out_.sound);
      sequence_.sound_tokens = in_.sound.dim(1);
    }
    if (want_.has("action_latent")) {
      place("action_latent", want_.shape("action_latent"), in_.action, out_.action);
      in_.action_noisy = flags(want_.integers("action_noisy"), in_.action.dim(0));
      in_.action_domain = info_.at("action_domain").as_int();
      sequence_.action_tokens = in_.action.dim(0);
    }
  }

  void expect_near(const std::string& name, View found) {
    ASSERT_TRUE(want_.has(name)) << name;
    EXPECT_LT(golden::relative_error(host(*backend_, found), want_.floats(name)), kTolerance)
        << name;
  }

  std::filesystem::path folder_;
  Json info_;
  golden::Tensors want_;
  std::unique_ptr<Backend> backend_;
  Arena arena_;
  TransformerConfig config_;
  Transformer model_;
  WeightStore store_;
  std::vector<int64_t> ids_;
  std::vector<Tensor> inputs_;
  Sequence sequence_;
  GenInput in_;
  GenOutput out_;
  Positions positions_;  // of the generation tokens
};

// Rebuilt from the grid.
TEST_P(TransformerGolden, PositionsAndRotaryTables) {
  Positions all = text_positions(static_cast<int64_t>(ids_.size()));
  all.insert(all.end(), positions_.begin(), positions_.end());
  const std::vector<float> want = want_.floats("position_ids");
  ASSERT_EQ(want.size(), 3 * all.size());
  for (size_t axis = 0; axis < 3; ++axis) {
    for (size_t i = 0; i < all.size(); ++i) {
      ASSERT_EQ(all[i][axis], want[axis * all.size() + i]) << "axis " << axis << " token " << i;
    }
  }
  const RopeTable table = rope_table(config_, all);
  const std::vector<float> cos = want_.floats("rope.cos"), sin = want_.floats("rope.sin");
  const auto half = static_cast<size_t>(config_.head_dim / 2);
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < 2 * half; ++j) {
      ASSERT_NEAR(table.cos[i * half + j % half], cos[i * 2 * half + j], kRopeTolerance);
      ASSERT_NEAR(table.sin[i * half + j % half], sin[i * 2 * half + j], kRopeTolerance);
    }
  }
}

TEST_P(TransformerGolden, OneForward) {
  const Tensor time = backend_->allocate_tensor({config_.hidden_size}, DType::f32);
  model_.embed_time(arena_, time.view, static_cast<float>(info_.at("timestep").as_double()));
  expect_near("time_embed", time.view);

  const AttentionStrategy strategy = AttentionStrategy::dense(
      {static_cast<int>(config_.num_hidden_layers), {AttentionRole::und, AttentionRole::gen}});
  Attention attention(*backend_, strategy, sequence_, config_.head_dim);
  UndCache und;
  {
    const Transformer::Prompt prompt{0, ids_, &und};
    Transformer::TextPass pass(model_, arena_, {&prompt, 1}, attention,
                               Transformer::LastTextLayer::whole);
    for (int layer = 0; layer <= model_.last_layer(); ++layer) {
      pass.advance_to(layer);
      expect_near(concat("layer", layer, ".und"), pass.hidden(0));
    }
  }
  const GenRope rope = model_.make_rope(positions_, attention);
  attention.begin_step(0, 1);
  const Transformer::Evaluation evaluation{0, out_, in_, &und, &rope, &attention};
  Transformer::GenPass pass(model_, arena_, {&evaluation, 1}, time.view);
  for (int layer = 0; layer <= model_.last_layer(); ++layer) {
    pass.advance_to(layer);
    expect_near(concat("layer", layer, ".gen"), pass.hidden(0));
  }
  pass.finish();
  expect_near("out.vision", out_.vision);
  if (in_.sound) expect_near("out.sound", out_.sound);
  if (in_.action) expect_near("out.action", out_.action);
}

INSTANTIATE_TEST_SUITE_P(Cases, TransformerGolden, testing::ValuesIn(golden::cases("transformer")),
                         [](const auto& test) { return test.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TransformerGolden);

}  // namespace
}  // namespace orrery
