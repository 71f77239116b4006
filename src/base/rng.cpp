#include "base/rng.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace orrery {
namespace {

// Every product below that meets a sum is either inside std::fma or exact (a power of two), so a
// compiler that contracts a * b + c changes no bit.

constexpr int64_t kBlock = 16;  // elements of one CPU Box-Muller block: 8 cosines, then 8 sines
constexpr int64_t kPairs = kBlock / 2;
constexpr float kTwoPi = 2 * std::numbers::pi_v<float>;

float rounded_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

// Natural logarithm of a normal x in (0, 1], by the Cephes polynomial of PyTorch's AVX2 path.
[[gnu::always_inline]] inline float cephes_log(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  int32_t exponent = static_cast<int32_t>(bits >> 23) - 126;
  const float m = std::bit_cast<float>((bits & 0x007fffffu) | 0x3f000000u);  // in [0.5, 1)
  const bool low = m < 0.707106781186547524f;
  exponent -= low ? 1 : 0;
  const float e = static_cast<float>(exponent);
  const float y = (m - 1.0f) + (low ? m : 0.0f);
  const float z = y * y;
  float p = 7.0376836292e-2f;
  p = std::fma(p, y, -1.1514610310e-1f);
  p = std::fma(p, y, 1.1676998740e-1f);
  p = std::fma(p, y, -1.2420140846e-1f);
  p = std::fma(p, y, 1.4249322787e-1f);
  p = std::fma(p, y, -1.6668057665e-1f);
  p = std::fma(p, y, 2.0000714765e-1f);
  p = std::fma(p, y, -2.4999993993e-1f);
  p = std::fma(p, y, 3.3333331174e-1f);
  p = p * y;
  p = std::fma(p, z, e * -2.12194440e-4f);
  p = p - z * 0.5f;
  return std::fma(e, 0.693359375f, y + p);
}

// Sine and cosine of angle in [0, 2 pi].
[[gnu::always_inline]] inline void cephes_sincos(float angle, float& sine, float& cosine) {
  const int32_t j = (static_cast<int32_t>(angle * 1.27323954473516f) + 1) & ~1;
  const float octants = static_cast<float>(j);
  float r = std::fma(octants, -0.78515625f, angle);
  r = std::fma(octants, -2.4187564849853515625e-4f, r);
  r = std::fma(octants, -3.77489497744594108e-8f, r);
  const float z = r * r;
  float c = std::fma(2.443315711809948e-5f, z, -1.388731625493765e-3f);
  c = std::fma(c, z, 4.166664568298827e-2f);
  c = std::fma(c * z, z, z * -0.5f) + 1.0f;
  float s = std::fma(-1.9515295891e-4f, z, 8.3321608736e-3f);
  s = std::fma(s, z, -1.6666654611e-1f);
  s = std::fma(s * z, r, r);
  const bool swapped = (j & 2) != 0;
  const uint32_t sine_sign = (static_cast<uint32_t>(j) & 4u) << 29;
  const uint32_t cosine_sign = (~static_cast<uint32_t>(j - 2) & 4u) << 29;
  sine = std::bit_cast<float>(std::bit_cast<uint32_t>(swapped ? c : s) ^ sine_sign);
  cosine = std::bit_cast<float>(std::bit_cast<uint32_t>(swapped ? s : c) ^ cosine_sign);
}

// Turns blocks of 16 uniforms into normals, in place.
[[gnu::always_inline]] inline void transform_blocks(float* values, int64_t blocks) {
  for (int64_t block = 0; block < blocks; ++block, values += kBlock) {
    std::array<float, kPairs> radius;
    for (int64_t j = 0; j < kPairs; ++j) {
      radius[size_t(j)] = -2.0f * cephes_log(1.0f - values[j]);
    }
    // Alone in its loop: std::sqrt may set errno, which keeps its loop from becoming vector code.
    for (float& r : radius) r = std::sqrt(r);
    for (int64_t j = 0; j < kPairs; ++j) {
      float sine, cosine;
      cephes_sincos(kTwoPi * values[j + kPairs], sine, cosine);
      values[j] = radius[size_t(j)] * cosine;
      values[j + kPairs] = radius[size_t(j)] * sine;
    }
  }
}

[[gnu::target("avx2,fma")]] void transform_blocks_avx2(float* values, int64_t blocks) {
  transform_blocks(values, blocks);
}

void transform_blocks_any(float* values, int64_t blocks) { transform_blocks(values, blocks); }

void box_muller_f32(float* values, int64_t blocks) {
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    transform_blocks_avx2(values, blocks);
  } else {
    transform_blocks_any(values, blocks);
  }
}

// The same steps with every intermediate rounded to bf16; logarithm, cosine and sine are rounded to
// fp32 first. Only 256 uniforms exist.
void box_muller_bf16(float* values, int64_t blocks) {
  const auto round = [](double value) { return rounded_to_bf16(static_cast<float>(value)); };
  for (int64_t block = 0; block < blocks; ++block, values += kBlock) {
    for (int64_t j = 0; j < kPairs; ++j) {
      const float logarithm = round(std::log(double(round(1.0 - double(values[j])))));
      const float radius = round(std::sqrt(double(round(-2.0 * double(logarithm)))));
      const double angle = round(2 * std::numbers::pi * double(values[j + kPairs]));
      values[j] = round(double(radius) * double(round(std::cos(angle))));
      values[j + kPairs] = round(double(radius) * double(round(std::sin(angle))));
    }
  }
}

// Uniforms with the low `bits` bits of one word each, then blocks of 16; an incomplete last block
// is replaced, together with the end of the one before it, by 16 new values. `draws_rest`: words
// are drawn for the incomplete block before it is replaced.
template <typename Transform>
void fill_blocks(std::mt19937& engine, std::span<float> out, int bits, bool draws_rest,
                 const Transform& transform) {
  const uint32_t mask = (1u << bits) - 1;
  const float unit = std::ldexp(1.0f, -bits);
  const auto draw = [&](std::span<float> values) {
    for (float& value : values) value = static_cast<float>(engine() & mask) * unit;
  };
  const int64_t blocks = int64_t(out.size()) / kBlock;
  draw(draws_rest ? out : out.first(size_t(blocks * kBlock)));
  transform(out.data(), blocks);
  if (out.size() % kBlock != 0) {
    const std::span<float> tail = out.last(kBlock);
    draw(tail);
    transform(tail.data(), 1);
  }
}

// Philox4x32-10 of Salmon and others (2011).
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, uint64_t seed) {
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {
        static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(product1),
        static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(product0)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// Two normals of two words, sine first.
void box_muller_cuda(uint32_t x, uint32_t y, float& first, float& second) {
  constexpr float kUnit = 0x1p-32f;
  constexpr float kAngleUnit = kUnit * kTwoPi;
  const float u = std::fma(static_cast<float>(x), kUnit, kUnit / 2);
  const float v = std::fma(static_cast<float>(y), kAngleUnit, kAngleUnit / 2);
  const float radius = std::sqrt(-2.0f * std::log(u));
  first = radius * std::sin(v);
  second = radius * std::cos(v);
}

}  // namespace

NormalGenerator::NormalGenerator(RngKind kind, int64_t seed, int64_t cuda_threads)
    : kind_(kind),
      seed_(static_cast<uint64_t>(seed)),
      cuda_threads_(cuda_threads),
      engine_(static_cast<uint32_t>(seed_)) {
  require(cuda_threads > 0 && cuda_threads % 256 == 0, "random numbers: cuda_threads is ",
          cuda_threads, "; it must be a positive multiple of 256");
}

double NormalGenerator::next_uniform_f64() {
  const uint64_t high = engine_();
  const uint64_t word = high << 32 | engine_();
  return static_cast<double>(word & ((uint64_t{1} << 53) - 1)) * 0x1p-53;
}

double NormalGenerator::next_small() {
  if (spare_) {
    const double value = *spare_;
    spare_.reset();
    return value;
  }
  const double u1 = next_uniform_f64();
  const double u2 = next_uniform_f64();
  const double radius = std::sqrt(-2 * std::log1p(-u2));
  const double angle = 2 * std::numbers::pi * u1;
  spare_ = radius * std::sin(angle);
  return radius * std::cos(angle);
}

void NormalGenerator::fill(std::span<float> out, NoiseType stream) {
  require(stream != NoiseType::automatic, "random numbers: the type of a draw must be known");
  if (kind_ == RngKind::cuda)
    fill_cuda(out);
  else
    fill_cpu(out, stream);
  if (stream == NoiseType::fp32) return;
  for (float& value : out) value = rounded_to_bf16(value);
}

void NormalGenerator::fill_cpu(std::span<float> out, NoiseType stream) {
  if (int64_t(out.size()) < kBlock) {
    for (float& value : out) value = static_cast<float>(next_small());
  } else if (stream == NoiseType::bf16_torch_2_11) {
    fill_blocks(engine_, out, 8, true, box_muller_bf16);
  } else {
    fill_blocks(engine_, out, 24, stream == NoiseType::fp32, box_muller_f32);
  }
}

void NormalGenerator::fill_cuda(std::span<float> out) {
  const int64_t n = int64_t(out.size());
  if (n == 0) return;
  const int64_t threads = std::min(cuda_threads_, (n + 255) / 256 * 256);
  const int64_t rounds = (n - 1) / (4 * threads) + 1;
  for (int64_t round = 0; round < rounds; ++round) {
    const uint64_t position = offset_ / 4 + static_cast<uint64_t>(round);
    const int64_t base = round * 4 * threads;
    for (int64_t thread = 0; thread < std::min(threads, n - base); ++thread) {
      const auto words =
          philox({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                  static_cast<uint32_t>(thread), static_cast<uint32_t>(thread >> 32)},
                 seed_);
      std::array<float, 4> normals;
      box_muller_cuda(words[0], words[1], normals[0], normals[1]);
      box_muller_cuda(words[2], words[3], normals[2], normals[3]);
      for (int64_t c = 0; c < 4 && base + c * threads + thread < n; ++c) {
        out[size_t(base + c * threads + thread)] = normals[size_t(c)];
      }
    }
  }
  offset_ += 4 * static_cast<uint64_t>(rounds);
}

}  // namespace orrery
