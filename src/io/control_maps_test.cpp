#include "io/control_maps.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "expect_error.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

const std::filesystem::path kControls = source_dir() / "tests/data/controls";
const std::initializer_list<const char*> kPresets{"very_low", "low", "medium", "high", "very_high"};

// A grey picture of these rows.
Image grey(const std::vector<std::vector<int>>& rows) {
  Image image{std::ssize(rows), std::ssize(rows.front()), {}};
  for (const auto& row : rows) {
    for (const int level : row) image.rgb.insert(image.rgb.end(), 3, static_cast<uint8_t>(level));
  }
  return image;
}

// Levels of the first channel; the other two must be the same.
std::vector<std::vector<int>> levels(const Image& image) {
  std::vector<std::vector<int>> rows(static_cast<size_t>(image.height));
  for (int64_t i = 0; i < image.height * image.width; ++i) {
    const uint8_t* pixel = image.rgb.data() + i * 3;
    EXPECT_TRUE(pixel[0] == pixel[1] && pixel[0] == pixel[2]) << i;
    rows[static_cast<size_t>(i / image.width)].push_back(pixel[0]);
  }
  return rows;
}

TEST(EdgeMap, IsCannysOfOpenCv) {
  const Image frame = read_image(kControls / "frame.png");
  std::vector<uint8_t> before;
  for (const std::string preset : kPresets) {
    const Image edges = edge_map(frame, edge_preset(preset));
    EXPECT_EQ(edges.rgb, read_image(kControls / ("edge_" + preset + ".png")).rgb) << preset;
    EXPECT_NE(edges.rgb, before) << preset;
    before = edges.rgb;
  }
}

// A step of 60 has the gradient 4 * 60 = 240 on both of its sides; the left one is the ridge.
TEST(EdgeMap, OneLineForAStep) {
  const Image step = grey(std::vector<std::vector<int>>(4, {10, 10, 10, 70, 70, 70}));
  EXPECT_EQ(levels(edge_map(step, {100, 200})),
            (std::vector<std::vector<int>>(4, {0, 0, 255, 0, 0, 0})));
  // Above the lower threshold alone, with nothing to join.
  EXPECT_EQ(levels(edge_map(step, {200, 240})),
            (std::vector<std::vector<int>>(4, {0, 0, 0, 0, 0, 0})));
  const Image down = grey({{10, 10, 10}, {10, 10, 10}, {70, 70, 70}, {70, 70, 70}});
  EXPECT_EQ(levels(edge_map(down, {100, 200})),
            (std::vector<std::vector<int>>{{0, 0, 0}, {255, 255, 255}, {0, 0, 0}, {0, 0, 0}}));
}

// A step that fades from 60 to 32: its weak end, 4 * 36 at most, hangs on its strong one.
TEST(EdgeMap, WeakEdgesFollowStrongOnes) {
  std::vector<std::vector<int>> fading, weak;
  for (int level = 60; level >= 32; level -= 4) {
    fading.push_back({0, 0, level, level});
    if (level <= 40) weak.push_back(fading.back());
  }
  for (const auto& row : levels(edge_map(grey(fading), {100, 200}))) {
    EXPECT_EQ(std::count(row.begin(), row.end(), 255), 1);
  }
  for (const auto& row : levels(edge_map(grey(weak), {100, 200}))) {
    EXPECT_EQ(std::count(row.begin(), row.end(), 255), 0);
  }
}

// The channel with the strongest gradient decides.
TEST(EdgeMap, SeesColours) {
  Image blue{3, 4, {}};
  for (int64_t i = 0; i < 12; ++i) {
    const uint8_t level = i % 4 < 2 ? 20 : 80;
    blue.rgb.insert(blue.rgb.end(), {90, 90, level});
  }
  EXPECT_EQ(levels(edge_map(blue, {100, 200})), (std::vector<std::vector<int>>(3, {0, 255, 0, 0})));
}

TEST(BlurMap, IsThatOfOpenCv) {
  const Image frame = read_image(kControls / "frame.png");
  for (const std::string preset : kPresets) {
    EXPECT_EQ(blur_map(frame, blur_preset(preset)).rgb,
              read_image(kControls / ("blur_" + preset + ".png")).rgb)
        << preset;
  }
  // Where the mean lies halfway between two levels, the last bit of the sum decides, which there is
  // fused with its product.
  const Image smooth = smooth_bilateral(frame, 9, 60, 5);
  const Image theirs = read_image(kControls / "bilateral.png");
  int64_t off = 0;
  for (size_t i = 0; i < theirs.rgb.size(); ++i) {
    EXPECT_NEAR(smooth.rgb[i], theirs.rgb[i], 1) << i;
    off += smooth.rgb[i] != theirs.rgb[i];
  }
  EXPECT_LT(off, std::ssize(theirs.rgb) / 1000);
  EXPECT_EQ(blur_map(frame, blur_preset("none")).rgb, frame.rgb);
}

TEST(BlurMap, BilateralByHand) {
  // The four neighbours weigh exp(-1/2) for their distance of 1 sigma and as much again for their
  // colour, 3 * 50 levels off: (100 + 4 * 50 / e) / (1 + 4 / e) = 70.2.
  const Image dot = grey({{50, 50, 50}, {50, 100, 50}, {50, 50, 50}});
  EXPECT_EQ(levels(smooth_bilateral(dot, 3, 150, 1))[1][1], 70);
  // A corner sees the pixel right of it and the one below twice: mirrored. All are 50.
  EXPECT_EQ(levels(smooth_bilateral(dot, 3, 150, 1))[0][0], 50);
  // (50 + (3 * 50 + 100 / sqrt(e)) / sqrt(e)) / (1 + (3 + 1 / sqrt(e)) / sqrt(e)) above the dot,
  // which it sees twice: (50 + (2 * 50 + 2 * 100 / sqrt(e)) / sqrt(e)) / (1 + 2 (1 + 1 / sqrt(e)) /
  // sqrt(e)) = 62.5.
  EXPECT_EQ(levels(smooth_bilateral(dot, 3, 150, 1))[0][1], 62);
}

TEST(BlurMap, ResizingByHand) {
  EXPECT_EQ(levels(shrink_by_area(grey({{1, 2, 0, 0}, {3, 4, 0, 1}}), 2)),
            (std::vector<std::vector<int>>{{3, 0}}));  // 2.5 goes up
  // Positions -0.25, 0.25, 0.75, 1.25 between the two pixels.
  EXPECT_EQ(levels(interpolate(grey({{0, 100}}), 1, 4, Interpolation::linear)),
            (std::vector<std::vector<int>>{{0, 25, 75, 100}}));
  // Halfway the weights are -3/32, 19/32, 19/32, -3/32; no pixel beyond those four counts.
  EXPECT_EQ(levels(interpolate(grey({{0, 64, 128, 192}}), 1, 2, Interpolation::cubic)),
            (std::vector<std::vector<int>>{{26, 166}}));
  // A quarter of the way they are -27/256, 225/256, 67/256, -9/256: 255 * 58 / 256 = 57.8. What
  // overshoots is clamped.
  EXPECT_EQ(levels(interpolate(grey({{0, 0, 255, 255}}), 1, 8, Interpolation::cubic)),
            (std::vector<std::vector<int>>{{0, 0, 0, 58, 197, 255, 255, 255}}));
}

// Exact sums that lie within a rounding of a half go where OpenCV's fp32 sums go: 186.500009 is
// 186.5 there and becomes the even level, 153.499995 is 153.5.
TEST(BlurMap, CubicTiesAsInOpenCv) {
  const Image up =
      grey({{29, 52, 238, 115}, {195, 131, 67, 108}, {241, 175, 216, 110}, {88, 12, 216, 173}});
  EXPECT_EQ(levels(interpolate(up, 6, 6, Interpolation::cubic))[5][3], 186);
  const Image down =
      grey({{199, 213, 29, 164}, {131, 149, 58, 153}, {18, 162, 53, 114}, {69, 74, 89, 135}});
  EXPECT_EQ(levels(interpolate(down, 6, 6, Interpolation::cubic))[2][5], 154);
}

TEST(ControlPresets, AreThePublicOnes) {
  EXPECT_EQ(edge_preset("none").lower, 20);
  EXPECT_EQ(edge_preset("medium").upper, 200);
  EXPECT_EQ(blur_preset("low").shrink, 4);
  EXPECT_EQ(blur_preset("high").coarse, 16);
  expect_error(ErrorKind::invalid_argument, {"preset_edge_threshold \"strong\"", "very_low"},
               [] { edge_preset("strong"); });
  expect_error(ErrorKind::invalid_argument, {"preset_blur_strength \"\"", "medium"},
               [] { blur_preset(""); });
  expect_error(ErrorKind::invalid_argument, {"6x4", "blocks of 4x4"}, [] {
    shrink_by_area({4, 6, std::vector<uint8_t>(72)}, 4);
  });
}

}  // namespace
}  // namespace orrery
