// An engine as an embedder uses it: checking and planning beside generating, several at once.
#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "expect_error.h"
#include "orrery/compare.h"
#include "orrery/engine.h"
#include "process.h"
#include "small_request.h"

namespace orrery {
namespace {

// A picture of which only the size is known, as before an upload is read.
Frames sizes_only(int64_t count, int64_t height, int64_t width) {
  return {count, height, width, {}};
}

void expect_same_plan(const Plan& a, const Plan& b) {
  EXPECT_EQ(a.summary, b.summary);
  ASSERT_EQ(a.stages.size(), b.stages.size());
  for (size_t i = 0; i < a.stages.size(); ++i) {
    EXPECT_EQ(a.stages[i].name, b.stages[i].name);
    EXPECT_EQ(a.stages[i].flops, b.stages[i].flops) << a.stages[i].name;
    EXPECT_EQ(a.stages[i].bytes, b.stages[i].bytes) << a.stages[i].name;
    EXPECT_EQ(a.stages[i].calls, b.stages[i].calls) << a.stages[i].name;
  }
  EXPECT_EQ(a.weight_bytes, b.weight_bytes);
  EXPECT_EQ(a.activation_bytes, b.activation_bytes);
  EXPECT_EQ(a.state_bytes, b.state_bytes);
  EXPECT_EQ(a.peak_bytes, b.peak_bytes);
  EXPECT_EQ(a.tokens, b.tokens);
}

TEST(Facade, ChecksAndPlansOnAnOpenEngineAsOnAFolder) {
  Engine engine = Engine::open(e2e::pico());
  Request request = e2e::small_request(64, 96, 9);
  request.image = sizes_only(1, 200, 300);
  const Outline here = engine.check(request), there = check_request(e2e::pico(), request);
  EXPECT_EQ(here.frames, 9);
  EXPECT_EQ(here.width, 96);
  EXPECT_EQ(here.summary, there.summary);
  EXPECT_EQ(here.fingerprint, there.fingerprint);

  const Plan open = engine.plan(request);
  expect_same_plan(open, plan_request(e2e::pico(), request));
  expect_same_plan(open, plan_request(e2e::pico(), request, {}, engine.profile()));
  // Floors once the rate is known.
  EXPECT_EQ(open.stages.front().floor_seconds, 0);
  EXPECT_NE(open.ceiling.find("not been measured"), std::string::npos) << open.ceiling;
  engine.measure_rate();
  const Plan floors = engine.plan(request);
  EXPECT_GT(floors.stages.front().floor_seconds, 0);
  EXPECT_EQ(floors.ceiling.find("not been measured"), std::string::npos) << floors.ceiling;

  // Sizes do for a plan, not for a run.
  expect_error(ErrorKind::invalid_argument, {"image", "1 frames of 300x200"},
               [&] { engine.generate(request); });
  request.height = 65;
  expect_error(ErrorKind::invalid_argument, {"65"}, [&] { engine.check(request); });
  expect_error(ErrorKind::invalid_argument, {"65"}, [&] { engine.plan(request); });
}

TEST(Facade, PlansBesideARunningRequest) {
  Engine engine = Engine::open(e2e::pico());
  const Request request = e2e::small_request(64, 64, 9);
  const Plan before = engine.plan(request);
  int planned = 0;
  Events events;
  // On the thread of the request as on any other.
  events.progress = [&](const Progress& p) {
    if (p.stage != "denoise") return;
    std::thread other([&] {
      engine.check(request);
      expect_same_plan(engine.plan(request), before);
    });
    other.join();
    ++planned;
  };
  engine.generate(request, events);
  EXPECT_GT(planned, 0);
}

// Neither knows of the other: the same bytes as alone.
TEST(Facade, SeveralEnginesRunSideBySide) {
  EngineOptions options;
  options.num_threads = 1;
  EngineOptions ranks = options;
  ranks.cfg_degree = 2;
  Engine one = Engine::open(e2e::pico(), options), two = Engine::open(e2e::pico(), ranks);
  Request first = e2e::small_request(64, 64, 9), second = e2e::small_request(64, 96, 5);
  second.seed = 5;
  const Result want_first = one.generate(first), want_second = two.generate(second);
  Result got_first, got_second;
  std::thread beside([&] { got_first = one.generate(first); });
  got_second = two.generate(second);
  beside.join();
  EXPECT_EQ(got_first.frames.rgb, want_first.frames.rgb);
  EXPECT_EQ(got_first.latents.values, want_first.latents.values);
  EXPECT_EQ(got_second.frames.rgb, want_second.frames.rgb);
  // One may end while the other stays.
  { const Engine gone = std::move(two); }
  EXPECT_EQ(one.generate(first).frames.rgb, want_first.frames.rgb);
}

TEST(Facade, ComparesOnAnOpenEngine) {
  Engine engine = Engine::open(e2e::pico());
  const std::string before = engine.attention();
  const std::string recipe = e2e::source_folder() + "/recipes/attention/pico-static-sparse.json";
  Request request = e2e::small_request(128, 128, 9);
  CompareOptions options;
  options.strategies = {{"dense", "dense"}, {"sparse", recipe}};
  std::vector<std::string> stages;
  const auto outcomes =
      compare(engine, request, options, [&](const Progress& p) { stages.push_back(p.stage); });
  ASSERT_EQ(outcomes.size(), 2u);
  EXPECT_TRUE(std::isinf(outcomes[0].psnr));
  EXPECT_LT(outcomes[1].kept_share, 1);
  EXPECT_GT(outcomes[0].denoise_seconds, 0);
  EXPECT_GT(outcomes[0].processor_seconds, 0);
  EXPECT_EQ(stages.front(), "dense: prompt");
  EXPECT_EQ(engine.attention(), before);
  options.strategies.pop_back();
  expect_error(ErrorKind::invalid_argument, {"give two or more"},
               [&] { compare(engine, request, options); });
}

}  // namespace
}  // namespace orrery
