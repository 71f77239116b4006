#include "io/resize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "expect_error.h"

namespace orrery {
namespace {

Image gradient(int64_t height, int64_t width) {
  Image image{height, width, {}};
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x) {
      for (int64_t c = 0; c < 3; ++c) {
        image.rgb.push_back(uint8_t((x * 7 + y * 13 + c * 50) % 256));
      }
    }
  }
  return image;
}

TEST(Resize, CoverCropKeepsTheMiddle) {  // B41
  // Columns red, green, blue, white; 2 x 4 to 2 x 2 keeps green and blue.
  const Image image{2, 4, {255, 0, 0, 0, 255, 0, 0, 0, 255, 255, 255, 255,  //
                           255, 0, 0, 0, 255, 0, 0, 0, 255, 255, 255, 255}};
  EXPECT_EQ(condition_image(image, 2, 2), (std::vector<float>{-1, -1, -1, -1,   // red
                                                              1, -1, 1, -1,     // green
                                                              -1, 1, -1, 1}));  // blue
}

TEST(Resize, ConditionImageFillsEveryShape) {  // B41: portrait, one pixel, panorama
  for (const auto& [h, w] : {std::pair<int64_t, int64_t>{30, 10}, {1, 1}, {3, 1200}, {17, 31}}) {
    const Image image{h, w, std::vector<uint8_t>(size_t(h * w * 3), 200)};
    const std::vector<float> pixels = condition_image(image, 48, 80);
    ASSERT_EQ(pixels.size(), size_t(3 * 48 * 80));
    for (const float value : pixels) ASSERT_EQ(value, 200 / 127.5f - 1);
  }
}

TEST(Resize, EqualSizesChangeNothing) {
  const Image image = gradient(5, 9);
  EXPECT_EQ(resize_8bit(image, 5, 9).rgb, image.rgb);
  const std::vector<float> planes = {1, 2, 3, 4, 5, 6};
  EXPECT_EQ(resize_float(planes, 1, 2, 3, 2, 3, Filter::cubic), planes);
}

TEST(Resize, AxesAreIndependent) {
  const Image image = gradient(40, 30);
  EXPECT_EQ(resize_8bit(resize_8bit(image, 40, 17), 23, 17).rgb, resize_8bit(image, 23, 17).rgb);
}

TEST(Resize, HalvingAveragesWithTheTriangle) {
  // Weights 1/8, 3/8, 3/8, 1/8 of four inputs; at the edge 3/7, 3/7, 1/7 of three.
  const std::vector<float> line = {0, 0, 7, 0, 0, 0, 0, 0};
  const auto out = resize_float(line, 1, 1, 8, 1, 4, Filter::triangle);
  EXPECT_FLOAT_EQ(out[0], 1);
  EXPECT_FLOAT_EQ(out[1], 2.625f);
  EXPECT_EQ(out[2], 0);
  EXPECT_EQ(out[3], 0);
  // The 8-bit one has the same weights, rounded.
  Image image{1, 8, {}};
  for (const float value : line) image.rgb.insert(image.rgb.end(), 3, uint8_t(value));
  EXPECT_EQ(resize_8bit(image, 1, 4).rgb,
            (std::vector<uint8_t>{1, 1, 1, 3, 3, 3, 0, 0, 0, 0, 0, 0}));
}

TEST(Resize, CubicOvershoots) {
  const std::vector<float> step = {-1, -1, -1, -1, 1, 1, 1, 1};
  const auto out = resize_float(step, 1, 1, 8, 1, 5, Filter::cubic);
  EXPECT_GT(*std::max_element(out.begin(), out.end()), 1.0f);
  EXPECT_LT(*std::min_element(out.begin(), out.end()), -1.0f);
}

TEST(ActionGeometry, TiersAndTies) {
  const auto canvas = [](int64_t tier, int64_t h, int64_t w) {
    const ActionGeometry geometry = action_geometry(tier, h, w);
    return std::array<int64_t, 2>{geometry.height, geometry.width};
  };
  using Size = std::array<int64_t, 2>;
  EXPECT_EQ(canvas(256, 480, 640), (Size{256, 320}));
  EXPECT_EQ(canvas(480, 480, 640), (Size{544, 736}));
  EXPECT_EQ(canvas(704, 720, 1280), (Size{704, 1280}));
  EXPECT_EQ(canvas(720, 1280, 720), (Size{1280, 720}));
  // 0.9 lies between 1.0 and 0.8 of tier 256: the first listed wins.
  EXPECT_EQ(canvas(256, 144, 160), (Size{256, 256}));
  // The shape is that of the frames snapped to 16: 96 x 80 is 1.2, not 1.11.
  EXPECT_EQ(canvas(480, 100, 90), (Size{736, 544}));
  expect_error(ErrorKind::invalid_argument, {"tier 1080", "256, 480, 704 and 720"},
               [&] { canvas(1080, 480, 640); });
  expect_error(ErrorKind::invalid_argument, {"10x20", "16x16"}, [&] { canvas(256, 20, 10); });
}

TEST(ActionGeometry, NeverEnlarges) {
  const ActionGeometry small = action_geometry(480, 64, 96);
  EXPECT_EQ(small.content_height, 64);
  EXPECT_EQ(small.content_width, 96);
  const ActionGeometry large = action_geometry(256, 300, 500);
  EXPECT_EQ(large.content_height, 186);
  EXPECT_EQ(large.content_width, 320);
}

TEST(ActionCanvas, ReflectsWithoutTheEdgePixel) {
  // 240 x 256 on a 256 x 256 canvas: 16 rows below mirror rows 238 to 223.
  const Image frame = gradient(240, 256);
  const ActionCanvas canvas = action_canvas({frame}, 1, 256);
  ASSERT_EQ(canvas.geometry.height, 256);
  ASSERT_EQ(canvas.geometry.content_height, 240);
  for (int64_t x = 0; x < 256; ++x) {
    EXPECT_EQ(canvas.pixels[size_t(240 * 256 + x)], canvas.pixels[size_t(238 * 256 + x)]);
    EXPECT_EQ(canvas.pixels[size_t(255 * 256 + x)], canvas.pixels[size_t(223 * 256 + x)]);
  }
}

TEST(ActionCanvas, RepeatsTheEdgeWhenThePadIsTooWide) {
  const ActionCanvas canvas = action_canvas({gradient(48, 64)}, 1, 256);
  const int64_t w = canvas.geometry.width;
  ASSERT_EQ(w, 320);
  EXPECT_EQ(canvas.pixels[size_t(w - 1)], canvas.pixels[63]);
  EXPECT_EQ(canvas.pixels[size_t(255 * w)], canvas.pixels[size_t(47 * w)]);
}

TEST(ActionCanvas, HoldsTheLastFrameOrCuts) {
  const std::vector<Image> frames = {gradient(32, 32),
                                     Image{32, 32, std::vector<uint8_t>(3072, 9)}};
  const ActionCanvas held = action_canvas(frames, 4, 256);
  const int64_t plane = held.geometry.height * held.geometry.width;
  const auto frame = [&](const ActionCanvas& canvas, int64_t t) {
    const auto begin = canvas.pixels.begin() + t * plane;
    return std::vector<float>(begin, begin + plane);
  };
  EXPECT_EQ(frame(held, 3), frame(held, 1));
  EXPECT_NE(frame(held, 1), frame(held, 0));
  const ActionCanvas cut = action_canvas(frames, 1, 256);
  EXPECT_EQ(cut.pixels.size(), size_t(3 * plane));
  EXPECT_EQ(frame(cut, 0), frame(held, 0));
}

TEST(ActionCanvas, RefusesByName) {
  expect_error(ErrorKind::invalid_argument, {"no frames"}, [] { action_canvas({}, 1, 256); });
  expect_error(ErrorKind::invalid_argument, {"frame 1 is 48x32", "32x32"}, [] {
    action_canvas({gradient(32, 32), gradient(32, 48)}, 2, 256);
  });
  expect_error(ErrorKind::invalid_argument, {"0"},
               [] { action_canvas({gradient(32, 32)}, 0, 256); });
  expect_error(ErrorKind::invalid_argument, {"0x5"}, [] { resize_8bit(gradient(4, 4), 5, 0); });
}

}  // namespace
}  // namespace orrery
