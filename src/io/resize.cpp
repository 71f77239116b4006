#include "io/resize.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"

namespace orrery {
namespace {

constexpr int64_t kChannels = 3;
constexpr int64_t kSnap = 16;  // action frames are resized to multiples of the latent pixel

double weight_at(Filter filter, double x) {
  x = std::abs(x);
  if (filter == Filter::triangle) return x < 1 ? 1 - x : 0;
  constexpr double a = -0.5;
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
  return 0;
}

// The same in single precision, as torch evaluates it.
float weight_at(Filter filter, float x) {
  x = std::abs(x);
  if (filter == Filter::triangle) return x < 1 ? 1 - x : 0;
  constexpr float a = -0.5f;
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
  return 0;
}

// Inputs [first, first + weights.size()) of one output position.
template <typename Weight>
struct Taps {
  int64_t first = 0;
  std::vector<Weight> weights;
};

// Scalar: double for PIL, float for torch. torch multiplies the filter's argument by a reciprocal.
template <typename Scalar>
std::vector<Taps<Scalar>> make_taps(int64_t in, int64_t out, Filter filter) {
  const Scalar scale = Scalar(in) / Scalar(out);
  const Scalar widening = std::max(scale, Scalar(1));
  const Scalar radius = (filter == Filter::triangle ? 1 : 2) * widening;
  const Scalar inverse = 1 / widening;
  std::vector<Taps<Scalar>> all(static_cast<size_t>(out));
  for (int64_t i = 0; i < out; ++i) {
    Taps<Scalar>& taps = all[size_t(i)];
    const Scalar center = Scalar((double(i) + 0.5) * double(scale));
    taps.first = std::max<int64_t>(0, int64_t(double(center - radius) + 0.5));
    const int64_t end = std::min(in, int64_t(double(center + radius) + 0.5));
    Scalar total = 0;
    for (int64_t j = taps.first; j < end; ++j) {
      const Scalar weight =
          weight_at(filter, Scalar((double(Scalar(j) - center) + 0.5) * double(inverse)));
      taps.weights.push_back(weight);
      total += weight;
    }
    for (Scalar& weight : taps.weights) weight /= total;
  }
  return all;
}

constexpr int kFixedBits = 22;

std::vector<Taps<int32_t>> fixed_taps(int64_t in, int64_t out) {
  std::vector<Taps<int32_t>> all;
  for (const Taps<double>& taps : make_taps<double>(in, out, Filter::triangle)) {
    Taps<int32_t> fixed{taps.first, {}};
    for (const double weight : taps.weights) {
      fixed.weights.push_back(static_cast<int32_t>(weight * (1 << kFixedBits) + 0.5));
    }
    all.push_back(std::move(fixed));
  }
  return all;
}

// The two resamplers as sums over taps, `step` values apart.
uint8_t weighted_sum(const uint8_t* x, int64_t step, const Taps<int32_t>& taps) {
  int32_t sum = 1 << (kFixedBits - 1);
  for (const int32_t weight : taps.weights) {
    sum += *x * weight;
    x += step;
  }
  return static_cast<uint8_t>(std::clamp(sum >> kFixedBits, 0, 255));
}

float weighted_sum(const float* x, int64_t step, const Taps<float>& taps) {
  float sum = *x * taps.weights[0];
  for (size_t k = 1; k < taps.weights.size(); ++k) {
    x += step;
    sum = std::fma(*x, taps.weights[k], sum);
  }
  return sum;
}

// out [outer, taps.size(), inner] from x [outer, in, inner].
template <typename Value, typename Weight>
std::vector<Value> resample_axis(std::span<const Value> x, int64_t outer, int64_t in, int64_t inner,
                                 const std::vector<Taps<Weight>>& taps) {
  std::vector<Value> out;
  out.reserve(size_t(outer) * taps.size() * size_t(inner));
  for (int64_t o = 0; o < outer; ++o) {
    const Value* plane = x.data() + o * in * inner;
    for (const Taps<Weight>& tap : taps) {
      const Value* start = plane + tap.first * inner;
      for (int64_t k = 0; k < inner; ++k) out.push_back(weighted_sum(start + k, inner, tap));
    }
  }
  return out;
}

void require_size(int64_t height, int64_t width) {
  require(height > 0 && width > 0, "resize: the target size ", width, "x", height,
          " must be positive");
}

void require_image(const Image& image) {
  require(image.height > 0 && image.width > 0 &&
              std::ssize(image.rgb) == image.height * image.width * kChannels,
          "resize: an image of ", image.width, "x", image.height, " with ", image.rgb.size(),
          " bytes is not an RGB picture");
}

// Planar, each level mapped.
template <typename Map>
std::vector<float> to_planes(const Image& image, const Map& map) {
  std::vector<float> out;
  out.reserve(image.rgb.size());
  for (int64_t c = 0; c < kChannels; ++c) {
    for (size_t i = size_t(c); i < image.rgb.size(); i += kChannels)
      out.push_back(map(image.rgb[i]));
  }
  return out;
}

// The canvas (height, width) of a tier whose shape is nearest; the first listed on ties.
std::array<int64_t, 2> closest_canvas(int64_t tier, double ratio) {
  using Sizes = std::array<std::array<int64_t, 2>, 5>;
  static constexpr std::array<std::pair<int64_t, Sizes>, 4> kTiers{{
      {256, {{{256, 256}, {256, 320}, {320, 256}, {192, 320}, {320, 192}}}},
      {480, {{{640, 640}, {544, 736}, {736, 544}, {480, 832}, {832, 480}}}},
      {704, {{{960, 960}, {832, 1088}, {1088, 832}, {704, 1280}, {1280, 704}}}},
      {720, {{{960, 960}, {832, 1104}, {1104, 832}, {720, 1280}, {1280, 720}}}},
  }};
  for (const auto& [name, sizes] : kTiers) {
    if (name != tier) continue;
    const auto distance = [&](const std::array<int64_t, 2>& size) {
      return std::abs(double(size[0]) / double(size[1]) - ratio);
    };
    return *std::min_element(sizes.begin(), sizes.end(), [&](const auto& a, const auto& b) {
      return distance(a) < distance(b);
    });
  }
  fail(ErrorKind::invalid_argument, "resolution tier ", tier,
       " is not known; the tiers are 256, 480, 704 and 720");
}

}  // namespace

Image resize_8bit(const Image& image, int64_t height, int64_t width) {
  require_image(image);
  require_size(height, width);
  Image out = image;
  if (width != image.width) {
    out.rgb = resample_axis<uint8_t>(out.rgb, image.height, image.width, kChannels,
                                     fixed_taps(image.width, width));
    out.width = width;
  }
  if (height != image.height) {
    out.rgb = resample_axis<uint8_t>(out.rgb, 1, image.height, width * kChannels,
                                     fixed_taps(image.height, height));
    out.height = height;
  }
  return out;
}

std::vector<float> resize_float(std::span<const float> planes, int64_t channels, int64_t h,
                                int64_t w, int64_t height, int64_t width, Filter filter) {
  require_size(height, width);
  require(std::ssize(planes) == channels * h * w, "resize: ", planes.size(), " values are not ",
          channels, " planes of ", w, "x", h);
  std::vector<float> out(planes.begin(), planes.end());
  if (width != w) {
    out = resample_axis<float>(out, channels * h, w, 1, make_taps<float>(w, width, filter));
  }
  if (height != h) {
    out = resample_axis<float>(out, channels, h, width, make_taps<float>(h, height, filter));
  }
  return out;
}

Image cover_8bit(const Image& image, int64_t height, int64_t width) {
  require_image(image);
  require_size(height, width);
  const double scale =
      std::max(double(width) / double(image.width), double(height) / double(image.height));
  const int64_t covered_height = int64_t(std::ceil(scale * double(image.height)));
  const int64_t covered_width = int64_t(std::ceil(scale * double(image.width)));
  const int64_t pixels = image.height * image.width;
  std::vector<float> planes(image.rgb.size());
  for (int64_t i = 0; i < pixels; ++i) {
    for (int64_t c = 0; c < kChannels; ++c) {
      planes[size_t(c * pixels + i)] = image.rgb[size_t(i * kChannels + c)];
    }
  }
  const std::vector<float> covered = resize_float(planes, kChannels, image.height, image.width,
                                                  covered_height, covered_width, Filter::triangle);
  const int64_t top = int64_t(std::nearbyint(double(covered_height - height) / 2));
  const int64_t left = int64_t(std::nearbyint(double(covered_width - width) / 2));
  Image out{height, width, {}};
  out.rgb.reserve(size_t(kChannels * height * width));
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x) {
      for (int64_t c = 0; c < kChannels; ++c) {
        const int64_t at = (c * covered_height + top + y) * covered_width + left + x;
        const float level = std::nearbyint(covered[size_t(at)]);
        out.rgb.push_back(static_cast<uint8_t>(std::clamp(level, 0.0f, 255.0f)));
      }
    }
  }
  return out;
}

std::vector<float> condition_image(const Image& image, int64_t height, int64_t width) {
  return to_planes(cover_8bit(image, height, width),
                   [](float level) { return level / 127.5f - 1; });
}

std::vector<float> normalized(const Image& image) {
  return to_planes(image, [](float level) { return 2 * (level / 255) - 1; });
}

std::vector<float> condition_frame(const Image& frame, int64_t height, int64_t width) {
  return normalized(resize_8bit(frame, height, width));
}

ActionGeometry action_geometry(int64_t tier, int64_t h, int64_t w) {
  const int64_t height = h / kSnap * kSnap, width = w / kSnap * kSnap;
  require(height > 0 && width > 0, "action canvas: frames of ", w, "x", h, " are smaller than ",
          kSnap, "x", kSnap);
  const std::array<int64_t, 2> canvas = closest_canvas(tier, double(height) / double(width));
  const double scale =
      std::min({double(canvas[1]) / double(width), double(canvas[0]) / double(height), 1.0});
  const auto scaled = [&](int64_t side) {
    return std::max<int64_t>(1, int64_t(std::floor(scale * double(side) + 0.5)));
  };
  return {canvas[0], canvas[1], scaled(height), scaled(width)};
}

ActionCanvas action_canvas(const std::vector<Image>& frames, int64_t num_frames, int64_t tier) {
  require(!frames.empty(), "action canvas: there are no frames");
  require(num_frames >= 1, "action canvas: the number of frames is ", num_frames,
          "; it must be at least 1");
  ActionCanvas canvas{action_geometry(tier, frames[0].height, frames[0].width), num_frames, {}};
  const auto [height, width, content_height, content_width] = canvas.geometry;
  const bool reflect =
      height - content_height < content_height && width - content_width < content_width;
  const auto source = [&](int64_t i, int64_t content) {
    if (i < content) return i;
    return reflect ? 2 * (content - 1) - i : content - 1;
  };
  const int64_t h = frames[0].height / kSnap * kSnap, w = frames[0].width / kSnap * kSnap;
  const int64_t plane = height * width;
  canvas.pixels.resize(size_t(kChannels * num_frames * plane));
  const int64_t given = std::min(num_frames, std::ssize(frames));
  for (int64_t t = 0; t < given; ++t) {
    const Image& frame = frames[size_t(t)];
    require(frame.height == frames[0].height && frame.width == frames[0].width,
            "action canvas: frame ", t, " is ", frame.width, "x", frame.height,
            ", but the first is ", frames[0].width, "x", frames[0].height);
    // Unclamped: the overshoot of the cubic filter goes into the encoder.
    const std::vector<float> content = resize_float(condition_frame(frame, h, w), kChannels, h, w,
                                                    content_height, content_width, Filter::cubic);
    for (int64_t c = 0; c < kChannels; ++c) {
      float* out = canvas.pixels.data() + (c * num_frames + t) * plane;
      for (int64_t y = 0; y < height; ++y) {
        const float* row =
            content.data() + (c * content_height + source(y, content_height)) * content_width;
        for (int64_t x = 0; x < width; ++x) *out++ = row[source(x, content_width)];
      }
    }
  }
  for (int64_t c = 0; c < kChannels; ++c) {
    float* first = canvas.pixels.data() + c * num_frames * plane;
    for (int64_t t = given; t < num_frames; ++t) {
      std::copy_n(first + (given - 1) * plane, plane, first + t * plane);
    }
  }
  return canvas;
}

}  // namespace orrery
