// Looks at what the shipped checkpoint makes: the shape has the colour and goes the way the caption
// says.
#include <gtest/gtest.h>

#include <cstdlib>

#include "moving_shape.h"
#include "orrery/engine.h"
#include "process.h"

namespace orrery {
namespace {

TEST(Clips, ShowTheColourAndMotionAskedFor) {
  EngineOptions options;
  if (const char* device = std::getenv("ORRERY_TEST_DEVICE")) options.device = device;
  Engine engine = Engine::open(e2e::pico(), options);
  for (const e2e::Caption& caption : e2e::kCaptions) {
    Request request;
    request.prompt = caption.text;
    request.height = 256;
    request.width = 256;
    request.num_frames = 17;
    request.num_inference_steps = 12;
    request.guidance_scale = 4;
    request.seed = 3;
    const Result result = engine.generate(request);
    ASSERT_EQ(result.frames.count, 17);
    EXPECT_EQ(e2e::fault_of(result.frames, caption), "") << caption.text;
  }
}

}  // namespace
}  // namespace orrery
