// Structural control end to end. The shipped checkpoint never saw a control, so what is tested is
// what holds for any weights.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/json.h"
#include "expect_error.h"
#include "io/control_maps.h"
#include "io/video.h"
#include "orrery/engine.h"
#include "process.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

// A white square that moves right, a step of `step` pixels a frame.
Frames square(int64_t count, int64_t step, uint8_t level = 255) {
  Frames frames{count, 64, 64, std::vector<uint8_t>(static_cast<size_t>(count * 64 * 64 * 3))};
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t y = 20; y < 40; ++y) {
      for (int64_t x = 4 + t * step; x < 24 + t * step && x < 64; ++x) {
        for (int64_t c = 0; c < 3; ++c)
          frames.rgb[static_cast<size_t>(((t * 64 + y) * 64 + x) * 3 + c)] = level;
      }
    }
  }
  return frames;
}

Request steered(std::vector<Control> controls) {
  Request request;
  request.prompt = "A small white square moves right on a black background.";
  request.height = 64;
  request.width = 64;
  request.num_inference_steps = 2;
  request.seed = 5;
  request.transfer = TransferRequest{};
  request.transfer->controls = std::move(controls);
  return request;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += double(a[i] - b[i]) * double(a[i] - b[i]);
    norm += double(a[i]) * double(a[i]);
  }
  return std::sqrt(difference / norm);
}

class TransferRun : public testing::Test {
 protected:
  static Engine& engine() {
    static Engine shared = Engine::open(e2e::pico());
    return shared;
  }
  static std::vector<float> latents(const Request& request) {
    return engine().generate(request).latents.values;
  }
};

TEST_F(TransferRun, OneControlIsTheSameWeightedAndJoint) {
  Request request = steered({{ControlHint::edge, square(5, 4), 0.3}});
  const std::vector<float> weighted = latents(request);
  request.transfer->controls[0].weight.reset();
  request.transfer->attention = ControlAttention::joint;
  EXPECT_EQ(latents(request), weighted);
}

// B44.
TEST_F(TransferRun, WeightsChangeTheResult) {
  Request request = steered(
      {{ControlHint::edge, square(5, 4), 1.0}, {ControlHint::seg, square(5, -4, 120), 0.0}});
  const std::vector<float> edge = latents(request);
  request.transfer->controls[0].weight = 0;
  request.transfer->controls[1].weight = 1;
  const std::vector<float> seg = latents(request);
  EXPECT_GT(distance(edge, seg), 1e-4);
  request.transfer->controls[0].weight = 2;
  request.transfer->controls[1].weight = 2;
  const std::vector<float> both = latents(request);
  EXPECT_GT(distance(both, edge), 1e-5);
  // Weights count by their share.
  request.transfer->controls[0].weight.reset();
  request.transfer->controls[1].weight.reset();
  EXPECT_EQ(latents(request), both);
  request.transfer->attention = ControlAttention::joint;
  EXPECT_GT(distance(latents(request), both), 1e-5);

  // A control without weight leaves no trace: the target's result is that of the other alone, up to
  // the guidance of the single hint, which is set here.
  Request alone = steered({{ControlHint::edge, square(5, 4), {}}});
  alone.guidance_scale = 3;
  alone.transfer->control_guidance = 1.5;
  request.transfer->attention = ControlAttention::weighted;
  request.transfer->controls[0].weight = 1;
  request.transfer->controls[1].weight = 0;
  request.guidance_scale = 3;
  request.transfer->control_guidance = 1.5;
  EXPECT_LT(distance(latents(request), latents(alone)), 1e-5);
}

TEST_F(TransferRun, ControlsReachTheResultAndGuidanceAmplifiesThem) {
  Request request = steered({{ControlHint::edge, square(5, 4), {}}});
  const std::vector<float> one = latents(request);
  request.transfer->controls[0].video = square(5, 0, 90);
  EXPECT_GT(distance(latents(request), one), 1e-4);
  request.transfer->controls[0].video = square(5, 4);
  request.transfer->control_guidance = 1;
  const std::vector<float> plain = latents(request);
  EXPECT_GT(distance(plain, one), 1e-5);
  // Outside its interval control guidance is 1; no timestep is above 1000.
  request.transfer->control_guidance = 1.5;
  request.transfer->control_guidance_interval = TimestepInterval{2000, 3000};
  EXPECT_EQ(latents(request), plain);
}

// Frames that are fixed have exactly the latents of the clean clip, so that other noise changes
// nothing there.
TEST_F(TransferRun, ConditionedLatentsAreBitEqual) {
  Request request = steered({{ControlHint::edge, square(9, 4), {}}});
  request.video = square(9, 4);
  request.transfer->num_first_chunk_conditional_frames = 5;  // latent frames 0 and 1 of 3
  const Result first = engine().generate(request);
  request.seed = 6;
  request.num_inference_steps = 3;
  const Result second = engine().generate(request);
  ASSERT_EQ(first.latents.shape, (std::vector<int64_t>{1, 16, 3, 4, 4}));
  for (int64_t c = 0; c < 16; ++c) {
    for (int64_t t = 0; t < 3; ++t) {
      const auto at = first.latents.values.begin() + (c * 3 + t) * 16;
      const bool same = std::equal(at, at + 16, second.latents.values.begin() + (c * 3 + t) * 16);
      EXPECT_EQ(same, t < 2) << c << " " << t;
    }
  }
}

TEST_F(TransferRun, ChunksMakeEveryFrameOnce) {
  Request request =
      steered({{ControlHint::edge, square(12, 4), {}}, {ControlHint::depth, square(7, 2), {}}});
  request.transfer->num_video_frames_per_chunk = 5;
  request.num_inference_steps = 1;
  std::vector<std::string> stages;
  Events events;
  events.progress = [&](const Progress& progress) {
    if (progress.step == 0 && progress.stage == "denoise") stages.push_back(progress.stage);
  };
  const Result result = engine().generate(request, events);
  EXPECT_EQ(result.frames.count, 12);
  EXPECT_EQ(result.frames.rgb.size(), 12u * 64 * 64 * 3);
  EXPECT_EQ(stages.size(), 3u);  // 5, then 4 new ones each
  const Json settings = Json::parse(result.report, "report").at("settings");
  const Json& transfer = settings.at("transfer");
  EXPECT_EQ(transfer.at("chunks").as_int(), 3);
  EXPECT_EQ(transfer.at("stride").as_int(), 4);
  EXPECT_EQ(settings.at("control_attention").as_string(), "weighted");
  EXPECT_EQ(transfer.at("controls").at(size_t{1}).at("weight").as_double(), 0.5);

  // The first chunk is what a run of its frames alone makes; both are 4 n + 1.
  Request begin = request;
  begin.num_frames = 5;
  const Result alone = engine().generate(begin);
  ASSERT_EQ(alone.frames.count, 5);
  EXPECT_TRUE(
      std::equal(alone.frames.rgb.begin(), alone.frames.rgb.end(), result.frames.rgb.begin()));
  // A later chunk depends on the one before through the frames it takes over.
  Request apart = request;
  apart.transfer->num_conditional_frames = 0;
  EXPECT_EQ(engine().generate(apart).frames.count, 12);
}

// A control computed from the video is the one that could have been given.
TEST_F(TransferRun, ControlsAreComputedFromTheVideo) {
  const Frames source = square(5, 4);
  Frames edges = source;
  edges.rgb.clear();
  for (int64_t t = 0; t < source.count; ++t) {
    const uint8_t* frame = source.frame(t);
    const Image map = edge_map({64, 64, {frame, frame + 64 * 64 * 3}}, edge_preset("low"));
    edges.rgb.insert(edges.rgb.end(), map.rgb.begin(), map.rgb.end());
  }
  Request computed = steered({{ControlHint::edge, {}, {}, ControlPreset::low}});
  computed.video = source;
  EXPECT_EQ(latents(computed), latents(steered({{ControlHint::edge, edges}})));
  // Another kind of control is another result, and so is the video's own first frame.
  Request blurred = steered({{ControlHint::blur, {}}});
  blurred.video = source;
  EXPECT_GT(distance(latents(blurred), latents(computed)), 1e-4);
  Request kept = computed;
  kept.transfer->num_first_chunk_conditional_frames = 1;
  EXPECT_GT(distance(latents(kept), latents(computed)), 1e-4);
}

// Chunk c of a reseeded run is drawn from seed + c: where nothing is carried over, it is the first
// chunk of a run with that seed.
TEST_F(TransferRun, ChunksAreReseededWhenAsked) {
  Request request = steered({{ControlHint::edge, square(10, 0)}});  // a picture that stands still
  request.num_inference_steps = 1;
  request.transfer->num_video_frames_per_chunk = 5;
  request.transfer->num_conditional_frames = 0;
  request.transfer->chunk_noise = ChunkNoise::reseed;
  const Frames both = engine().generate(request).frames;
  ASSERT_EQ(both.count, 10);
  request.transfer->chunk_noise = ChunkNoise::continued;
  const Frames running = engine().generate(request).frames;
  const auto half = both.rgb.begin() + 5 * 64 * 64 * 3;
  EXPECT_TRUE(std::equal(both.rgb.begin(), half, running.rgb.begin()));
  EXPECT_NE(both.rgb, running.rgb);
  request.num_frames = 5;
  request.seed += 1;
  const Frames second = engine().generate(request).frames;
  ASSERT_EQ(second.count, 5);
  EXPECT_TRUE(std::equal(half, both.rgb.end(), second.rgb.begin()));
}

TEST_F(TransferRun, TheDirectiveIsPartOfThePrompt) {
  Request request = steered({{ControlHint::seg, square(5, 2)}, {ControlHint::edge, square(5, 4)}});
  const std::vector<float> plain = latents(request);
  request.transfer->emphasize_control_in_prompt = true;
  const std::vector<float> asked = latents(request);
  EXPECT_NE(asked, plain);
  request.transfer->emphasize_control_in_prompt = false;
  request.prompt +=
      " Follow the edge, seg control video precisely: shape, contour, silhouette, position, and "
      "motion of every visible structure must align with the edge, seg signal at every frame.";
  EXPECT_EQ(latents(request), asked);
}

TEST_F(TransferRun, TheReportNamesEachPass) {
  Request request =
      steered({{ControlHint::edge, square(5, 4), {}}, {ControlHint::seg, square(5, 2), {}}});
  request.num_inference_steps = 1;
  const Json report = Json::parse(engine().generate(request).report, "report");
  // 8 layers; with controls and the prompt, with controls and no prompt: 2 passes each; without
  // controls: 1.
  int weighted = 0, plain = 0;
  for (const Json& call : report.at("attention").at("dispatch").items()) {
    weighted += call.at("role").as_string() == "cosmos3.gen_multi_control";
    plain += call.at("role").as_string() == "cosmos3.gen";
  }
  EXPECT_EQ(weighted, 8 * 2 * 2);
  EXPECT_EQ(plain, 8);
}

TEST_F(TransferRun, TheProgramTakesItsFlags) {
  const ScratchFolder scratch;
  const auto file = [&](const char* name) { return (scratch.path() / name).string(); };
  VideoOptions options;
  options.height = options.width = 64;
  options.fps = 12;
  VideoWriter writer(file("edge.mp4"), options);
  const Frames frames = square(9, 4);
  for (int64_t i = 0; i < 9; ++i) writer.write(frames.frame(i));
  writer.finish();
  const std::vector<std::string> base{
      "generate", "--model",  e2e::pico(),     "--prompt", "A square.",
      "--height", "64",       "--width",       "64",       "--num-inference-steps",
      "1",        "--output", file("out.mp4"), "--report", file("report.json")};
  const auto with = [&](std::vector<std::string> more) {
    std::vector<std::string> all = base;
    all.insert(all.end(), more.begin(), more.end());
    return e2e::run(all);
  };
  const e2e::Outcome good = with({"--control",
                                  "edge=" + file("edge.mp4"),
                                  "--control",
                                  "seg=" + file("edge.mp4"),
                                  "--control-weight",
                                  "edge=0.75",
                                  "--control-weight",
                                  "seg=0.25",
                                  "--control-guidance",
                                  "2",
                                  "--num-video-frames-per-chunk",
                                  "5",
                                  "--num-conditional-frames",
                                  "1",
                                  "--guidance-interval",
                                  "0",
                                  "900",
                                  "--control-guidance-interval",
                                  "100",
                                  "1000",
                                  "--video-path",
                                  file("edge.mp4"),
                                  "--num-first-chunk-conditional-frames",
                                  "1"});
  ASSERT_EQ(good.status, 0) << good.err;
  EXPECT_EQ(read_video(file("out.mp4")).frames.size(), 9u);
  const Json said = Json::load(file("report.json")).at("settings");
  const Json& transfer = said.at("transfer");
  EXPECT_EQ(transfer.at("controls").at(size_t{0}).at("weight").as_double(), 0.75);
  EXPECT_EQ(said.at("control_guidance").as_double(), 2);
  EXPECT_EQ(said.at("guidance_interval").at(size_t{1}).as_double(), 900);
  EXPECT_EQ(said.at("control_guidance_interval").at(size_t{0}).as_double(), 100);
  EXPECT_EQ(said.at("num_first_chunk_conditional_frames").as_int(), 1);
  EXPECT_EQ(transfer.at("chunks").as_int(), 2);

  EXPECT_EQ(said.at("fps").as_double(), 12);

  // Controls computed from the video, as the public code names them.
  const e2e::Outcome computed =
      with({"--control", "edge", "--control", "blur", "--video-path", file("edge.mp4"),
            "--preset-edge-threshold", "high", "--emphasize-control-in-prompt", "--chunk-noise",
            "reseed", "--video-fit", "cover", "--num-frames", "5"});
  ASSERT_EQ(computed.status, 0) << computed.err;
  const Json settings = Json::load(file("report.json")).at("settings");
  EXPECT_EQ(settings.at("video_fit").as_string(), "cover");
  EXPECT_EQ(settings.at("num_frames").as_int(), 5);
  const Json how = settings.at("transfer");
  EXPECT_EQ(how.at("controls").at(size_t{0}).at("computed").as_string(), "high");
  EXPECT_EQ(how.at("controls").at(size_t{1}).at("computed").as_string(), "medium");
  EXPECT_EQ(settings.at("chunk_noise").as_string(), "reseed");
  EXPECT_TRUE(settings.at("emphasize_control_in_prompt").as_bool());

  // What it needs is known beforehand: 9 frames are 3 latent ones of 2 x 2 tokens, each control as
  // many again; the pass without controls is a third of it.
  const auto plan = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments{
        "plan", e2e::pico(), "--height", "64", "--width", "64", "--num-inference-steps",
        "1",    "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const e2e::Outcome outcome = e2e::run(arguments);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return Json::parse(outcome.out, "plan");
  };
  const std::string given = "edge=" + file("edge.mp4");
  EXPECT_EQ(plan({"--num-frames", "9"}).at("generation_tokens").as_int(), 12);
  EXPECT_EQ(plan({"--control", given}).at("generation_tokens").as_int(), 24);
  EXPECT_EQ(plan({"--control", given, "--control", "blur", "--video-path", file("edge.mp4")})
                .at("generation_tokens")
                .as_int(),
            36);

  const std::string control = "edge=" + file("edge.mp4");
  const std::vector<std::pair<std::vector<std::string>, const char*>> refusals{
      {{"--control", "edges=" + file("edge.mp4")}, "\"edges\" is not known"},
      {{"--control", file("edge.mp4")}, "expected HINT=VALUE"},
      {{"--control", "edge"}, "no input video to compute it from"},
      {{"--control", "depth"}, "expected HINT=VALUE"},
      {{"--control", control, "--preset-edge-threshold", "low"}, "a preset and a video of its own"},
      {{"--control", control, "--preset-blur-strength", "low"}, "there is no --control blur"},
      {{"--control", "edge", "--video-path", file("edge.mp4"), "--preset-edge-threshold", "strong"},
       "--preset-edge-threshold is \"strong\""},
      {{"--chunk-noise", "reseed"}, "needs --control"},
      {{"--control", "edge=" + file("missing.mp4")}, "missing.mp4"},
      {{"--control", control, "--control-weight", "seg=1"}, "there is no --control seg"},
      {{"--control", control, "--control-weight", "edge=much"}, "must be a finite decimal number"},
      {{"--control", control, "--control-weight", "edge=-1"}, "must be at least 0"},
      {{"--control-guidance", "2"}, "needs --control"},
      {{"--control", control, "--enable-sound"}, "no sound"},
  };
  for (const auto& [arguments, says] : refusals) {
    const e2e::Outcome outcome = with(arguments);
    EXPECT_EQ(outcome.status, 2) << says;
    EXPECT_NE(outcome.err.find(says), std::string::npos) << outcome.err;
  }
}

}  // namespace
}  // namespace orrery
