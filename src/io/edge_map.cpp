#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "base/error.h"
#include "io/control_maps.h"

namespace orrery {
namespace {

constexpr int64_t kChannels = 3;

// Gradient of every pixel's strongest channel and its length |dx| + |dy|.
struct Gradients {
  int64_t height, width;
  std::vector<int> dx, dy, length;

  explicit Gradients(const Image& frame);
  // 0 outside the picture.
  int at(int64_t y, int64_t x) const {
    if (y < 0 || x < 0 || y >= height || x >= width) return 0;
    return length[static_cast<size_t>(y * width + x)];
  }
};

Gradients::Gradients(const Image& frame) : height(frame.height), width(frame.width) {
  const auto pixels = static_cast<size_t>(height * width);
  dx.resize(pixels);
  dy.resize(pixels);
  length.resize(pixels);
  size_t out = 0;
  for (int64_t y = 0; y < height; ++y) {
    const uint8_t* rows[3];
    for (int64_t k = 0; k < 3; ++k) {
      const int64_t source = std::clamp<int64_t>(y + k - 1, 0, height - 1);
      rows[k] = frame.rgb.data() + source * width * kChannels;
    }
    for (int64_t x = 0; x < width; ++x, ++out) {
      const int64_t left = std::max<int64_t>(x - 1, 0) * kChannels, here = x * kChannels;
      const int64_t right = std::min(x + 1, width - 1) * kChannels;
      for (int64_t c = 0; c < kChannels; ++c) {
        const auto column = [&](int64_t at) {
          return rows[0][at + c] + 2 * rows[1][at + c] + rows[2][at + c];
        };
        const auto row = [&](int64_t k) {
          return rows[k][left + c] + 2 * rows[k][here + c] + rows[k][right + c];
        };
        const int across = column(right) - column(left), down = row(2) - row(0);
        const int sum = std::abs(across) + std::abs(down);
        if (c > 0 && sum <= length[out]) continue;
        dx[out] = across;
        dy[out] = down;
        length[out] = sum;
      }
    }
  }
}

// Whether the gradient is longer there than at its two neighbours along it. The directions meet at
// tan 22.5 and tan 67.5 degrees; of equal neighbours in a row or column the first one is the ridge.
bool is_ridge(const Gradients& g, int64_t y, int64_t x) {
  constexpr int kShift = 15;
  constexpr int64_t kTan22 = 13573;  // tan 22.5 degrees in units of 2^-15
  const auto i = static_cast<size_t>(y * g.width + x);
  const int length = g.length[i];
  const int64_t across = std::abs(g.dx[i]), down = static_cast<int64_t>(std::abs(g.dy[i]))
                                                   << kShift;
  const int64_t flat = across * kTan22;                   // below: nearly horizontal
  const int64_t steep = flat + (across << (kShift + 1));  // tan 67.5 = tan 22.5 + 2
  if (down < flat) return length > g.at(y, x - 1) && length >= g.at(y, x + 1);
  if (down > steep) return length > g.at(y - 1, x) && length >= g.at(y + 1, x);
  const int64_t side = (g.dx[i] < 0) != (g.dy[i] < 0) ? -1 : 1;
  return length > g.at(y - 1, x - side) && length > g.at(y + 1, x + side);
}

}  // namespace

EdgeThresholds edge_preset(std::string_view name) {
  if (name == "none" || name == "very_low") return {20, 50};
  if (name == "low") return {50, 100};
  if (name == "medium") return {100, 200};
  if (name == "high") return {200, 300};
  if (name == "very_high") return {300, 400};
  fail(ErrorKind::invalid_argument, "preset_edge_threshold \"", name,
       "\" is not known; it is none, very_low, low, medium, high or very_high");
}

Image edge_map(const Image& frame, EdgeThresholds thresholds) {
  enum Mark : uint8_t { none, candidate, edge };
  const Gradients gradients(frame);
  const int64_t height = frame.height, width = frame.width;
  std::vector<Mark> marks(static_cast<size_t>(height * width), none);
  std::vector<int64_t> open;  // edges whose neighbours are still to be looked at
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x) {
      const auto i = static_cast<size_t>(y * width + x);
      if (gradients.length[i] <= thresholds.lower || !is_ridge(gradients, y, x)) continue;
      const bool is_strong = gradients.length[i] > thresholds.upper;
      marks[i] = is_strong ? edge : candidate;
      if (is_strong) open.push_back(y * width + x);
    }
  }
  while (!open.empty()) {
    const int64_t y = open.back() / width, x = open.back() % width;
    open.pop_back();
    for (int64_t ny = std::max<int64_t>(y - 1, 0); ny <= std::min(y + 1, height - 1); ++ny) {
      for (int64_t nx = std::max<int64_t>(x - 1, 0); nx <= std::min(x + 1, width - 1); ++nx) {
        Mark& mark = marks[static_cast<size_t>(ny * width + nx)];
        if (mark != candidate) continue;
        mark = edge;
        open.push_back(ny * width + nx);
      }
    }
  }
  Image out{height, width, {}};
  out.rgb.reserve(frame.rgb.size());
  for (const Mark mark : marks) out.rgb.insert(out.rgb.end(), kChannels, mark == edge ? 255 : 0);
  return out;
}

}  // namespace orrery
