// Kinds of checkpoints that are not shipped, made from the shipped one: distilled few-step models
// and the Edge architecture.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "backend/dry_run.h"
#include "base/json.h"
#include "expect_error.h"
#include "io/safetensors.h"
#include "io/video.h"
#include "model/transformer.h"
#include "model_variant.h"
#include "orrery/engine.h"
#include "process.h"

namespace orrery {
namespace {

namespace fs = std::filesystem;

Frames moving_dot(int64_t count) {
  Frames frames{count, 64, 64, std::vector<uint8_t>(static_cast<size_t>(count * 64 * 64 * 3))};
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t i = 0; i < 400; ++i) {
      const int64_t y = 20 + i / 20, x = (4 + 3 * t + i % 20) % 64;
      frames.rgb[static_cast<size_t>(((t * 64 + y) * 64 + x) * 3)] = 230;
    }
  }
  return frames;
}

Request small_request() {
  Request request;
  request.prompt = "A small red circle moves left on a black background.";
  request.height = 32;
  request.width = 32;
  request.num_frames = 13;
  request.seed = 3;
  return request;
}

// Whether latent frame t of [1, C, T, h, w] is the same in both.
bool same_frame(const FloatTensor& a, const FloatTensor& b, int64_t t) {
  const int64_t frames = a.shape[2], plane = a.shape[3] * a.shape[4];
  for (int64_t c = 0; c < a.shape[1]; ++c) {
    const auto at = a.values.begin() + (c * frames + t) * plane;
    if (!std::equal(at, at + plane, b.values.begin() + (c * frames + t) * plane)) return false;
  }
  return true;
}

// B42: runs with other noise and other steps agree to the bit in the frames that are fixed, and
// nowhere else.
void expect_fixed(Engine& engine, Request request, const std::vector<int64_t>& fixed) {
  const FloatTensor first = engine.generate(request).latents;
  request.seed += 1;
  const FloatTensor second = engine.generate(request).latents;
  for (int64_t t = 0; t < first.shape[2]; ++t) {
    const bool wanted = std::find(fixed.begin(), fixed.end(), t) != fixed.end();
    EXPECT_EQ(same_frame(first, second, t), wanted) << "latent frame " << t;
  }
}

class Distilled : public testing::Test {
 protected:
  Distilled() {
    model_.write("modular_model_index.json",
                 R"({"_class_name": "Cosmos3DistilledModularPipeline", "is_distilled": true,
                     "distilled_sigmas": [1.0, 0.9375, 0.8333333333333334, 0.625]})");
    model_.write(
        "scheduler/scheduler_config.json",
        R"({"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0,
                     "stochastic_sampling": true, "fixed_step_requires_explicit_sigmas": true,
                     "fixed_step_sampler_config": {"sample_type": "sde", "t_list": [1.0, 0.9375, 0.8333, 0.625]}})");
  }
  e2e::ModelVariant model_;
};

TEST_F(Distilled, RunsItsFixedSteps) {
  Engine engine = Engine::open(model_.path());
  const Result result = engine.generate(small_request());
  EXPECT_EQ(result.frames.count, 13);
  const Json report = Json::parse(result.report, "report");
  const Json& settings = report.at("settings");
  EXPECT_EQ(settings.at("num_inference_steps").as_int(), 4);
  EXPECT_EQ(settings.at("guidance_scale").as_double(), 1);
  const Json& scheduler = settings.at("scheduler");
  EXPECT_EQ(scheduler.at("class").as_string(), "FlowMatchEulerDiscreteScheduler");
  const std::vector<float> sigmas{1.0f, 0.9375f, 0.8333333333f, 0.625f, 0.0f};
  const std::vector<float> timesteps{1000.0f, 937.5f, 833.3333333f, 625.0f};  // not whole numbers
  for (size_t i = 0; i < sigmas.size(); ++i)
    EXPECT_FLOAT_EQ(float(scheduler.at("sigmas").at(i).as_double()), sigmas[i]);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_FLOAT_EQ(float(scheduler.at("timesteps").at(i).as_double()), timesteps[i]);
  }
  // One branch: no guidance was run. 8 layers, 4 steps.
  int64_t calls = 0;
  for (const Json& call : report.at("attention").at("dispatch").items()) {
    if (call.at("role").as_string() != "cosmos3.gen") continue;
    ++calls;
    EXPECT_EQ(call.at("evaluation").as_string(), "conditional");
  }
  EXPECT_EQ(calls, 8 * 4);
}

// B24.
TEST_F(Distilled, RefusesOrdinarySettings) {
  const auto refused = [&](const auto& change, std::initializer_list<std::string_view> parts) {
    Request request = small_request();
    change(request);
    expect_error(ErrorKind::invalid_argument, parts,
                 [&] { check_request(model_.path(), request); });
  };
  refused([](Request& r) { r.num_inference_steps = 35; },
          {"num_inference_steps is 35", "fixes 4 steps"});
  refused([](Request& r) { r.guidance_scale = 6; }, {"guidance_scale is 6", "baked into"});
  refused([](Request& r) { r.flow_shift = 5; }, {"flow_shift", "distilled"});
  refused([](Request& r) { r.karras = true; }, {"karras", "distilled"});
  Request request = small_request();
  request.num_inference_steps = 4;
  request.guidance_scale = 1;
  EXPECT_NO_THROW(check_request(model_.path(), request));
  // The negative prompt has no effect and that is said.
  request.negative_prompt = "blurry";
  std::vector<std::string> notices;
  EngineOptions options;
  options.log = [&](const std::string& sentence) { notices.push_back(sentence); };
  Engine::open(model_.path(), options).generate(request);
  const bool said = std::any_of(notices.begin(), notices.end(), [](const std::string& sentence) {
    return sentence.find("negative prompt is ignored") != std::string::npos;
  });
  EXPECT_TRUE(said);
}

// B19: the fresh noise of every step comes from the request's own seed.
TEST_F(Distilled, RepeatsItself) {
  Engine engine = Engine::open(model_.path());
  Request request = small_request();
  const std::vector<float> first = engine.generate(request).latents.values;
  request.seed = 4;
  EXPECT_NE(engine.generate(request).latents.values, first);
  request.seed = 3;
  EXPECT_EQ(engine.generate(request).latents.values, first);
}

// B42: every step makes new noise everywhere; the fixed frames are put back.
TEST_F(Distilled, KeepsFixedFrames) {
  Engine engine = Engine::open(model_.path());
  Request request = small_request();
  request.image = moving_dot(1);
  expect_fixed(engine, request, {0});
  request.image.reset();
  request.video = moving_dot(13);
  for (const std::vector<int64_t>& fixed : {std::vector<int64_t>{0}, {0, 1}, {3}}) {
    request.condition_frame_indexes_vision = fixed;
    expect_fixed(engine, request, fixed);
  }
}

// B42 for ordinary checkpoints.
TEST(Conditioning, KeepsFixedFrames) {
  Engine engine = Engine::open(e2e::pico());
  Request request = small_request();
  request.num_inference_steps = 2;
  request.video = moving_dot(13);
  for (const std::vector<int64_t>& fixed :
       {std::vector<int64_t>{0}, {0, 1}, {0, 1, 2}, {3}, {1, 1}}) {
    request.condition_frame_indexes_vision = fixed;
    expect_fixed(engine, request, fixed);
  }
  for (const int64_t wrong : {int64_t{4}, int64_t{-1}}) {
    request.condition_frame_indexes_vision = {wrong};
    expect_error(ErrorKind::invalid_argument, {"condition_frame_indexes_vision holds"},
                 [&] { engine.generate(request); });
  }
}

// An Edge checkpoint: relu squared, Nemotron norms, text keys normed for generation only, no text
// norms. Small and random; the tokenizer and the VAE are the shipped ones.
class Edge : public testing::Test {
 protected:
  Edge() {
    Json config = Json::load(fs::path(e2e::pico()) / "transformer/config.json");
    config.set("hidden_act", "relu2")
        .set("qk_norm_for_text", false)
        .set("use_und_k_norm_for_gen", true)
        .set("rms_norm_eps", 1e-5)
        .set("rope_theta", 1e8)
        .set("hidden_size", 64)
        .set("head_dim", 32)
        .set("num_attention_heads", 4)
        .set("num_key_value_heads", 2)
        .set("intermediate_size", 96)
        .set("num_hidden_layers", 3)
        .set("rope_axes_dim", Json::array({Json(6), Json(5), Json(5)}))
        .set("rope_scaling",
             Json::object().set("mrope_section", Json::array({Json(6), Json(5), Json(5)})))
        .set("backbone_type", "cosmos3_edge_nemotron_dense")
        .set("temporal_compression_factor", 4);
    for (const auto& entry : fs::directory_iterator(model_.path() / "transformer"))
      stale_.push_back(entry.path());
    for (const fs::path& file : stale_) fs::remove(file);
    model_.write("transformer/config.json", config.dump());
    write_weights(config);
    model_.write("model_index.json", Json::load(fs::path(e2e::pico()) / "model_index.json")
                                         .set("default_use_system_prompt", false)
                                         .set("use_native_flow_schedule", true)
                                         .dump());
  }

  void write_weights(const Json& config, const std::string& left_out = "") {
    DryRunBackend dry(DeviceKind::cpu, false);
    Transformer transformer(dry, TransformerConfig::from_json(config), DType::f32);
    std::mt19937 engine(7);
    std::normal_distribution<float> normal;
    std::vector<std::vector<float>> values;
    std::vector<NamedTensor> tensors;
    for (const ListedTensor& tensor : list_tensors(
             [&](WeightVisitor& v) { transformer.visit_und(v), transformer.visit_gen(v); })) {
      if (tensor.name == left_out) continue;
      std::vector<float> data(static_cast<size_t>(tensor.shape.numel()));
      const bool is_norm =
          tensor.shape.rank() == 1 && tensor.name.find("norm") != std::string::npos;
      const float scale =
          is_norm ? 0.2f
                  : 1.0f / std::sqrt(static_cast<float>(tensor.shape[tensor.shape.rank() - 1]));
      for (float& value : data) value = (is_norm ? 1.0f : 0.0f) + scale * normal(engine);
      values.push_back(std::move(data));
      tensors.push_back({tensor.name, make_view(values.back().data(), tensor.shape, DType::f32)});
    }
    write_safetensors(model_.path() / "transformer" / kWeightsName, tensors);
  }

  e2e::ModelVariant model_;
  std::vector<fs::path> stale_;
};

TEST_F(Edge, RunsEndToEnd) {
  Engine engine = Engine::open(model_.path());
  Request request = small_request();
  request.num_inference_steps = 3;
  const Result result = engine.generate(request);
  EXPECT_EQ(result.frames.count, 13);
  for (float value : result.latents.values) ASSERT_TRUE(std::isfinite(value));
  // No system prompt and the native grid, as the index says.
  const Json settings = Json::parse(result.report, "report").at("settings");
  EXPECT_TRUE(settings.at("scheduler").at("native_schedule").as_bool());
  EXPECT_EQ(engine.generate(request).latents.values, result.latents.values);
  // Prompt and negative prompt reach the result through the normed keys.
  request.negative_prompt = "A large blue triangle.";
  EXPECT_NE(engine.generate(request).latents.values, result.latents.values);
  request.image = moving_dot(1);
  expect_fixed(engine, request, {0});
}

// B55: the extra norm is no decoration: other weights in it give another result.
TEST_F(Edge, TextKeysAreNormedForGeneration) {
  Request request = small_request();
  request.num_inference_steps = 1;
  const std::vector<float> before = Engine::open(model_.path()).generate(request).latents.values;
  const Safetensors stored = Safetensors::open_folder(model_.path() / "transformer");
  std::vector<NamedTensor> tensors;
  std::vector<float> other;
  for (const StoredTensor& tensor : stored.tensors()) {
    View view = stored.view(tensor.name);
    if (tensor.name == "layers.1.self_attn.k_norm_und_for_gen.weight") {
      other.assign(static_cast<size_t>(view.numel()), 0.25f);
      view = make_view(other.data(), view.shape, DType::f32);
    }
    tensors.push_back({tensor.name, view});
  }
  write_safetensors(model_.path() / "transformer" / kWeightsName, tensors);
  EXPECT_NE(Engine::open(model_.path()).generate(request).latents.values, before);
}

// B55: the norm and the flag that speaks of it go together.
TEST_F(Edge, AMissingOrSurplusNormIsNamed) {
  Json config = Json::load(model_.path() / "transformer/config.json");
  model_.write("transformer/config.json", Json(config).set("use_und_k_norm_for_gen", false).dump());
  expect_error(ErrorKind::corrupt, {"layers.0.self_attn.k_norm_und_for_gen.weight"},
               [&] { Engine::open(model_.path()); });
  model_.write("transformer/config.json", config.dump());
  write_weights(config, "layers.2.self_attn.k_norm_und_for_gen.weight");
  expect_error(ErrorKind::corrupt, {"layers.2.self_attn.k_norm_und_for_gen.weight"},
               [&] { Engine::open(model_.path()); });
}

TEST_F(Edge, HasNoSound) {
  Request request = small_request();
  request.enable_sound = true;
  expect_error(ErrorKind::invalid_argument, {"makes no sound"},
               [&] { check_request(model_.path(), request); });
}

// A component's folder is resolved once: its config and its weights are of the same one.
TEST(Variants, AModularIndexMayNameAnotherFolder) {
  const e2e::ModelVariant model;
  const Json task = Json::load(model.path() / "model_index.json");
  Json index = Json::object().set("_class_name", "Cosmos3OmniModularPipeline");
  for (const char* name : {"transformer", "vae", "scheduler", "text_tokenizer"}) {
    Json entry = task.at(name);
    const std::string folder = name == std::string("vae") ? "vae2" : name;
    index.set(name, entry.push(Json::object().set("subfolder", folder)));
  }
  model.remove("model_index.json");
  model.write("modular_model_index.json", index.dump());
  fs::rename(model.path() / "vae", model.path() / "vae2");
  const std::vector<float> latents =
      Engine::open(model.path(), {}).generate(small_request()).latents.values;
  EXPECT_EQ(latents, Engine::open(e2e::pico(), {}).generate(small_request()).latents.values);
}

}  // namespace
}  // namespace orrery
