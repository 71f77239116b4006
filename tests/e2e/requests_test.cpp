// One engine, one request after another: what each asks for is what it gets, whatever came before.
#include <gtest/gtest.h>

#include "base/json.h"
#include "orrery/engine.h"
#include "process.h"
#include "small_request.h"

namespace orrery {
namespace {

Request small_request() {
  Request request = e2e::small_request(32, 48, 5);
  request.seed = 4;
  return request;
}

std::vector<float> latents(Engine& engine, const Request& request) {
  return engine.generate(request).latents.values;
}

// B54: nothing of a request, positions and tables least of all, is there for the next one.
TEST(Requests, DoNotReachTheNext) {
  std::vector<Request> requests(5, small_request());
  requests[1].fps = 10;
  requests[2].height = 48;
  requests[2].width = 32;
  requests[3].num_frames = 1;
  requests[4].flow_shift = 3;
  requests[4].prompt = "A large blue square stays still on a black background.";
  Engine shared = Engine::open(e2e::pico());
  std::vector<std::vector<float>> alone;
  for (const Request& request : requests) {
    Engine fresh = Engine::open(e2e::pico());
    alone.push_back(latents(fresh, request));
  }
  for (const size_t i : {0, 1, 0, 2, 4, 3, 1, 0}) {
    EXPECT_EQ(latents(shared, requests[i]), alone[i]) << i;
  }
  EXPECT_NE(alone[0], alone[1]);  // the rate counts
}

// B23: at 1 the second branch is neither needed nor run; anything else means what it says.
TEST(Guidance, OneMeansOneBranch) {
  Engine engine = Engine::open(e2e::pico());
  Request request = small_request();
  request.num_inference_steps = 1;
  const auto passes = [&](double scale) {
    request.guidance_scale = scale;
    const Json report = Json::parse(engine.generate(request).report, "report");
    int64_t calls = 0;
    for (const Json& call : report.at("attention").at("dispatch").items()) {
      calls += call.at("role").as_string() == "cosmos3.gen";
    }
    return calls / 8;  // layers
  };
  EXPECT_EQ(passes(1), 1);
  for (const double scale : {0.999, 1.000001, 0.0, -1.0}) EXPECT_EQ(passes(scale), 2) << scale;

  request.guidance_scale = 1;
  const std::vector<float> plain = latents(engine, request);
  request.negative_prompt = "A large blue square.";
  EXPECT_EQ(latents(engine, request), plain);
  request.guidance_scale = 3;
  EXPECT_NE(latents(engine, request), plain);
}

// B26: nothing approximate runs unless it is asked for.
TEST(Defaults, AreExact) {
  Engine engine = Engine::open(e2e::pico());
  const std::vector<float> by_default = latents(engine, small_request());
  engine.use_attention("dense");
  EXPECT_EQ(latents(engine, small_request()), by_default);
}

}  // namespace
}  // namespace orrery
