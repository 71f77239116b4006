#include "model/positions.h"

#include <gtest/gtest.h>

namespace orrery {
namespace {

constexpr int64_t kText = 10, kTemporal = 4;

std::vector<double> times(const TransformerConfig& config, int64_t tokens, const ItemRate& rate) {
  Positions positions;
  append_item(positions, config, kText, {tokens, 1, 1}, rate);
  std::vector<double> out;
  for (const auto& position : positions) {
    out.push_back(double(position[0]) - double(kText + config.temporal_margin));
  }
  return out;
}

// B52: the config says whether the rate counts, and against which rate. Steps of fp32 are 2^-10
// here.
TEST(Positions, RatesCountAsTheConfigSays) {
  constexpr double kRounding = 0x1p-10;
  TransformerConfig config;
  ASSERT_EQ(config.base_fps, 24);
  for (const double fps : {10.0, 16.0, 23.976, 24.0, 30.0, 1000.0}) {
    config.enable_fps_modulation = true;
    const std::vector<double> on = times(config, 5, video_rate(fps, kTemporal));
    for (size_t k = 0; k < 5; ++k) EXPECT_NEAR(on[k], double(k) * 24 / fps, kRounding) << fps;
    // One frame has no rate.
    EXPECT_EQ(times(config, 1, video_rate(fps, kTemporal)), (std::vector<double>{0}));
    config.enable_fps_modulation = false;
    EXPECT_EQ(times(config, 5, video_rate(fps, kTemporal)), (std::vector<double>{0, 1, 2, 3, 4}));
  }
  config.enable_fps_modulation = true;
  config.base_fps = 16;  // distilled image to video
  for (size_t k = 0; k < 5; ++k) {
    EXPECT_NEAR(times(config, 5, video_rate(24, kTemporal))[k], double(k) * 16 / 24, kRounding);
  }
  config.base_fps = 24;
  // Sound goes by its own rate; an action stands at the frame it leads to.
  for (size_t k = 0; k < 5; ++k) {
    EXPECT_NEAR(times(config, 5, sound_rate(config))[k], double(k) * 24 / 25, kRounding);
    EXPECT_NEAR(times(config, 5, action_rate(10, kTemporal))[k], double(k + 1) * 6 / 10, kRounding);
  }
}

}  // namespace
}  // namespace orrery
