// 8-bit checkpoints against the public code: casts to the bit, linears on the dequantised operands,
// forwards in every precision, runs under step policies, and what must be refused.
#include <gtest/gtest.h>

#include <cmath>

#include "attention/attention.h"
#include "base/error.h"
#include "cpu/cpu_backend.h"
#include "golden.h"
#include "model/transformer.h"
#include "model/weights.h"
#include "orrery/engine.h"
#include "scratch_folder.h"
#include "tensor/quantise.h"

namespace orrery {
namespace {

// f32 sums of up to 160 products against float64, of the same operands.
constexpr double kLinear = 1e-6;

std::vector<uint8_t> codes_of(const Safetensors& files, const std::string& name) {
  const View view = files.view(name);
  const auto* codes = view.as<uint8_t>();
  return {codes, codes + view.numel()};
}

void expect_codes(const std::vector<uint8_t>& got, const std::vector<uint8_t>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    // The sign of a NaN is free.
    const bool both_nan = (got[i] & 0x7f) == 0x7f && (want[i] & 0x7f) == 0x7f;
    EXPECT_TRUE(got[i] == want[i] || both_nan) << i << ": " << int(got[i]) << ' ' << int(want[i]);
  }
}

TEST(Fp8Golden, Casts) {
  const auto folder = golden::directory() / "fp8/casts";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "no golden data for fp8/casts";
  const auto files = Safetensors::open_file(folder / "tensors.safetensors");
  const std::vector<uint8_t> codes = codes_of(files, "codes");
  const golden::Tensors tensors(folder / "tensors.safetensors");
  const std::vector<float> values = tensors.floats("values");
  for (size_t i = 0; i < codes.size(); ++i) {
    const float got = to_float(f8e4m3{codes[i]});
    EXPECT_TRUE(got == values[i] || (std::isnan(got) && std::isnan(values[i]))) << int(codes[i]);
  }
  for (const auto& [x, want] :
       {std::pair{"cast.x", "cast.saturating"}, {"cast.bf16_x", "cast.bf16_saturating"}}) {
    SCOPED_TRACE(x);
    const View view = files.view(x);
    const Shape shape{1, view.numel()};
    const auto backend = cpu::make_cpu_backend();
    Tensor input = backend->allocate_tensor(shape, view.dtype),
           out = backend->allocate_tensor(shape, DType::f8e4m3),
           scale = backend->allocate_tensor({1, 1}, DType::f32);
    backend->upload(input.view, make_view(view.data, shape, view.dtype));
    scale.view.as<float>()[0] = 1;
    backend->quantise({out.view, scale.view, {}}, input.view, Scaling::given);
    const auto* made = out.view.as<uint8_t>();
    expect_codes({made, made + view.numel()}, codes_of(files, want));
  }
}

TEST(Fp8Golden, Linears) {
  const auto folder = golden::directory() / "fp8/linears";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "no golden data for fp8/linears";
  const golden::Tensors tensors(folder / "tensors.safetensors");
  const auto codes = Safetensors::open_file(folder / "tensors.safetensors");
  const auto model =
      Safetensors::open_folder(golden::directory() / "fp8/modelopt/model/transformer");
  const auto backend = cpu::make_cpu_backend();
  for (const Json& linear : Json::load(folder / "case.json").at("linears").items()) {
    const std::string name = linear.at("name").as_string();
    const std::string at = name.substr(std::string("layers.1.").size());
    SCOPED_TRACE(name);
    const View w = model.view(name + ".weight");
    const Tensor w_scale = model.read(name + ".weight_scale", DType::f32);
    const Operand weight{w, make_view(w_scale.view.data, {1, 1}, DType::f32), {}};
    std::vector<float> values = tensors.floats(at + ".x");
    const int64_t m = linear.at("M").as_int(), n = linear.at("N").as_int(),
                  k = linear.at("K").as_int();
    const View x = make_view(values.data(), {m, k}, DType::f32);
    Tensor out = allocate_host_tensor({m, n}, DType::f32);
    const auto expect = [&](const std::string& want) {
      EXPECT_LT(
          golden::relative_error({out.view.as<float>(), static_cast<size_t>(out.view.numel())},
                                 tensors.floats(at + "." + want)),
          kLinear)
          << want;
    };
    for (const char* suffix : {"", "_pow2"}) {
      const auto scale = static_cast<float>(linear.at(concat("input_scale", suffix)).as_double());
      Tensor x8 = allocate_host_tensor({m, k}, DType::f8e4m3);
      const MutOperand input{
          x8.view, make_mut_view(const_cast<float*>(&scale), {1, 1}, DType::f32), {}};
      backend->quantise(input, x, Scaling::given);
      const auto* made = x8.view.as<uint8_t>();
      expect_codes({made, made + m * k}, codes_of(codes, at + ".x8" + suffix));
      backend->linear(out.view, input, weight);
      expect(concat("y_native", suffix));
    }
    backend->linear(out.view, x, weight);
    expect("y_a16");
  }
}

// fp32 against fp32 on the same codes: as other forwards. A code on the other side of a tie would
// show as 1e-4 and more; the inputs were searched so that none is near one.
constexpr double kForward = 2e-5;

struct Mode {
  const char* name;
  Precision text, generation;
};
constexpr Mode kModes[] = {{"native", Precision::native, Precision::native},
                           {"native_reasoner_a16", Precision::a16, Precision::native},
                           {"a16", Precision::a16, Precision::a16}};

// One forward of a case, its layers held against `<mode>.layerN.und` and `.gen`.
class Forward {
 public:
  explicit Forward(const std::string& name)
      : folder_(golden::directory() / "fp8" / name),
        info_(Json::load(folder_ / "case.json")),
        want_(folder_ / "tensors.safetensors"),
        transformer_(golden::directory() / info_.at("model").as_string() / "transformer"),
        backend_(cpu::make_cpu_backend()),
        arena_(backend_->allocate(size_t{64} << 20)),
        model_(*backend_, TransformerConfig::from_json(Json::load(transformer_ / "config.json")),
               DType::f32) {
    LoadOptions options;
    options.dialect = model_.config().quantisation.dialect();
    options.ignored = [](std::string_view tensor) {
      return Transformer::is_unused(tensor) || Quantisation::is_unused(tensor);
    };
    store_ = load_weights(
        *backend_, Safetensors::open_folder(transformer_),
        [&](WeightVisitor& v) { model_.visit_und(v), model_.visit_gen(v); }, options);
  }

  void expect(const Mode& mode) {
    const std::string prefix = concat(mode.name, ".");
    if (!want_.has(prefix + "out.vision")) return;
    SCOPED_TRACE(mode.name);
    model_.set_precision(Tower::und, mode.text);
    model_.set_precision(Tower::gen, mode.generation);
    const TransformerConfig& config = model_.config();
    const std::vector<int64_t> ids = want_.integers("input_ids");
    const Shape all = want_.shape("vision_latent");
    const Shape shape{all[1], all[2], all[3], all[4]};
    std::vector<float> values = want_.floats("vision_latent");
    std::vector<bool> noisy(static_cast<size_t>(shape[1]), false);
    for (int64_t frame : want_.integers("noisy_frames")) noisy[static_cast<size_t>(frame)] = true;
    Sequence sequence;
    sequence.grid = model_.token_grid(shape[1], shape[2], shape[3]);
    Positions positions;
    append_item(positions, config, static_cast<int64_t>(ids.size()), sequence.grid,
                video_rate(info_.at("fps").as_double(), 4));
    const AttentionStrategy strategy = AttentionStrategy::dense(
        {static_cast<int>(config.num_hidden_layers), {AttentionRole::und, AttentionRole::gen}});
    Attention attention(*backend_, strategy, sequence, config.head_dim);
    UndCache und;
    {
      const Transformer::Prompt prompt{0, ids, &und};
      Transformer::TextPass pass(model_, arena_, {&prompt, 1}, attention,
                                 Transformer::LastTextLayer::whole);
      for (int layer = 0; layer <= model_.last_layer(); ++layer) {
        pass.advance_to(layer);
        expect_equal(concat(prefix, "layer", layer, ".und"), pass.hidden(0));
      }
    }
    const GenRope rope = model_.make_rope(positions, attention);
    attention.begin_step(0, 1);
    const Tensor time = backend_->allocate_tensor({config.hidden_size}, DType::f32);
    model_.embed_time(arena_, time.view, static_cast<float>(info_.at("timestep").as_double()));
    const Tensor vision = backend_->allocate_tensor(shape, DType::f32);
    GenInput in;
    in.target = {make_view(values.data(), shape, DType::f32), noisy};
    const Transformer::Evaluation evaluation{0, {vision.view, {}, {}}, in, &und, &rope, &attention};
    Transformer::GenPass pass(model_, arena_, {&evaluation, 1}, time.view);
    for (int layer = 0; layer <= model_.last_layer(); ++layer) {
      pass.advance_to(layer);
      expect_equal(concat(prefix, "layer", layer, ".gen"), pass.hidden(0));
    }
    pass.finish();
    expect_equal(prefix + "out.vision", vision.view);
    ++modes;
  }
  int modes = 0;

 private:
  void expect_equal(const std::string& name, View x) {
    ASSERT_TRUE(want_.has(name)) << name;
    Tensor dense = backend_->allocate_tensor(x.shape, DType::f32);
    backend_->copy(dense.view, x);
    EXPECT_LT(
        golden::relative_error({dense.view.as<float>(), static_cast<size_t>(dense.view.numel())},
                               want_.floats(name)),
        kForward)
        << name;
  }

  std::filesystem::path folder_;
  Json info_;
  golden::Tensors want_;
  std::filesystem::path transformer_;
  std::unique_ptr<Backend> backend_;
  Arena arena_;
  Transformer model_;
  WeightStore store_;
};

TEST(Fp8Golden, Forwards) {
  ORRERY_SKIP_WITHOUT("fp8/modelopt");
  for (const auto& [name, modes] :
       {std::pair{"modelopt", 3}, {"modelopt_dialect", 3}, {"compressed_tensors", 2}}) {
    SCOPED_TRACE(name);
    Forward forward(name);
    for (const Mode& mode : kModes) forward.expect(mode);
    EXPECT_GE(forward.modes, modes - 1);
  }
}

// A copy of a model with the files of a case laid over it; the rest are links.
class Overlaid {
 public:
  Overlaid(const std::filesystem::path& model, const std::filesystem::path& overlay) {
    namespace fs = std::filesystem;
    for (const fs::path& from : {model, overlay}) {
      if (!fs::exists(from)) continue;
      for (const auto& entry : fs::recursive_directory_iterator(from)) {
        const fs::path to = path() / fs::relative(entry.path(), from);
        if (entry.is_directory()) {
          fs::create_directories(to);
        } else {
          fs::remove(to);
          fs::create_symlink(fs::canonical(entry.path()), to);
        }
      }
    }
  }
  std::filesystem::path path() const { return folder_.path(); }

 private:
  ScratchFolder folder_;
};

// Which steps are computed natively, and the text tower, follow the checkpoint's policy.
TEST(Fp8Golden, RunsUnderStepPolicies) {
  ORRERY_SKIP_WITHOUT("fp8/policy_8");
  EngineOptions options;
  options.device = "cpu";
  options.num_threads = 1;
  for (const char* name : {"policy_8", "policy_overlap", "policy_one_step",
                           "policy_2_1_reasoner_native", "policy_none", "compressed_tensors_run"}) {
    SCOPED_TRACE(name);
    const auto folder = golden::directory() / "fp8" / name;
    const Json info = Json::load(folder / "case.json");
    const Overlaid model(golden::directory() / info.at("model").as_string(), folder / "overlay");
    const Json& call = info.at("call");
    Request request;
    request.seed = info.at("seed").as_int();
    request.prompt = call.at("prompt").as_string();
    request.num_frames = call.at("num_frames").as_int();
    request.height = call.at("height").as_int();
    request.width = call.at("width").as_int();
    request.num_inference_steps = call.at("num_inference_steps").as_int();
    request.guidance_scale = call.at("guidance_scale").as_double();
    Engine engine = Engine::open(model.path(), options);
    const Result result = engine.generate(request);
    const golden::Tensors want(folder / "tensors.safetensors");
    EXPECT_LT(golden::relative_error(result.latents.values, want.floats("latents")), kForward);
  }
}

TEST(Fp8Golden, RefusesWhatIsBroken) {
  ORRERY_SKIP_WITHOUT("fp8/broken");
  EngineOptions options;
  options.device = "cpu";
  for (const std::string& name : golden::cases("fp8/broken")) {
    SCOPED_TRACE(name);
    const auto folder = golden::directory() / "fp8/broken" / name;
    const Json info = Json::load(folder / "case.json");
    const Overlaid model(golden::directory() / info.at("base").as_string(), folder / "overlay");
    try {
      Engine::open(model.path(), options);
      ADD_FAILURE() << "opened";
    } catch (const Error& error) {
      for (const Json& word : info.at("must_name").items())
        EXPECT_NE(std::string(error.what()).find(word.as_string()), std::string::npos)
            << word.as_string() << ": " << error.what();
    }
  }
}

}  // namespace
}  // namespace orrery
