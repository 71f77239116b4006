// Attention strategies through whole runs: what the report says ran is what the document asks for.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <random>
#include <set>

#include "backend/dry_run.h"
#include "base/json.h"
#include "io/safetensors.h"
#include "io/video.h"
#include "model/transformer.h"
#include "model/vae.h"
#include "orrery/compare.h"
#include "process.h"
#include "scratch_folder.h"
#include "small_request.h"

namespace orrery {
namespace {

namespace fs = std::filesystem;

fs::path recipe(const std::string& name) {
  return fs::path(e2e::source_folder()) / "tests/golden/data/attention_recipes" / name;
}

// A random transformer of 36 narrow layers and a narrow random VAE, with the tokenizer and the
// scheduler of the shipped model.
class DeepModel {
 public:
  explicit DeepModel(const Json& runtime = Json()) {
    const fs::path pico = e2e::pico();
    for (const char* part : {"model_index.json", "scheduler", "text_tokenizer"}) {
      fs::create_symlink(fs::absolute(pico / part), folder_.path() / part);
    }
    const Json sections = Json::array({4, 2, 2});
    Json config = Json::load(pico / "transformer/config.json");
    config.set("num_hidden_layers", 36)
        .set("hidden_size", 32)
        .set("intermediate_size", 32)
        .set("num_attention_heads", 2)
        .set("num_key_value_heads", 1)
        .set("head_dim", 16)
        .set("rope_axes_dim", sections)
        .set("rope_scaling", Json::object()
                                 .set("mrope_interleaved", true)
                                 .set("mrope_section", sections)
                                 .set("rope_type", "default"));
    if (!runtime.is_null()) config.set("runtime", runtime);
    DryRunBackend dry(DeviceKind::cpu);
    Transformer network(dry, TransformerConfig::from_json(config), DType::f32);
    write("transformer", config,
          [&](WeightVisitor& v) { network.visit_und(v), network.visit_gen(v); });

    Json vae_config = Json::load(pico / "vae/config.json");
    vae_config.set("base_dim", 4).set("decoder_base_dim", 4);
    Vae vae(dry, VaeConfig::from_json(vae_config), {});
    write("vae", vae_config, [&](WeightVisitor& v) { vae.visit(v); });
  }
  const fs::path& path() const { return folder_.path(); }

 private:
  void write(const std::string& part, const Json& config, const VisitFunction& visit) const {
    folder_.write(part + "/config.json", config.dump());
    std::mt19937 engine(1);
    std::normal_distribution<float> normal(0, 0.1f);
    std::vector<Tensor> tensors;
    std::vector<NamedTensor> named;
    for (const ListedTensor& tensor : list_tensors(visit)) {
      tensors.push_back(allocate_host_tensor(tensor.shape, DType::f32));
      float* values = tensors.back().view.as<float>();
      std::generate_n(values, tensors.back().view.numel(), [&] { return normal(engine); });
      named.push_back({tensor.name, tensors.back().view});
    }
    write_safetensors(folder_.path() / part / kWeightsName, named);
  }

  ScratchFolder folder_;
};

// 612 generation tokens: more key blocks of 64 than the published selector's least budget.
Request deep_request(int steps, double guidance) {
  Request request;
  request.prompt = "A small red circle moves left on a black background.";
  request.height = request.width = 192;
  request.num_frames = 65;
  request.num_inference_steps = steps;
  request.guidance_scale = guidance;
  return request;
}

Request small_request(int steps = 4) {
  Request request = e2e::small_request(192, 192, 17);
  request.num_inference_steps = steps;
  return request;
}

EngineOptions with_attention(const std::string& attention) {
  EngineOptions options;
  options.attention = attention;
  return options;
}

const Json kDense = Json::object().set("backend", "native");

Json sparse_method(double sparsity, int block = 16) {
  return Json::object()
      .set("name", "block_sparse")
      .set("config", Json::object()
                         .set("block_size", Json::array({block, block}))
                         .set("selection",
                              Json::object()
                                  .set("name", "block_topk")
                                  .set("config", Json::object().set("target_sparsity", sparsity))));
}

// Dense until step `until`, then sparse everywhere in the generation tower.
std::string dense_to_sparse(int until, double sparsity) {
  const Json sparse_layout =
      Json::object()
          .set("default", "dense")
          .set("overrides",
               Json::array(
                   {Json::object().set("attention_role", "cosmos3.gen").set("use", "sparse")}));
  return Json::object()
      .set("presets", Json::object().set("dense", kDense).set("sparse", sparse_method(sparsity)))
      .set("layouts", Json::object()
                          .set("dense", Json::object().set("default", "dense"))
                          .set("sparse", sparse_layout))
      .set("schedule",
           Json::object()
               .set("coordinate", "step_index")
               .set("phases",
                    Json::array({Json::object().set("until", until).set("layout", "dense"),
                                 Json::object().set("until", Json()).set("layout", "sparse")})))
      .dump();
}

// The three published recipes on 36 layers: the report of a whole run holds one call for every
// step, evaluation and layer, sparse exactly where the schedule says.
TEST(StrategyRun, DispatchFollowsThePublishedRecipes) {
  const std::set<int64_t> kept_dense{1, 2, 15, 30, 31, 32, 33, 34};
  const std::map<std::string, std::function<bool(int64_t, int64_t)>> recipes{
      {"cosmos3-dense-to-sparse-strategy.json", [](int64_t step, int64_t) { return step >= 10; }},
      {"cosmos3-subblock-strategy.json",
       [&](int64_t step, int64_t layer) { return step >= 10 && !kept_dense.count(layer); }},
      {"fa4-subblock.json", [](int64_t, int64_t) { return true; }},
  };
  constexpr int kSteps = 12, kLayers = 36;
  const DeepModel model;
  EngineOptions options;
  options.num_threads = 1;  // too little work a call to share
  Engine engine = Engine::open(model.path(), options);
  for (const auto& [file, sparse] : recipes) {
    engine.use_attention(recipe(file).string());
    for (double guidance : {1.0, 3.0}) {
      SCOPED_TRACE(file + (guidance == 1 ? " without guidance" : " with guidance"));
      const int branches = guidance == 1 ? 1 : 2;
      const Result result = engine.generate(deep_request(kSteps, guidance));
      const Json report = Json::parse(result.report, "report").at("attention");
      EXPECT_EQ(report.at("source").as_string(), "runtime");
      std::set<std::tuple<int64_t, std::string, int64_t>> seen;
      int64_t text_calls = 0;
      for (const Json& call : report.at("dispatch").items()) {
        EXPECT_EQ(call.at("implementation").as_string(), "native");
        const int64_t layer = call.at("layer").as_int();
        if (call.at("role").as_string() == "cosmos3.und") {
          EXPECT_TRUE(call.at("step").is_null());
          EXPECT_EQ(call.at("all_blocks").as_int(), 0);
          ++text_calls;
          continue;
        }
        EXPECT_EQ(call.at("role").as_string(), "cosmos3.gen");
        const int64_t step = call.at("step").as_int();
        EXPECT_TRUE(seen.emplace(step, call.at("evaluation").as_string(), layer).second);
        const int64_t kept = call.at("kept_blocks").as_int(), all = call.at("all_blocks").as_int();
        if (sparse(step, layer)) {
          EXPECT_LT(kept, all) << "step " << step << " layer " << layer;
          EXPECT_GT(kept, 0);
        } else {
          EXPECT_EQ(all, 0) << "step " << step << " layer " << layer;
        }
        if (file != "fa4-subblock.json") {
          EXPECT_EQ(call.at("method").as_string(),
                    sparse(step, layer) ? "fa4_subblock" : "fa3_dense");
        }
      }
      EXPECT_EQ(seen.size(), size_t(kSteps) * kLayers * branches);
      // The last text layer is only read for its keys and values.
      EXPECT_EQ(text_calls, (kLayers - 1) * branches);
    }
  }
}

// A run that ends before the schedule turns sparse is the dense run, bit for bit, and so is a
// sparse one that keeps everything.
TEST(StrategyRun, DenseStepsAreTheDenseRun) {
  Engine engine = Engine::open(e2e::pico());
  const std::vector<float> dense = engine.generate(small_request()).latents.values;
  engine.use_attention(dense_to_sparse(4, 0.9));
  EXPECT_EQ(engine.generate(small_request()).latents.values, dense);
  engine.use_attention(dense_to_sparse(1, 0));
  EXPECT_EQ(engine.generate(small_request()).latents.values, dense);
  engine.use_attention(dense_to_sparse(3, 0.9));
  EXPECT_NE(engine.generate(small_request()).latents.values, dense);
}

Json warm_up_of(const Result& result) {
  return Json::parse(result.report, "report").at("attention").at("warm_up");
}

// Warm-up runs what the run does not reach and changes nothing that it makes.
TEST(StrategyRun, WarmUpExercisesEveryLayoutAndChangesNothing) {
  EngineOptions options = with_attention(dense_to_sparse(10, 0.75));
  options.warm_up = WarmUpMode::off;
  Engine cold = Engine::open(e2e::pico(), options);
  options.warm_up = WarmUpMode::on;
  Engine warm = Engine::open(e2e::pico(), options);
  const Result without = cold.generate(small_request()), with = warm.generate(small_request());
  EXPECT_EQ(without.latents.values, with.latents.values);
  EXPECT_EQ(without.frames.rgb, with.frames.rgb);
  const auto calls = [](const Result& result) {
    return Json::parse(result.report, "report").at("attention").at("dispatch").items().size();
  };
  EXPECT_EQ(calls(without), calls(with));

  const Json pending = warm_up_of(without), done = warm_up_of(with);
  EXPECT_EQ(pending.at("summary").as_string(),
            "1 of 2 layouts exercised; pending: sparse cosmos3.gen");
  EXPECT_TRUE(pending.at("layouts").at(size_t{0}).at("exercised").as_bool());
  EXPECT_FALSE(pending.at("layouts").at(size_t{1}).at("exercised").as_bool());
  EXPECT_EQ(done.at("summary").as_string(), "2 of 2 layouts exercised");
}

TEST(StrategyRun, AutomaticWarmUpLeavesTheCpuAlone) {
  Engine engine = Engine::open(e2e::pico(), with_attention(dense_to_sparse(10, 0.75)));
  EXPECT_EQ(warm_up_of(engine.generate(small_request(1)))
                .at("layouts")
                .at(size_t{1})
                .at("exercised")
                .as_bool(),
            false);
}

TEST(StrategyRun, TheTextTowerRunsItsPreset) {
  const std::string strategy =
      Json::object()
          .set("default", kDense)
          .set("per_role",
               Json::object().set("cosmos3.und", Json::object().set("backend", "reference")))
          .dump();
  Engine engine = Engine::open(e2e::pico(), with_attention(strategy));
  const Result result = engine.generate(small_request(1));
  int64_t text = 0;
  const Json report = Json::parse(result.report, "report");
  for (const Json& call : report.at("attention").at("dispatch").items()) {
    const bool is_text = call.at("role").as_string() == "cosmos3.und";
    EXPECT_EQ(call.at("implementation").as_string(), is_text ? "reference" : "native");
    text += is_text;
  }
  EXPECT_EQ(text, 2 * 7);
}

TEST(StrategyRun, OpeningLogsTheSourceAndRefusesWhatCannotRun) {
  std::vector<std::string> log;
  EngineOptions options = with_attention(dense_to_sparse(2, 0.75));
  options.log = [&](const std::string& sentence) { log.push_back(sentence); };
  Engine engine = Engine::open(e2e::pico(), options);
  EXPECT_EQ(log,
            std::vector<std::string>{"attention strategy from: runtime; layouts: dense, sparse"});
  const std::vector<float> before = engine.generate(small_request()).latents.values;
  try {
    engine.use_attention(R"({"default": {"backend": "cudnn"}})");
    ADD_FAILURE() << "cudnn on the CPU";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::unsupported);
    EXPECT_NE(std::string(error.what()).find("cudnn"), std::string::npos) << error.what();
  }
  // The strategy stays as it was.
  EXPECT_EQ(engine.generate(small_request()).latents.values, before);
}

TEST(StrategyRun, TheCheckpointsStrategyIsUsedUnlessTheRuntimeSaysOtherwise) {
  Json strategy = Json::load(recipe("cosmos3-subblock-strategy.json"));
  const auto runtime = [](const Json& config) {
    return Json::object().set("attention_strategy",
                              Json::object().set("schema_version", 1).set("config", config));
  };
  const DeepModel model(runtime(strategy));
  std::vector<std::string> log;
  EngineOptions options;
  options.log = [&](const std::string& sentence) { log.push_back(sentence); };
  Engine::open(model.path(), options);
  options.attention = "dense";
  Engine::open(model.path(), options);
  options.attention = R"({"checkpoint_policy": "ignore"})";
  Engine::open(model.path(), options);
  EXPECT_EQ(
      log, (std::vector<std::string>{"attention strategy from: checkpoint; layouts: dense, mixed",
                                     "attention strategy from: runtime; layouts: static",
                                     "attention strategy from: runtime_disabled; layouts: dense"}));
  const DeepModel damaged(runtime(Json::object().set("presets", Json::object())));
  EXPECT_THROW(Engine::open(damaged.path()), Error);
}

// The deployment owns the strategy: nothing in a request names a layout.
TEST(StrategyRun, ARequestCannotChooseALayout) {
  const ScratchFolder scratch;
  const std::vector<std::string> arguments{"generate",
                                           "--model",
                                           e2e::pico(),
                                           "--height",
                                           "64",
                                           "--width",
                                           "64",
                                           "--num-frames",
                                           "5",
                                           "--num-inference-steps",
                                           "2",
                                           "--output",
                                           (scratch.path() / "x.mp4").string()};
  auto flagged = arguments;
  flagged.insert(flagged.end(), {"--prompt", "x", "--layout", "sparse"});
  const e2e::Outcome refused = e2e::run(flagged);
  EXPECT_EQ(refused.status, 2);
  EXPECT_NE(refused.err.find("--layout"), std::string::npos) << refused.err;

  const fs::path prompt = scratch.write(
      "prompt.json",
      R"({"prompt": "A small red circle.", "attention": {"default": "reference"}, "layout": "sparse"})");
  auto asked = arguments;
  asked.insert(asked.end(), {"--prompt-file", prompt.string()});
  const e2e::Outcome unknown = e2e::run(asked);
  EXPECT_EQ(unknown.status, 2);
  EXPECT_NE(unknown.err.find("attention is not known"), std::string::npos) << unknown.err;
}

TEST(StrategyRun, ComparesSideBySide) {
  const ScratchFolder scratch;
  const fs::path sparse = scratch.write("mostly-sparse.json", dense_to_sparse(1, 0.75));
  const e2e::Outcome outcome = e2e::run({"compare",
                                         "--model",
                                         e2e::pico(),
                                         "--prompt",
                                         "A small red circle moves left on a black background.",
                                         "--height",
                                         "192",
                                         "--width",
                                         "192",
                                         "--num-frames",
                                         "17",
                                         "--num-inference-steps",
                                         "4",
                                         "--guidance-scale",
                                         "3",
                                         "--attention",
                                         "dense",
                                         "--attention",
                                         sparse.string(),
                                         "--attention",
                                         dense_to_sparse(4, 0.9),
                                         "--output",
                                         scratch.path().string()});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("mostly-sparse"), std::string::npos) << outcome.out;
  EXPECT_EQ(ScratchFolder::read(scratch.path() / "compare.txt"), outcome.out);

  const Video video = read_video(scratch.path() / "compare.mp4");
  EXPECT_EQ(video.frames.size(), 17u);
  EXPECT_EQ(video.width, 3 * 192);
  EXPECT_GT(video.height, 192);  // the labels
  const Image sheet = read_image(scratch.path() / "compare.png");
  EXPECT_EQ(sheet.width, 5 * 96);
  EXPECT_GT(sheet.height, 3 * 96);

  const Json table = Json::load(scratch.path() / "compare.json");
  ASSERT_EQ(table.items().size(), 3u);
  const Json &dense = table.at(size_t{0}), &mixed = table.at(size_t{1}),
             &same = table.at(size_t{2});
  EXPECT_EQ(mixed.at("strategy").as_string(), "mostly-sparse");
  EXPECT_EQ(same.at("strategy").as_string(), "strategy 3");
  for (const Json* row : {&dense, &same}) {
    EXPECT_TRUE(row->at("psnr").is_null());
    EXPECT_EQ(row->at("latent_error").as_double(), 0);
    EXPECT_EQ(row->at("kept_share").as_double(), 1);
  }
  EXPECT_EQ(dense.at("speed_up").as_double(), 1);
  EXPECT_GT(mixed.at("latent_error").as_double(), 0);
  EXPECT_LT(mixed.at("psnr").as_double(), 80);
  EXPECT_LT(mixed.at("kept_share").as_double(), 1);
  // One dense step of four, and the rest as the blocks say.
  double kept = 0;
  for (const Json& use : mixed.at("presets").items()) {
    if (use.at("preset").as_string() != "sparse") continue;
    kept = use.at("kept_blocks").as_double() / use.at("all_blocks").as_double();
    EXPECT_EQ(use.at("calls").as_int(), 3 * 8 * 2);
  }
  EXPECT_NEAR(mixed.at("kept_share").as_double(), 0.25 + 0.75 * kept, 1e-9);
}

}  // namespace
}  // namespace orrery
