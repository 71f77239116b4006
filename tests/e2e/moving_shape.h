// What a clip of the shipped checkpoint shows: the colour of its one shape and the way it goes.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "orrery/request.h"

namespace orrery::e2e {

using Rgb = std::array<double, 3>;

struct Named {
  const char* name;
  Rgb rgb;
};
inline const std::vector<Named> kColours{{"red", {220, 40, 40}},     {"green", {40, 180, 60}},
                                         {"blue", {50, 80, 220}},    {"yellow", {230, 210, 40}},
                                         {"purple", {150, 60, 190}}, {"orange", {240, 140, 30}},
                                         {"white", {240, 240, 240}}};

inline double distance(const Rgb& a, const Rgb& b) {
  return std::hypot(a[0] - b[0], a[1] - b[1], a[2] - b[2]);
}

struct Blob {
  double x = 0, y = 0,
         area = 0;  // centroid in half-heights from the centre, y down; share of the frame
  Rgb colour{};
};

inline Rgb pixel(const Frames& frames, int64_t f, int64_t y, int64_t x) {
  const uint8_t* p = frames.frame(f) + (y * frames.width + x) * 3;
  return {double(p[0]), double(p[1]), double(p[2])};
}

// The background is what the corners show; the shape is what differs from it.
inline Blob find_shape(const Frames& frames, int64_t f) {
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

inline std::string nearest_colour(const Rgb& colour) {
  return std::min_element(kColours.begin(), kColours.end(),
                          [&](const Named& a, const Named& b) {
                            return distance(a.rgb, colour) < distance(b.rgb, colour);
                          })
      ->name;
}

struct Caption {
  const char* text;
  const char* colour;
  int dx, dy;  // direction of the centroid's path; 0: stays
};

// Half-heights per clip below which a coordinate counts as still. A moving shape travels 0.75 a
// second: 0.5 in 17 frames at 24 fps.
inline constexpr double kStill = 0.15, kMoves = 0.25;

inline const std::vector<Caption> kCaptions{
    {"A small red circle moves left on a black background.", "red", -1, 0},
    {"A small white square moves right on a teal background.", "white", 1, 0},
    {"A large yellow circle moves up on a navy background.", "yellow", 0, -1},
    {"On a black background, a small green square moves down.", "green", 0, 1},
    {"A large blue square stays still on a black background.", "blue", 0, 0},
};

// What is wrong with the clip; empty when it shows what the caption says.
inline std::string fault_of(const Frames& frames, const Caption& caption) {
  const Blob first = find_shape(frames, 0), last = find_shape(frames, frames.count - 1);
  if (first.area < 0.005) return "the first frame shows no shape";
  for (const Blob* blob : {&first, &last}) {
    const std::string colour = nearest_colour(blob->colour);
    if (colour != caption.colour) return "the shape is " + colour;
  }
  const double moved[] = {last.x - first.x, last.y - first.y};
  const int asked[] = {caption.dx, caption.dy};
  for (int axis = 0; axis < 2; ++axis) {
    const bool right =
        asked[axis] == 0 ? std::abs(moved[axis]) < kStill : moved[axis] * asked[axis] > kMoves;
    if (!right)
      return "the shape moves by " + std::to_string(moved[axis]) +
             (axis == 0 ? " across" : " down");
  }
  return {};
}

}  // namespace orrery::e2e
