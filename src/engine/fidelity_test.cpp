#include "engine/fidelity.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "orrery/error.h"

namespace orrery {
namespace {

Frames noise(int64_t count, int64_t height, int64_t width, unsigned seed) {
  Frames frames{count, height, width, {}};
  std::mt19937 engine(seed);
  for (int64_t i = 0; i < count * height * width * 3; ++i) {
    frames.rgb.push_back(static_cast<uint8_t>(engine() >> 24));
  }
  return frames;
}

Frames flat(int64_t count, uint8_t value) {
  return {count, 16, 16, std::vector<uint8_t>(size_t(count) * 768, value)};
}

TEST(Fidelity, RelativeErrorIsTheRatioOfNorms) {
  const std::vector<float> reference{3, 0, 4}, x{3, 1, 4};
  EXPECT_DOUBLE_EQ(relative_error(x, reference), 0.2);
  EXPECT_EQ(relative_error(reference, reference), 0);
  EXPECT_THROW(relative_error(x, std::vector<float>{1}), Error);
}

TEST(Fidelity, PsnrFollowsFromTheMeanSquare) {
  // Off by 5 everywhere: 20 log10(255 / 5).
  EXPECT_NEAR(psnr(flat(2, 105), flat(2, 100)), 20 * std::log10(51.0), 1e-12);
  EXPECT_TRUE(std::isinf(psnr(flat(1, 7), flat(1, 7))));
  EXPECT_THROW(psnr(flat(1, 7), flat(2, 7)), Error);
}

TEST(Fidelity, SsimOfEqualClipsIsOne) {
  const Frames x = noise(2, 20, 24, 1);
  EXPECT_NEAR(ssim(x, x), 1, 1e-9);
}

// Flat pictures have no variance: what is left is the luminance term.
TEST(Fidelity, SsimOfFlatPicturesIsTheLuminanceTerm) {
  const double c1 = 6.5025, want = (2 * 100 * 140 + c1) / (100 * 100 + 140 * 140 + c1);
  EXPECT_NEAR(ssim(flat(1, 140), flat(1, 100)), want, 1e-5);
}

// The definition, window by window in double precision.
TEST(Fidelity, SsimIsTheDefinition) {
  const Frames x = noise(2, 15, 13, 2);
  Frames y = noise(2, 15, 13, 3);
  for (size_t i = 0; i < y.rgb.size(); ++i)
    y.rgb[i] = static_cast<uint8_t>((2 * x.rgb[i] + y.rgb[i]) / 3);
  const auto luma = [](const Frames& f, int64_t frame, int64_t r, int64_t c) {
    const uint8_t* p = f.frame(frame) + (r * f.width + c) * 3;
    return 0.299 * p[0] + 0.587 * p[1] + 0.114 * p[2];
  };
  double total = 0, windows = 0;
  for (int64_t f = 0; f < 2; ++f) {
    for (int64_t top = 0; top + 11 <= 15; ++top) {
      for (int64_t left = 0; left + 11 <= 13; ++left) {
        double w = 0, mx = 0, my = 0;
        const auto each = [&](const auto& fn) {
          for (int64_t i = 0; i < 11; ++i) {
            for (int64_t j = 0; j < 11; ++j) {
              const double weight = std::exp(-double((i - 5) * (i - 5) + (j - 5) * (j - 5)) / 4.5);
              fn(weight, luma(x, f, top + i, left + j), luma(y, f, top + i, left + j));
            }
          }
        };
        each([&](double g, double a, double b) { w += g, mx += g * a, my += g * b; });
        mx /= w, my /= w;
        double vx = 0, vy = 0, cov = 0;
        each([&](double g, double a, double b) {
          vx += g / w * (a - mx) * (a - mx), vy += g / w * (b - my) * (b - my),
              cov += g / w * (a - mx) * (b - my);
        });
        const double c1 = 6.5025, c2 = 58.5225;
        total += (2 * mx * my + c1) * (2 * cov + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2));
        ++windows;
      }
    }
  }
  EXPECT_NEAR(ssim(x, y), total / windows, 1e-4);
  EXPECT_LT(total / windows, 0.9);
}

}  // namespace
}  // namespace orrery
