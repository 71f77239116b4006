// What a caller is told while a request runs, and how it ends one.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <thread>

#include "expect_error.h"
#include "orrery/engine.h"
#include "process.h"
#include "small_request.h"

namespace orrery {
namespace {

Frames moving_square(int64_t count, int64_t size) {
  Frames frames{count, size, size,
                std::vector<uint8_t>(static_cast<size_t>(count * size * size * 3))};
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t i = 0; i < 256; ++i) {
      const int64_t y = 16 + i / 16, x = (4 + 3 * t + i % 16) % size;
      frames.rgb[static_cast<size_t>(((t * size + y) * size + x) * 3)] = 230;
    }
  }
  return frames;
}

// 13 frames in two chunks of 9: the second continues the first one's last frame.
Request transfer_request() {
  Request request = e2e::small_request(64, 64, 13);
  request.video = moving_square(13, 64);
  request.transfer = TransferRequest{};
  request.transfer->controls = {{ControlHint::edge, {}}};
  request.transfer->num_video_frames_per_chunk = 9;
  return request;
}

class EventsOfARequest : public testing::Test {
 protected:
  static Engine& engine() {
    static Engine shared = Engine::open(e2e::pico());
    return shared;
  }
};

struct Told {
  std::vector<Progress> progress;
  Frames frames;
  Events events() {
    return {[this](const Progress& p) { progress.push_back(p); },
            [this](const FrameSpan& span) {
              EXPECT_EQ(span.first, frames.count);
              frames.count += span.count;
              frames.rgb.insert(frames.rgb.end(), span.rgb,
                                span.rgb + span.count * span.height * span.width * 3);
            }};
  }
  // "stage chunk" of every beginning.
  std::vector<std::string> stages() const {
    std::vector<std::string> names;
    for (const Progress& p : progress) {
      if (p.step == 0) names.push_back(p.stage + " " + std::to_string(p.chunk));
    }
    return names;
  }
};

// Each stage begins once, counts up, and ends once.
void expect_stages(const Told& told, const std::vector<std::string>& want) {
  EXPECT_EQ(told.stages(), want);
  size_t ends = 0;
  for (size_t i = 0; i < told.progress.size(); ++i) {
    const Progress& p = told.progress[i];
    ASSERT_GT(p.total, 0);
    ASSERT_LE(p.step, p.total);
    ends += p.step == p.total;
    if (p.step == 0) {
      EXPECT_TRUE(i == 0 || told.progress[i - 1].step == told.progress[i - 1].total) << p.stage;
      EXPECT_EQ(p.step_seconds, 0);
    } else {
      EXPECT_EQ(p.stage, told.progress[i - 1].stage);
      EXPECT_GT(p.step, told.progress[i - 1].step);
      EXPECT_GT(p.step_seconds, 0);
    }
  }
  EXPECT_EQ(ends, want.size());
}

// The rest of the request is known from the first step on, and nothing is left at the end.
void expect_forecast(const Told& told) {
  bool known = false;
  for (const Progress& p : told.progress) {
    if (p.stage == "denoise" && p.step == 1) known = true;
    if (!known) continue;
    ASSERT_TRUE(p.seconds_left.has_value()) << p.stage << " " << p.step;
    EXPECT_TRUE(std::isfinite(*p.seconds_left));
    EXPECT_GE(*p.seconds_left, 0);
    if (&p != &told.progress.back()) continue;
    EXPECT_EQ(*p.seconds_left, 0);
  }
  EXPECT_TRUE(known);
}

TEST_F(EventsOfARequest, TellEveryStageOfAClip) {
  Told told;
  const Result result = engine().generate(e2e::small_request(64, 64, 9), told.events());
  expect_stages(told, {"prompt 0", "noise 0", "denoise 0", "decode 0"});
  expect_forecast(told);
  EXPECT_EQ(result.frames.count, 9);
  EXPECT_EQ(told.frames.rgb, result.frames.rgb);
  // The same stages are timed, and the report says the same times.
  ASSERT_EQ(result.times.stages.size(), 4u);
  EXPECT_EQ(result.times.stages[2].name, "denoise");
  EXPECT_EQ(result.times.step_seconds.size(), 2u);
  EXPECT_GT(result.times.stage("denoise").flops, 0);
  EXPECT_GE(result.times.stage("denoise").seconds,
            result.times.step_seconds[0] + result.times.step_seconds[1]);
  EXPECT_GT(result.times.total_seconds(), result.times.stage("denoise").seconds);
  EXPECT_GT(result.memory.arena, 0);
}

TEST_F(EventsOfARequest, TellEveryChunk) {
  Told told;
  const Result result = engine().generate(transfer_request(), told.events());
  expect_stages(told, {"prompt 0", "encode 0", "noise 0", "denoise 0", "decode 0", "encode 1",
                       "noise 1", "denoise 1", "decode 1"});
  expect_forecast(told);
  EXPECT_EQ(told.frames.count, 13);
  EXPECT_EQ(told.frames.rgb, result.frames.rgb);
  std::vector<int64_t> decoded;  // frames that each chunk adds
  for (const Progress& p : told.progress) {
    EXPECT_EQ(p.chunks, 2);
    if (p.stage == "decode" && p.step == p.total) decoded.push_back(p.total);
  }
  EXPECT_EQ(decoded, (std::vector<int64_t>{9, 4}));
}

TEST_F(EventsOfARequest, RatesOfOneRequestForecastTheNext) {
  engine().generate(e2e::small_request(64, 64, 1));
  Told told;
  engine().generate(e2e::small_request(64, 64, 5), told.events());
  for (const Progress& p : told.progress) {
    if (p.stage != "prompt" || p.step > 0) {
      EXPECT_TRUE(p.seconds_left.has_value()) << p.stage;
    }
  }
}

// --- stopping
// --------------------------------------------------------------------------------------

// Between frames that are decoded together: the rest is not decoded.
TEST_F(EventsOfARequest, AStopEndsADecodeBetweenItsChunks) {
  const Request request = e2e::small_request(64, 64, 33);
  const Result whole = engine().generate(request);
  std::stop_source stop;
  int64_t told = 0;
  Events events;
  events.frames = [&](const FrameSpan& span) {
    told += span.count;
    stop.request_stop();
  };
  expect_error(ErrorKind::cancelled, {"stopped during decode"},
               [&] { engine().generate(request, events, stop.get_token()); });
  EXPECT_GT(told, 0);
  EXPECT_LT(told, 33);
  // The engine is as good as new.
  EXPECT_EQ(engine().generate(request).frames.rgb, whole.frames.rgb);
}

TEST_F(EventsOfARequest, AStopEndsEveryStage) {
  for (const std::string stage : {"prompt", "encode", "noise", "denoise", "decode"}) {
    std::stop_source stop;
    Events events;
    std::string last;
    events.progress = [&](const Progress& p) {
      last = p.stage;
      if (p.stage == stage) stop.request_stop();
    };
    const std::string message = "stopped during " + stage;
    expect_error(ErrorKind::cancelled, {message},
                 [&] { engine().generate(transfer_request(), events, stop.get_token()); });
    EXPECT_EQ(last, stage);
  }
}

// All ranks stop at the same step, and serve the next request.
TEST(EventsOfRanks, StopTogether) {
  for (const int axis : {0, 1}) {
    EngineOptions options;
    options.num_threads = 2;
    (axis == 0 ? options.cp_degree : options.cfg_degree) = 2;
    Engine engine = Engine::open(e2e::pico(), options);
    const Request request = e2e::small_request(64, 64, 5);
    const Result whole = engine.generate(request);
    std::stop_source stop;
    Events events;
    events.progress = [&](const Progress& p) {
      if (p.stage == "denoise" && p.step == 1) stop.request_stop();
    };
    expect_error(ErrorKind::cancelled, {"stopped during denoise (1 of 2)"},
                 [&] { engine.generate(request, events, stop.get_token()); });
    EXPECT_EQ(engine.generate(request).latents.values, whole.latents.values);
  }
}

// --- the guardrail
// ---------------------------------------------------------------------------------

TEST(EventsOfGuardrail, FramesAreToldOnceApproved) {
  EngineOptions options;
  options.guardrail = R"(cat > /dev/null; echo '{"verdict": "approved"}' #)";
  Engine engine = Engine::open(e2e::pico(), options);
  Told told;
  Events events = told.events();
  std::set<std::string> stages_before;
  const auto frames = events.frames;
  events.frames = [&](const FrameSpan& span) {
    EXPECT_EQ(told.progress.back().stage, "guardrail");
    frames(span);
  };
  const Result result = engine.generate(e2e::small_request(64, 64, 5), events);
  expect_stages(told,
                {"guardrail 0", "prompt 0", "noise 0", "denoise 0", "decode 0", "guardrail 0"});
  EXPECT_EQ(told.frames.rgb, result.frames.rgb);
}

TEST(EventsOfGuardrail, ABlockedClipIsNotSeenAndHasItsOwnKind) {
  EngineOptions options;
  options.guardrail =
      R"(f() { cat > /dev/null; [ $1 = prompt ] && echo '{"verdict": "approved"}' || )"
      R"(echo '{"verdict": "blocked", "reason": "too red"}'; }; f)";
  Engine engine = Engine::open(e2e::pico(), options);
  int64_t told = 0;
  Events events;
  events.frames = [&](const FrameSpan& span) { told += span.count; };
  expect_error(ErrorKind::blocked, {"too red"},
               [&] { engine.generate(e2e::small_request(64, 64, 1), events); });
  EXPECT_EQ(told, 0);
}

TEST(EventsOfGuardrail, NoVerdictHasItsOwnKind) {
  EngineOptions options;
  options.guardrail = "exit 7 #";
  Engine engine = Engine::open(e2e::pico(), options);
  expect_error(ErrorKind::guardrail, {"status 7"},
               [&] { engine.generate(e2e::small_request(64, 64, 1)); });
}

}  // namespace
}  // namespace orrery
