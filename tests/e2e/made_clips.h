// Clips made by the tests, of the kind the shipped checkpoint knows, and numbers that compare
// clips.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "moving_shape.h"
#include "orrery/request.h"

namespace orrery::e2e {

// What a made clip shows: a shape of a colour, its centre per frame in half-heights from the
// frame's centre.
struct Scene {
  enum class Shape { circle, square, triangle } shape = Shape::circle;
  Rgb colour{240, 240, 240};
  double radius = 0.2;  // half-heights
  std::vector<std::array<double, 2>> path;
};

// On the checkpoint's "black": a dark grey that brightens a little downwards, as its shapes darken.
// Edges are softened by 4 x 4 samples a pixel.
inline Frames draw(const Scene& scene, int64_t size = 256) {
  Frames frames{static_cast<int64_t>(scene.path.size()), size, size, {}};
  frames.rgb.resize(static_cast<size_t>(frames.count * size * size * 3));
  const auto inside = [&](double dx, double dy) {
    const double r = scene.radius;
    if (scene.shape == Scene::Shape::square) return std::max(std::abs(dx), std::abs(dy)) <= r;
    if (scene.shape == Scene::Shape::circle) return dx * dx + dy * dy <= r * r;
    return dy >= -r && dy <= r && std::abs(dx) <= (dy + r) * 0.58;  // apex up
  };
  constexpr int kSamples = 4;
  constexpr double kBlack = 18;
  for (int64_t t = 0; t < frames.count; ++t) {
    const auto [cx, cy] = scene.path[static_cast<size_t>(t)];
    for (int64_t y = 0; y < size; ++y) {
      for (int64_t x = 0; x < size; ++x) {
        int hits = 0;
        for (int s = 0; s < kSamples * kSamples; ++s) {
          const double px = (double(x) + (s % kSamples + 0.5) / kSamples) / (double(size) / 2) - 1;
          const double py = (double(y) + (s / kSamples + 0.5) / kSamples) / (double(size) / 2) - 1;
          hits += inside(px - cx, py - cy);
        }
        const double share = double(hits) / (kSamples * kSamples);
        const double below =
            (double(y) / (double(size) / 2) - 1 - cy) / scene.radius;  // -1 to 1 in the shape
        for (size_t c = 0; c < 3; ++c) {
          const double background = kBlack * (0.92 + 0.16 * double(y) / double(size));
          const double value =
              (1 - share) * background + share * scene.colour[c] * (1 - 0.02 * below);
          frames.rgb[static_cast<size_t>(((t * size + y) * size + x) * 3) + c] =
              static_cast<uint8_t>(std::lround(std::clamp(value, 0.0, 255.0)));
        }
      }
    }
  }
  return frames;
}

inline double psnr(const uint8_t* a, const uint8_t* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i)
    sum += (double(a[i]) - double(b[i])) * (double(a[i]) - double(b[i]));
  return 10 * std::log10(255.0 * 255.0 * double(count) / std::max(sum, 1e-9));
}

// Pearson's coefficient.
inline double correlation(const std::vector<double>& a, const std::vector<double>& b) {
  const auto n = double(a.size());
  double ma = 0, mb = 0;
  for (size_t i = 0; i < a.size(); ++i) ma += a[i] / n, mb += b[i] / n;
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += (a[i] - ma) * (b[i] - mb);
    aa += (a[i] - ma) * (a[i] - ma);
    bb += (b[i] - mb) * (b[i] - mb);
  }
  return aa * bb > 0 ? ab / std::sqrt(aa * bb) : 0;
}

}  // namespace orrery::e2e
