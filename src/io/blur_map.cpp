#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "base/error.h"
#include "io/control_maps.h"

namespace orrery {
namespace {

constexpr int64_t kChannels = 3;

// Weights are whole numbers of 2^-11, two passes of 2^-22.
constexpr int kWeightBits = 11;

// The inputs of one output position, and their weights.
struct Taps {
  std::array<int64_t, 4> at{};
  std::array<int, 4> weight{};
};

std::array<float, 4> weights_of(Interpolation how, float x) {
  if (how == Interpolation::linear) return {1 - x, x, 0, 0};
  constexpr float a = -0.75f;
  const auto near = [](float d) { return ((a + 2) * d - (a + 3)) * d * d + 1; };
  std::array<float, 4> w{((a * (x + 1) - 5 * a) * (x + 1) + 8 * a) * (x + 1) - 4 * a, near(x),
                         near(1 - x), 0};
  w[3] = 1 - w[0] - w[1] - w[2];
  return w;
}

std::vector<Taps> make_taps(int64_t in, int64_t out, Interpolation how) {
  const double scale = 1 / (double(out) / double(in));
  const int64_t before = how == Interpolation::cubic ? 1 : 0;  // taps in front of the position
  std::vector<Taps> all(static_cast<size_t>(out));
  for (int64_t i = 0; i < out; ++i) {
    const auto position = static_cast<float>((double(i) + 0.5) * scale - 0.5);
    const auto first = static_cast<int64_t>(std::floor(position));
    const std::array<float, 4> weights = weights_of(how, position - static_cast<float>(first));
    Taps& taps = all[static_cast<size_t>(i)];
    for (size_t k = 0; k < 4; ++k) {
      taps.at[k] = std::clamp<int64_t>(first - before + int64_t(k), 0, in - 1);
      taps.weight[k] = static_cast<int>(std::nearbyint(weights[k] * (1 << kWeightBits)));
    }
  }
  return all;
}

// The second pass over sums of the first: to the nearest level, half to even. OpenCV adds fp32
// products from the last row to the first, and its order decides ties. A product of two floats is
// exact in double; rounding it by hand keeps a compiler from fusing it with the sum.
uint8_t level_cubic(const std::array<int64_t, 4>& sums, const std::array<int, 4>& weight) {
  constexpr float kUnit = 1.0f / (1 << 2 * kWeightBits);
  float sum = 0;
  for (size_t k = 4; k-- > 0;) {
    sum += static_cast<float>(double(sums[k]) * double(float(weight[k]) * kUnit));
  }
  return static_cast<uint8_t>(std::clamp(std::nearbyint(sum), 0.0f, 255.0f));
}

// Each of the two products is cut to two bits below the level before they are added.
uint8_t level_linear(const std::array<int64_t, 4>& sums, const std::array<int, 4>& weight) {
  const auto quarters = [&](size_t k) { return ((sums[k] >> 4) * weight[k]) >> 16; };
  return static_cast<uint8_t>((quarters(0) + quarters(1) + 2) >> 2);
}

// Position p of a row of n pixels that goes on as its mirror image, the end pixels shown once.
int64_t mirrored(int64_t p, int64_t n) {
  if (n == 1) return 0;
  const int64_t period = 2 * (n - 1);
  p = ((p % period) + period) % period;
  return std::min(p, period - p);
}

}  // namespace

BlurStrength blur_preset(std::string_view name) {
  if (name == "none") return {0, 0};
  if (name == "very_low") return {1, 4};
  if (name == "low") return {4, 4};
  if (name == "medium") return {2, 10};
  if (name == "high") return {1, 16};
  if (name == "very_high") return {4, 16};
  fail(ErrorKind::invalid_argument, "preset_blur_strength \"", name,
       "\" is not known; it is none, very_low, low, medium, high or very_high");
}

Image shrink_by_area(const Image& image, int64_t factor) {
  require(factor >= 1 && image.height % factor == 0 && image.width % factor == 0, "a picture of ",
          image.width, "x", image.height, " does not fall into blocks of ", factor, "x", factor);
  if (factor == 1) return image;
  Image out{image.height / factor, image.width / factor, {}};
  out.rgb.reserve(static_cast<size_t>(out.height * out.width * kChannels));
  const auto area = static_cast<int>(factor * factor);
  for (int64_t y = 0; y < out.height; ++y) {
    for (int64_t x = 0; x < out.width; ++x) {
      for (int64_t c = 0; c < kChannels; ++c) {
        int sum = 0;
        for (int64_t j = 0; j < factor; ++j) {
          for (int64_t i = 0; i < factor; ++i) {
            const int64_t pixel = (y * factor + j) * image.width + x * factor + i;
            sum += image.rgb[static_cast<size_t>(pixel * kChannels + c)];
          }
        }
        // Halves go up for blocks of 2 x 2 and to the even number for larger ones.
        const int mean = factor == 2 ? (sum + 2) / 4
                                     : static_cast<int>(std::nearbyint(double(sum) / double(area)));
        out.rgb.push_back(static_cast<uint8_t>(mean));
      }
    }
  }
  return out;
}

Image interpolate(const Image& image, int64_t height, int64_t width, Interpolation how) {
  require(height > 0 && width > 0, "interpolate: the target size ", width, "x", height,
          " must be positive");
  // Rows first, unrounded.
  const std::vector<Taps> across = make_taps(image.width, width, how);
  std::vector<int64_t> rows;
  rows.reserve(static_cast<size_t>(image.height * width * kChannels));
  for (int64_t y = 0; y < image.height; ++y) {
    const uint8_t* row = image.rgb.data() + y * image.width * kChannels;
    for (const Taps& taps : across) {
      for (int64_t c = 0; c < kChannels; ++c) {
        int64_t sum = 0;
        for (size_t k = 0; k < 4; ++k) sum += row[taps.at[k] * kChannels + c] * taps.weight[k];
        rows.push_back(sum);
      }
    }
  }
  Image out{height, width, {}};
  out.rgb.reserve(static_cast<size_t>(height * width * kChannels));
  for (const Taps& taps : make_taps(image.height, height, how)) {
    std::array<const int64_t*, 4> at{};
    for (size_t k = 0; k < 4; ++k) at[k] = rows.data() + taps.at[k] * width * kChannels;
    for (int64_t i = 0; i < width * kChannels; ++i) {
      const std::array<int64_t, 4> sums{at[0][i], at[1][i], at[2][i], at[3][i]};
      out.rgb.push_back(how == Interpolation::linear ? level_linear(sums, taps.weight)
                                                     : level_cubic(sums, taps.weight));
    }
  }
  return out;
}

Image smooth_bilateral(const Image& image, int diameter, double sigma_color, double sigma_space) {
  const int64_t radius = std::max(diameter / 2, 1);
  const int64_t height = image.height, width = image.width;
  const auto gaussian = [](double x, double sigma) {
    return static_cast<float>(std::exp(x * x * (-0.5 / (sigma * sigma))));
  };
  std::array<float, 255 * kChannels + 1> of_colour{};
  for (size_t i = 0; i < of_colour.size(); ++i) of_colour[i] = gaussian(double(i), sigma_color);

  const int64_t padded_width = width + 2 * radius;
  std::vector<uint8_t> padded;
  padded.reserve(static_cast<size_t>((height + 2 * radius) * padded_width * kChannels));
  for (int64_t y = -radius; y < height + radius; ++y) {
    const uint8_t* row = image.rgb.data() + mirrored(y, height) * width * kChannels;
    for (int64_t x = -radius; x < width + radius; ++x) {
      const uint8_t* pixel = row + mirrored(x, width) * kChannels;
      padded.insert(padded.end(), pixel, pixel + kChannels);
    }
  }
  struct Tap {
    int64_t offset;
    float weight;
  };
  std::vector<Tap> disc;
  for (int64_t y = -radius; y <= radius; ++y) {
    for (int64_t x = -radius; x <= radius; ++x) {
      const double distance = std::sqrt(double(y * y + x * x));
      if (distance > double(radius)) continue;
      disc.push_back({(y * padded_width + x) * kChannels, gaussian(distance, sigma_space)});
    }
  }
  Image out{height, width, {}};
  out.rgb.reserve(image.rgb.size());
  for (int64_t y = 0; y < height; ++y) {
    const uint8_t* centre = padded.data() + ((y + radius) * padded_width + radius) * kChannels;
    for (int64_t x = 0; x < width; ++x, centre += kChannels) {
      float sum[kChannels] = {}, total = 0;
      for (const Tap& tap : disc) {
        const uint8_t* pixel = centre + tap.offset;
        const int difference = std::abs(pixel[0] - centre[0]) + std::abs(pixel[1] - centre[1]) +
                               std::abs(pixel[2] - centre[2]);
        const float weight = tap.weight * of_colour[static_cast<size_t>(difference)];
        for (int64_t c = 0; c < kChannels; ++c) sum[c] += float(pixel[c]) * weight;
        total += weight;
      }
      for (const float value : sum) {
        out.rgb.push_back(static_cast<uint8_t>(std::nearbyint(value / total)));
      }
    }
  }
  return out;
}

Image blur_map(const Image& frame, BlurStrength strength) {
  if (strength.coarse == 0) return frame;
  const Image small = shrink_by_area(frame, strength.shrink);
  // The filter is that of a picture whose longest side is 720.
  const double scale = double(std::max(small.height, small.width)) / 720;
  const auto diameter = static_cast<int>(std::max(1.0, std::nearbyint(30 * scale)));
  const Image smooth = smooth_bilateral(small, diameter + (diameter % 2 == 0 ? 1 : 0),
                                        std::max(1.0, 150 * scale), std::max(1.0, 100 * scale));
  const Image whole = interpolate(smooth, frame.height, frame.width, Interpolation::linear);
  const auto coarse = [&](int64_t side) { return std::max<int64_t>(1, side / strength.coarse); };
  const Image few =
      interpolate(whole, coarse(frame.height), coarse(frame.width), Interpolation::cubic);
  return interpolate(few, frame.height, frame.width, Interpolation::cubic);
}

}  // namespace orrery
