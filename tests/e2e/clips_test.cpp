// Looks at what the shipped checkpoint makes: the shape has the colour and goes the way the caption says.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "orrery/engine.h"
#include "process.h"

namespace orrery {
namespace {

using Rgb = std::array<double, 3>;

struct Named {
  const char* name;
  Rgb rgb;
};
const std::vector<Named> kColours{{"red", {220, 40, 40}},    {"green", {40, 180, 60}},  {"blue", {50, 80, 220}},
                                  {"yellow", {230, 210, 40}}, {"purple", {150, 60, 190}}, {"orange", {240, 140, 30}},
                                  {"white", {240, 240, 240}}};

double distance(const Rgb& a, const Rgb& b) {
  return std::hypot(a[0] - b[0], a[1] - b[1], a[2] - b[2]);
}

struct Blob {
  double x = 0, y = 0, area = 0;  // centroid in half-heights from the centre, y down; share of the frame
  Rgb colour{};
};

Rgb pixel(const Frames& frames, int64_t f, int64_t y, int64_t x) {
  const uint8_t* p = frames.frame(f) + (y * frames.width + x) * 3;
  return {double(p[0]), double(p[1]), double(p[2])};
}

// The background is what the corners show; the shape is what differs from it.
Blob find_shape(const Frames& frames, int64_t f) {
  const Rgb background = pixel(frames, f, 2, 2);
  Blob blob;
  double count = 0;
  for (int64_t y = 0; y < frames.height; ++y) {
    for (int64_t x = 0; x < frames.width; ++x) {
      const Rgb p = pixel(frames, f, y, x);
      if (distance(p, background) < 60) continue;
      count += 1;
      blob.x += double(x);
      blob.y += double(y);
      for (size_t c = 0; c < 3; ++c) blob.colour[c] += p[c];
    }
  }
  if (count == 0) return blob;
  const double half = double(frames.height) / 2;
  blob.x = (blob.x / count - double(frames.width) / 2) / half;
  blob.y = (blob.y / count - half) / half;
  for (double& c : blob.colour) c /= count;
  blob.area = count / double(frames.height * frames.width);
  return blob;
}

std::string nearest_colour(const Rgb& colour) {
  return std::min_element(kColours.begin(), kColours.end(), [&](const Named& a, const Named& b) {
           return distance(a.rgb, colour) < distance(b.rgb, colour);
         })->name;
}

struct Caption {
  const char* text;
  const char* colour;
  int dx, dy;  // direction of the centroid's path; 0: stays
};

// Half-heights per clip below which a coordinate counts as still. A moving shape travels 0.75 a second:
// 0.5 in 17 frames at 24 fps.
constexpr double kStill = 0.15, kMoves = 0.25;

TEST(Clips, ShowTheColourAndMotionAskedFor) {
  Engine engine = Engine::open(e2e::pico());
  const std::vector<Caption> captions{
      {"A small red circle moves left on a black background.", "red", -1, 0},
      {"A small white square moves right on a teal background.", "white", 1, 0},
      {"A large yellow circle moves up on a navy background.", "yellow", 0, -1},
      {"On a black background, a small green square moves down.", "green", 0, 1},
      {"Large purple triangle, gray background, it stays still.", "purple", 0, 0},
  };
  for (const Caption& caption : captions) {
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
    const Blob first = find_shape(result.frames, 0), last = find_shape(result.frames, 16);
    ASSERT_GT(first.area, 0.005) << caption.text;
    EXPECT_EQ(nearest_colour(first.colour), caption.colour) << caption.text;
    EXPECT_EQ(nearest_colour(last.colour), caption.colour) << caption.text;
    const double dx = last.x - first.x, dy = last.y - first.y;
    for (const auto& [moved, asked] : {std::pair{dx, caption.dx}, {dy, caption.dy}}) {
      if (asked == 0) EXPECT_LT(std::abs(moved), kStill) << caption.text;
      else EXPECT_GT(moved * asked, kMoves) << caption.text;
    }
  }
}

}  // namespace
}  // namespace orrery
