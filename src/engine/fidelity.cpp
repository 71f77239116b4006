#include "engine/fidelity.h"

#include <array>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace orrery {

namespace {

constexpr int64_t kWindow = 11;
constexpr double kDeviation = 1.5, kPeak = 255;

void require_equal_size(const char* what, const Frames& x, const Frames& reference) {
  require(x.count == reference.count && x.height == reference.height &&
              x.width == reference.width && x.count > 0,
          what, ": clips of ", x.count, " frames of ", x.width, "x", x.height, " and ",
          reference.count, " of ", reference.width, "x", reference.height, " cannot be compared");
}

std::array<float, kWindow> gaussian() {
  std::array<double, kWindow> weights{};
  double sum = 0;
  for (int64_t i = 0; i < kWindow; ++i) {
    const double d = static_cast<double>(i - kWindow / 2) / kDeviation;
    sum += weights[static_cast<size_t>(i)] = std::exp(-0.5 * d * d);
  }
  std::array<float, kWindow> out{};
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(weights[i] / sum);
  return out;
}

struct Plane {
  int64_t height = 0, width = 0;
  std::vector<float> values;

  Plane(int64_t h, int64_t w) : height(h), width(w), values(static_cast<size_t>(h * w)) {}
  float* row(int64_t y) { return values.data() + y * width; }
  const float* row(int64_t y) const { return values.data() + y * width; }
};

Plane luma(const Frames& frames, int64_t frame) {
  Plane out(frames.height, frames.width);
  const uint8_t* rgb = frames.frame(frame);
  for (float& value : out.values) {
    value = 0.299f * static_cast<float>(rgb[0]) + 0.587f * static_cast<float>(rgb[1]) +
            0.114f * static_cast<float>(rgb[2]);
    rgb += 3;
  }
  return out;
}

// Weighted means of all windows inside x * y.
Plane local_means(const Plane& x, const Plane& y, const std::array<float, kWindow>& weights) {
  Plane across(x.height, x.width - kWindow + 1);
  std::vector<float> product(static_cast<size_t>(x.width));
  for (int64_t r = 0; r < x.height; ++r) {
    for (int64_t c = 0; c < x.width; ++c)
      product[static_cast<size_t>(c)] = x.row(r)[c] * y.row(r)[c];
    for (int64_t i = 0; i < kWindow; ++i) {
      for (int64_t c = 0; c < across.width; ++c) {
        across.row(r)[c] += weights[static_cast<size_t>(i)] * product[static_cast<size_t>(c + i)];
      }
    }
  }
  Plane out(x.height - kWindow + 1, across.width);
  for (int64_t r = 0; r < out.height; ++r) {
    for (int64_t i = 0; i < kWindow; ++i) {
      for (int64_t c = 0; c < out.width; ++c) {
        out.row(r)[c] += weights[static_cast<size_t>(i)] * across.row(r + i)[c];
      }
    }
  }
  return out;
}

}  // namespace

double relative_error(std::span<const float> x, std::span<const float> reference) {
  require(x.size() == reference.size(), "relative error: ", x.size(), " values against ",
          reference.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double d = static_cast<double>(x[i]) - static_cast<double>(reference[i]);
    difference += d * d;
    norm += static_cast<double>(reference[i]) * static_cast<double>(reference[i]);
  }
  return difference == 0 ? 0 : std::sqrt(difference / norm);
}

double psnr(const Frames& x, const Frames& reference) {
  require_equal_size("psnr", x, reference);
  double sum = 0;
  for (size_t i = 0; i < x.rgb.size(); ++i) {
    const double d = static_cast<double>(x.rgb[i]) - static_cast<double>(reference.rgb[i]);
    sum += d * d;
  }
  if (sum == 0) return std::numeric_limits<double>::infinity();
  return 10 * std::log10(kPeak * kPeak * static_cast<double>(x.rgb.size()) / sum);
}

double ssim(const Frames& x, const Frames& reference) {
  require_equal_size("ssim", x, reference);
  require(x.height >= kWindow && x.width >= kWindow, "ssim: frames of ", x.width, "x", x.height,
          " are smaller than the window of ", kWindow);
  const std::array<float, kWindow> weights = gaussian();
  const double c1 = std::pow(0.01 * kPeak, 2), c2 = std::pow(0.03 * kPeak, 2);
  double sum = 0;
  for (int64_t f = 0; f < x.count; ++f) {
    // About mid-grey, so that squares of means and means of squares do not cancel in single
    // precision.
    Plane a = luma(x, f), b = luma(reference, f), one(x.height, x.width);
    for (float& value : one.values) value = 1;
    const float centre = static_cast<float>(kPeak) / 2;
    for (Plane* plane : {&a, &b}) {
      for (float& value : plane->values) value -= centre;
    }
    const Plane mean_a = local_means(a, one, weights), mean_b = local_means(b, one, weights);
    const Plane aa = local_means(a, a, weights), bb = local_means(b, b, weights),
                ab = local_means(a, b, weights);
    double frame = 0;
    for (size_t i = 0; i < aa.values.size(); ++i) {
      const double ma = mean_a.values[i], mb = mean_b.values[i];
      const double va = aa.values[i] - ma * ma, vb = bb.values[i] - mb * mb,
                   cov = ab.values[i] - ma * mb;
      const double light_a = ma + centre, light_b = mb + centre;
      frame += (2 * light_a * light_b + c1) * (2 * cov + c2) /
               ((light_a * light_a + light_b * light_b + c1) * (va + vb + c2));
    }
    sum += frame / static_cast<double>(aa.values.size());
  }
  return sum / static_cast<double>(x.count);
}

}  // namespace orrery
