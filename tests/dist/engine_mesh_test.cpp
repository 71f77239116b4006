// Whole requests on the small model: any mesh of ranks in one process gives what one rank gives,
// cfg to the bit, cp and tp within rounding (transformer_mesh_test.cpp holds cp to the bit, too).
#include <cmath>
#include <fstream>
#include <sstream>

#include "../e2e/small_request.h"
#include "base/error.h"
#include "bench/bench.h"
#include "dist/mesh.h"
#include "engine/fidelity.h"
#include "golden/golden.h"
#include "io/safetensors.h"
#include "orrery/engine.h"
#include "scratch_folder.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

Request small_clip() {
  Request request = e2e::small_request(80, 96, 9);  // 5 x 6 tokens a frame
  request.negative_prompt = "blur";
  request.seed = 7;
  return request;
}

Frames picture(int64_t count, int64_t height, int64_t width) {
  Frames frames{count, height, width, {}};
  for (int64_t i = 0; i < count * height * width * 3; ++i)
    frames.rgb.push_back(static_cast<uint8_t>(i * 37 % 251));
  return frames;
}

EngineOptions on(const Mesh& mesh) {
  EngineOptions options;
  options.num_threads = 2;
  options.tp_degree = mesh.tp;
  options.cp_degree = mesh.cp;
  options.cfg_degree = mesh.cfg;
  return options;
}

Result generate(const Request& request, const EngineOptions& options) {
  return Engine::open(golden::model_directory(), options).generate(request);
}

// Every mesh of 2, 4 and 8 ranks that 4 query and 2 key/value heads allow; cp 4 has more ranks than
// key/value heads. No degree of 3 divides 4 heads: tests/dist/transformer_mesh_test.cpp has meshes
// of 3 and 6.
const std::vector<Mesh> kMeshes{{1, 2, 1}, {1, 1, 2}, {2, 1, 1}, {1, 4, 1}, {1, 2, 2},
                                {2, 2, 1}, {2, 1, 2}, {1, 4, 2}, {2, 2, 2}};
const std::vector<Mesh> kFewMeshes{{1, 2, 1}, {2, 1, 1}, {1, 4, 2}};

// One rounding more or less in each of 8 layers' sums (see transformer_mesh_test.cpp: 768 terms),
// two steps of a solver, guidance 3 that amplifies what two branches differ in by up to 3 + 2. cp
// changes the number of rows of a product, and with it, perhaps, the order that oneDNN adds in.
const double kSumTolerance = 5 * 2 * 4 * 2 * 8 * std::sqrt(768.0) * 0x1p-24;

void expect_same_on(const std::vector<Mesh>& meshes, const Request& request,
                    const std::string& attention, const std::vector<LoraFile>& lora = {}) {
  const auto with = [&](const Mesh& mesh) {
    EngineOptions options = on(mesh);
    options.attention = attention;
    options.lora = lora;
    return options;
  };
  const Result want = generate(request, with({}));
  ASSERT_FALSE(want.latents.values.empty());
  for (const Mesh& mesh : meshes) {
    const bool guided = request.guidance_scale.value_or(6) != 1;
    if (mesh.cfg > 1 && !guided) continue;
    const auto label = concat("tp ", mesh.tp, " cp ", mesh.cp, " cfg ", mesh.cfg);
    const Result got = generate(request, with(mesh));
    ASSERT_EQ(got.latents.shape, want.latents.shape) << label;
    if (mesh.tp == 1 && mesh.cp == 1) {
      EXPECT_EQ(got.latents.values, want.latents.values) << label;
      EXPECT_EQ(got.frames.rgb, want.frames.rgb) << label;
      EXPECT_EQ(got.sound, want.sound) << label;
      if (want.action) {
        EXPECT_EQ(got.action.value().values, want.action->values) << label;
      }
    } else {
      EXPECT_LT(golden::relative_error(got.latents.values, want.latents.values), kSumTolerance)
          << label;
      if (want.action) {
        EXPECT_LT(golden::relative_error(got.action.value().values, want.action->values),
                  kSumTolerance)
            << label;
      }
      // A level here and there where a rounding tips it: a mean square of 0.1.
      EXPECT_GT(psnr(got.frames, want.frames), 10 * std::log10(255 * 255 / 0.1)) << label;
    }
  }
}

TEST(EngineMesh, TextToVideo) { expect_same_on(kMeshes, small_clip(), "dense"); }

TEST(EngineMesh, OneImageWithoutGuidance) {
  Request request = small_clip();
  request.num_frames = 1;
  request.guidance_scale = 1;
  expect_same_on(kMeshes, request, "dense");
}

TEST(EngineMesh, ImageToVideoUnderAMixedSchedule) {
  Request request = small_clip();
  request.image = picture(1, 80, 96);
  request.num_inference_steps = 3;
  std::ifstream file(source_dir().string() + "/recipes/attention/pico-dense-mixed-dense.json");
  std::stringstream text;
  text << file.rdbuf();
  expect_same_on(kMeshes, request, text.str());
}

// B70: actions end in the same gather as the video.
TEST(EngineMesh, PredictedActions) {
  Request request = small_clip();
  request.height.reset();
  request.width.reset();
  request.num_frames.reset();
  request.image = picture(1, 256, 256);
  request.action = ActionRequest{};
  request.action->mode = ActionMode::policy;
  request.action->domain_name = "pusht";
  request.action->chunk_size = 4;
  request.action->resolution_tier = 256;
  expect_same_on(kFewMeshes, request, "dense");
}

// Controls in the sequence, weighted streams, three evaluations for two guidance groups, and a
// second chunk that continues the first one's decoded frames.
TEST(EngineMesh, TransferInChunks) {
  Request request = small_clip();
  request.num_frames = 9;
  request.transfer = TransferRequest{};
  request.transfer->controls = {{ControlHint::edge, picture(9, 80, 96), 1.0},
                                {ControlHint::blur, picture(9, 80, 96), 2.0}};
  request.transfer->control_guidance = 1.5;
  request.transfer->num_video_frames_per_chunk = 5;
  expect_same_on(kFewMeshes, request, "dense");
}

// A merged weight is cut like a stored one, by rows (q) and by columns (o).
TEST(EngineMesh, AdapterOnCutWeights) {
  const ScratchFolder folder;
  std::vector<float> down, up;
  for (int i = 0; i < 512; ++i) {
    down.push_back(0.01f * static_cast<float>(i % 17 - 8));
    up.push_back(0.02f * static_cast<float>(i % 13 - 6));
  }
  const View a = make_view(down.data(), {2, 256}, DType::f32),
             b = make_view(up.data(), {256, 2}, DType::f32);
  const auto file = folder.path() / "adapter.safetensors";
  const std::string at = "transformer.layers.3.self_attn.";
  write_safetensors(file, {{at + "add_q_proj.lora_A.weight", a},
                           {at + "add_q_proj.lora_B.weight", b},
                           {at + "to_add_out.lora_A.weight", a},
                           {at + "to_add_out.lora_B.weight", b}});
  Request request = small_clip();
  request.num_inference_steps = 1;
  EngineOptions adapted = on({});
  adapted.lora = {{file, 1}};
  ASSERT_NE(generate(request, adapted).latents.values, generate(request, on({})).latents.values);
  expect_same_on(kFewMeshes, request, "dense", {{file, 1}});
}

std::string refusal(const Request& request, const EngineOptions& options) {
  try {
    generate(request, options);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Where a value stops being finite is told as one rank tells it, whichever rank sees it first.
TEST(EngineMesh, NamesTheLayerThatOverflows) {
  Request request = small_clip();
  const Result finite = generate(request, on({}));
  request.latents = finite.latents;
  for (float& value : request.latents->values) value = std::copysign(3e38f, value);
  const std::string want = refusal(request, on({}));
  EXPECT_NE(want.find("step 0"), std::string::npos) << want;
  EXPECT_NE(want.find("branch"), std::string::npos) << want;
  for (const Mesh& mesh : {Mesh{1, 4, 1}, Mesh{1, 1, 2}, Mesh{2, 2, 1}, Mesh{1, 2, 2}}) {
    EXPECT_EQ(refusal(request, on(mesh)), want);
  }
}

TEST(EngineMesh, ServesOneRequestAfterAnotherAndAfterAFailure) {
  Engine engine = Engine::open(golden::model_directory(), on({1, 2, 2}));
  Request request = small_clip();
  const Result first = engine.generate(request);
  request.guidance_scale = 1;  // leaves two of the four ranks without a branch
  EXPECT_THROW(engine.generate(request), Error);
  std::stop_source stop;
  stop.request_stop();
  EXPECT_THROW(engine.generate(small_clip(), {}, stop.get_token()), Error);
  EXPECT_EQ(engine.generate(small_clip()).latents.values, first.latents.values);
}

// B72, B73: said before anything runs, with the degrees that would do.
TEST(EngineMesh, RefusesDegreesThatDoNotFit) {
  const Request request = small_clip();
  const auto says = [&](const Mesh& mesh, const std::string& part) {
    const std::string opened = refusal(request, on(mesh));
    EXPECT_NE(opened.find(part), std::string::npos) << opened;
    std::string checked;
    try {
      check_request(golden::model_directory(), request, on(mesh));
    } catch (const Error& error) {
      checked = error.what();
    }
    EXPECT_EQ(checked, opened);
  };
  says({3, 1, 1},
       "tp degree 3 does not divide this checkpoint's 4 query heads, 2 key/value heads, 768 "
       "feed-forward columns; degrees that do: 1, 2");
  says({4, 1, 1}, "degrees that do: 1, 2");
  says({1, 3, 1},
       "cp degree 3 does not divide the 4 query heads of a rank (4 over tp 1); degrees that do: 1, "
       "2, 4");
  says({2, 4, 1}, "degrees that do: 1, 2");
  says({1, 1, 3}, "cfg degree 3: expected 1 or 2");
  says({0, 1, 1}, "tp degree 0");
  says({1, -1, 1}, "cp degree -1");
  Request plain = request;
  plain.guidance_scale = 1;
  EXPECT_NE(
      refusal(plain, on({1, 1, 2})).find("cfg degree 2 shares out the branches of the guidance"),
      std::string::npos);
}

// What a rank holds: tp cuts the weights, cp the activations.
TEST(EngineMesh, PlanCountsOneRank) {
  Request request = small_clip();
  request.height = 256;
  request.width = 256;
  request.num_frames = 33;
  const Plan one = plan_request(golden::model_directory(), request, on({}));
  const Plan tp = plan_request(golden::model_directory(), request, on({2, 1, 1}));
  const Plan cp = plan_request(golden::model_directory(), request, on({1, 4, 1}));
  EXPECT_EQ(one.ranks, 1);
  EXPECT_EQ(cp.ranks, 4);
  EXPECT_LT(tp.weight_bytes, one.weight_bytes);
  EXPECT_EQ(cp.weight_bytes, one.weight_bytes);
  const auto denoise = [](const Plan& plan) {
    for (const Plan::Stage& stage : plan.stages) {
      if (stage.name == "denoise") return stage.flops;
    }
    return 0.0;
  };
  // All but the embedding, which every rank computes whole.
  EXPECT_LT(denoise(cp), 0.27 * denoise(one));
  EXPECT_GT(denoise(cp), 0.25 * denoise(one));
}

TEST(BenchMeshes, RefusesWhatIsNoMesh) {
  const auto refusal_of = [](const std::string& what, const std::string& meshes) {
    BenchOptions options;
    options.what = what;
    options.meshes = meshes;
    try {
      run_bench(options, EngineOptions{}, [](const std::string& line) { ADD_FAILURE() << line; });
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
      return std::string(error.what());
    }
    return std::string();
  };
  for (const char* mesh :
       {"cp", "2", "xp2", "cp2x", "cp0", "cp1", "cp2@", "cp2@many", "cp9999999999"}) {
    EXPECT_EQ(refusal_of("step", mesh),
              concat("bench: mesh \"", mesh,
                     "\" is not known; it names axes and degrees, as in cp2, tp2cp2 or cp2@4096"));
  }
  EXPECT_EQ(refusal_of("layer", "cp2"),
            "bench layer runs on one device; step, vae and link take meshes");
  EXPECT_EQ(refusal_of("link", ""), "bench link: needs ranks; give --meshes, or a degree above 1");
}

}  // namespace
}  // namespace orrery
