#include "base/rng.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "base/error.h"

namespace orrery {
namespace {

std::vector<float> draw(NormalGenerator& generator, size_t n, NoiseType stream = NoiseType::fp32) {
  std::vector<float> values(n);
  generator.fill(values, stream);
  return values;
}

std::vector<float> draw_bf16(NormalGenerator& generator, size_t n) {
  return draw(generator, n, NoiseType::bf16);
}

std::vector<float> draw_old_bf16(NormalGenerator& generator, size_t n) {
  return draw(generator, n, NoiseType::bf16_torch_2_11);
}

void expect_starts(const std::vector<float>& got, const std::vector<float>& want, float tolerance) {
  ASSERT_GE(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], tolerance) << i;
}

// The printed values have nine significant digits, enough to name one float.
void expect_starts(const std::vector<float>& got, const std::vector<float>& want) {
  expect_starts(got, want, 0);
}

TEST(NormalGenerator, CpuBelowSixteenElements) {
  NormalGenerator generator(RngKind::cpu, 42);
  expect_starts(draw(generator, 8), {0.336690366f, 0.128809407f, 0.234462366f, 0.23033303f,
                                     -1.12285638f, -0.186328292f, 2.20820141f, -0.637997031f});
}

TEST(NormalGenerator, CpuBlocksOfSixteen) {
  const std::vector<float> want{1.92691529f,  1.48728406f,  0.900717199f,   -2.10552096f,
                                0.678418458f, -1.23454487f, -0.0430674776f, -1.60466695f};
  for (const size_t n : {size_t{16}, size_t{24}, size_t{1000}}) {
    NormalGenerator generator(RngKind::cpu, 42);
    expect_starts(draw(generator, n), want);
  }
}

TEST(NormalGenerator, CpuRedrawsTheLastSixteenOfAnUnevenDraw) {
  NormalGenerator generator(RngKind::cpu, 42);
  expect_starts(draw(generator, 17), {1.92691529f, -0.159597471f, -0.497397542f, 0.439589262f,
                                      -0.758131146f, 1.07831764f, 0.800800562f, 1.68062055f});
  // Everything before the last 16 is common to all sizes.
  NormalGenerator one(RngKind::cpu, 7), two(RngKind::cpu, 7);
  const auto a = draw(one, 101), b = draw(two, 4000);
  EXPECT_TRUE(std::equal(a.begin(), a.end() - 16, b.begin()));
  EXPECT_FALSE(std::equal(a.end() - 16, a.end(), b.begin() + 85));
}

TEST(NormalGenerator, CpuSpareOutlivesLargeDraws) {
  NormalGenerator generator(RngKind::cpu, 42);
  draw(generator, 5);
  draw(generator, 20);
  expect_starts(draw(generator, 3), {-0.186328292f, 0.281519562f, 0.056163542f});
}

TEST(NormalGenerator, CpuSpareCrossesTypes) {
  NormalGenerator generator(RngKind::cpu, 42);
  draw_bf16(generator, 5);
  expect_starts(draw(generator, 1), {-0.186328292f});
}

// A whole number of blocks is the fp32 draw, rounded. Otherwise the last 16 values are those of the
// block that a draw of whole blocks would make next.
TEST(NormalGenerator, CpuBf16IsTheRoundedDrawButForItsEnd) {
  NormalGenerator even(RngKind::cpu, 7), uneven(RngKind::cpu, 7), exact(RngKind::cpu, 7);
  const auto fp32 = draw(exact, 112), whole = draw_bf16(even, 112), some = draw_bf16(uneven, 101);
  for (size_t i = 0; i < 112; ++i) EXPECT_NEAR(whole[i], fp32[i], std::abs(fp32[i]) * 0x1p-8f) << i;
  for (size_t i = 0; i < 101; ++i) EXPECT_EQ(some[i], whole[i < 85 ? i : i + 11]) << i;
  EXPECT_EQ(draw(even, 20), draw(uneven, 20));
}

TEST(NormalGenerator, CpuBf16OfTorch211IsAnotherStream) {
  NormalGenerator large(RngKind::cpu, 42), small(RngKind::cpu, 42);
  const auto values = draw_old_bf16(large, 1000);
  expect_starts(values, {-0.80859375f, -1.53125f, 0.40625f, 0.171875f, -0.247070312f, 0.204101562f,
                         -0.87890625f, -0.38671875f});
  expect_starts(draw_old_bf16(small, 5),
                {0.3359375f, 0.12890625f, 0.234375f, 0.23046875f, -1.125f});
  NormalGenerator long_draw(RngKind::cpu, 1);
  float largest = 0;
  for (const float value : draw_old_bf16(long_draw, 100000)) {
    largest = std::max(largest, std::abs(value));
  }
  EXPECT_EQ(largest, 3.328125f);
}

TEST(NormalGenerator, CpuTakesTheLowHalfOfTheSeed) {
  NormalGenerator big(RngKind::cpu, 8589934597), small(RngKind::cpu, 5);
  EXPECT_EQ(draw(big, 100), draw(small, 100));
  NormalGenerator negative(RngKind::cpu, -1), all_ones(RngKind::cpu, 4294967295);
  EXPECT_EQ(draw(negative, 20), draw(all_ones, 20));
}

TEST(NormalGenerator, EmptyDrawConsumesNothing) {
  for (const RngKind kind : {RngKind::cpu, RngKind::cuda}) {
    NormalGenerator with(kind, 3), without(kind, 3);
    draw(with, 0);
    draw_bf16(with, 0);
    EXPECT_EQ(draw(with, 50), draw(without, 50));
  }
}

// Radius and sine each carry about one rounding of the polynomial and one of the last operation,
// and their product one more: 3 units of fp32 relative to the radius.
TEST(NormalGenerator, CpuBlocksAgreeWithExactFunctions) {
  NormalGenerator generator(RngKind::cpu, 11);
  const auto values = draw(generator, 16 * 2000);
  std::mt19937 words(11);
  std::vector<double> uniforms(values.size());
  for (double& u : uniforms) u = double(words() & 0xffffffu) * 0x1p-24;
  double worst = 0;
  for (size_t block = 0; block < values.size(); block += 16) {
    for (size_t j = block; j < block + 8; ++j) {
      const double radius = std::sqrt(-2 * std::log(1 - uniforms[j]));
      const double angle = double(float(2 * M_PI) * float(uniforms[j + 8]));
      worst = std::max(worst, std::abs(std::cos(angle) - double(values[j]) / radius));
      worst = std::max(worst, std::abs(std::sin(angle) - double(values[j + 8]) / radius));
    }
  }
  EXPECT_LT(worst, 3 * 0x1p-23);
  EXPECT_GT(worst, 0);
}

// Accurate sine and cosine against the GPU's fast ones: 2.3e-6 absolute at most.
constexpr float kCudaTolerance = 5e-6f;

TEST(NormalGenerator, CudaFirstValues) {
  NormalGenerator generator(RngKind::cuda, 42);
  expect_starts(draw(generator, 1000),
                {0.194018796f, 2.16137362f, -0.172050223f, 0.849060118f, -1.92439902f, 0.652985513f,
                 -0.649440825f, -0.817524731f},
                kCudaTolerance);
  // Offset 4 after one draw.
  expect_starts(
      draw(generator, 8),
      {0.139138f, -0.108216f, -0.717422f, 0.756649f, 0.371488f, -1.004941f, 0.008295f, 0.327658f},
      kCudaTolerance);
}

TEST(NormalGenerator, CudaBf16IsTheRoundedDraw) {
  NormalGenerator generator(RngKind::cuda, 42);
  expect_starts(draw_bf16(generator, 1000), {0.194335938f, 2.15625f, -0.171875f, 0.84765625f,
                                             -1.921875f, 0.65234375f, -0.6484375f, -0.81640625f});
}

TEST(NormalGenerator, CudaLargeDrawDependsOnTheThreads) {
  NormalGenerator generator(RngKind::cuda, 42);
  const auto values = draw(generator, 3000017);
  expect_starts({values.begin() + (1 << 20), values.begin() + (1 << 20) + 4},
                {-0.0195216294f, 0.0283255242f, 0.409707487f, 1.51269138f}, kCudaTolerance);
  expect_starts({values.end() - 4, values.end()},
                {-0.340753227f, -0.211556181f, -0.0575972609f, -0.701046407f}, kCudaTolerance);
  // Draws of at most T elements are common to all GPUs; larger ones are not.
  NormalGenerator a100(RngKind::cuda, 42, 221184);
  const auto other = draw(a100, 3000017);
  EXPECT_TRUE(std::equal(other.begin(), other.begin() + 221184, values.begin()));
  EXPECT_NE(other[221184], values[221184]);
}

TEST(NormalGenerator, CudaOffsetAdvancesByRounds) {
  // 5 rounds of 4 x 256: the next draw starts where the sixth single-round draw of another
  // generator does.
  NormalGenerator many(RngKind::cuda, 9, 256), one(RngKind::cuda, 9, 256);
  draw(many, 4 * 1024 + 1);
  for (int i = 0; i < 5; ++i) draw(one, 1024);
  EXPECT_EQ(draw(many, 10), draw(one, 10));
}

TEST(NormalGenerator, CudaUsesAllSeedBits) {
  NormalGenerator big(RngKind::cuda, 8589934597), small(RngKind::cuda, 5);
  EXPECT_NE(draw(big, 4), draw(small, 4));
}

TEST(NormalGenerator, RefusesBadThreadCounts) {
  EXPECT_THROW(NormalGenerator(RngKind::cuda, 0, 0), Error);
  EXPECT_THROW(NormalGenerator(RngKind::cuda, 0, 100), Error);
}

}  // namespace
}  // namespace orrery
