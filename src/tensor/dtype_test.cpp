#include "tensor/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace orrery {
namespace {

TEST(DType, SizesAndNames) {
  EXPECT_EQ(size_of(DType::f32), 4);
  EXPECT_EQ(size_of(DType::bf16), 2);
  EXPECT_EQ(size_of(DType::f16), 2);
  EXPECT_EQ(size_of(DType::i32), 4);
  EXPECT_EQ(size_of(DType::i64), 8);
  EXPECT_EQ(size_of(DType::u8), 1);
  EXPECT_EQ(name_of(DType::bf16), "bf16");
  EXPECT_EQ(size_of(DType::f8e4m3), 1);
  EXPECT_EQ(size_of(DType::i8), 1);
  EXPECT_EQ(name_of(DType::f8e4m3), "f8e4m3");
  EXPECT_EQ(name_of(DType::i8), "i8");
}

// All codes by definition; halfway between neighbours goes to the even code, one ulp beside it to
// the nearer.
TEST(F8E4M3, EveryCodeAndTie) {
  for (uint32_t code = 0; code < 0x7f; ++code) {
    const uint32_t exponent = code >> 3, fraction = code & 7;
    const double want =
        exponent == 0 ? fraction * 0x1p-9 : std::ldexp(1 + fraction / 8.0, int(exponent) - 7);
    const float value = to_float(f8e4m3{static_cast<uint8_t>(code)});
    EXPECT_EQ(value, want) << code;
    EXPECT_EQ(to_float(f8e4m3{static_cast<uint8_t>(code | 0x80)}), -want) << code;
    EXPECT_EQ(to_f8e4m3(value).bits, code);
    EXPECT_EQ(to_f8e4m3(-value).bits, code | 0x80);
    if (code == 0x7e) break;
    const float tie = (value + to_float(f8e4m3{static_cast<uint8_t>(code + 1)})) / 2;
    EXPECT_EQ(to_f8e4m3(tie).bits, code + (code & 1)) << code;
    EXPECT_EQ(to_f8e4m3(std::nextafter(tie, 0.0f)).bits, code) << code;
    EXPECT_EQ(to_f8e4m3(std::nextafter(tie, 1e9f)).bits, code + 1) << code;
  }
}

TEST(F8E4M3, SaturatesAndKeepsNaN) {
  for (float large : {449.0f, 464.0f, 1e30f, INFINITY}) {
    EXPECT_EQ(to_f8e4m3(large).bits, 0x7e);
    EXPECT_EQ(to_f8e4m3(-large).bits, 0xfe);
  }
  EXPECT_EQ(to_f8e4m3(-0.0f).bits, 0x80);
  EXPECT_EQ(to_f8e4m3(0x1p-149f).bits, 0);
  EXPECT_TRUE(std::isnan(to_float(to_f8e4m3(NAN))));
  EXPECT_TRUE(std::isnan(to_float(f8e4m3{0x7f})) && std::isnan(to_float(f8e4m3{0xff})));
}

TEST(Bf16, RoundsToNearestEven) {
  EXPECT_EQ(to_bf16(1.0f).bits, 0x3f80);
  EXPECT_EQ(to_bf16(-2.5f).bits, 0xc020);
  EXPECT_EQ(to_bf16(1.0f + 0x1p-8f).bits, 0x3f80);             // half way, down to even
  EXPECT_EQ(to_bf16(1.0f + 0x1p-7f + 0x1p-8f).bits, 0x3f82);   // half way, up to even
  EXPECT_EQ(to_bf16(1.0f + 0x1p-8f + 0x1p-20f).bits, 0x3f81);  // above half way
  EXPECT_EQ(to_bf16(-0.0f).bits, 0x8000);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);  // overflows to infinity
  EXPECT_EQ(to_bf16(INFINITY).bits, 0x7f80);
  EXPECT_EQ(to_bf16(0x1p-149f).bits, 0x0000);
}

TEST(Bf16, NaNStaysNaN) {
  // The payload sits in the bits that are cut off.
  EXPECT_TRUE(std::isnan(to_float(to_bf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(to_float(to_bf16(std::bit_cast<float>(0xffffffffu)))));
}

TEST(Bf16, EveryValueSurvives) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float value = to_float(bf16{static_cast<uint16_t>(bits)});
    if (std::isnan(value)) continue;
    ASSERT_EQ(to_bf16(value).bits, bits);
    ASSERT_EQ(round_to_bf16(value), value);
  }
}

TEST(F16, EveryValueIsExact) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float got = to_float(f16{static_cast<uint16_t>(bits)});
    const int exponent = static_cast<int>((bits >> 10) & 31);
    const int fraction = static_cast<int>(bits & 1023);
    ASSERT_EQ(std::signbit(got), bits >= 0x8000) << bits;
    if (exponent == 31) {
      ASSERT_EQ(std::isnan(got), fraction != 0) << bits;
      ASSERT_EQ(std::isinf(got), fraction == 0) << bits;
      continue;
    }
    const double want =
        exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    ASSERT_EQ(std::fabs(got), want) << bits;
  }
}

}  // namespace
}  // namespace orrery
