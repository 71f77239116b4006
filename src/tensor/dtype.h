// Element types and the conversions of bf16, f16 and e4m3 that every layer shares.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace orrery {

// f8e4m3: 1 sign, 4 exponent and 3 fraction bits, no infinities, up to 448 ("e4m3fn").
enum class DType : uint8_t { f32, bf16, f16, i32, i64, u8, i8, f8e4m3 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32: return 4;
    case DType::bf16:
    case DType::f16: return 2;
    case DType::i64: return 8;
    case DType::u8:
    case DType::i8:
    case DType::f8e4m3: return 1;
  }
  return 0;
}

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
    case DType::u8: return "u8";
    case DType::i8: return "i8";
    case DType::f8e4m3: return "f8e4m3";
  }
  return "?";
}

struct bf16 {
  uint16_t bits;
};

// Round to nearest, ties to even; NaN stays NaN.
inline bf16 to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

inline float to_float(bf16 value) { return std::bit_cast<float>(uint32_t{value.bits} << 16); }

// IEEE half precision. A type of our own: not every supported compiler has _Float16.
struct f16 {
  uint16_t bits;
};

inline float to_float(f16 value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const uint32_t fraction = value.bits & 0x3ffu;
  const uint32_t normal = ((exponent == 0x1fu ? 0xffu : exponent + 112u) << 23) | (fraction << 13);
  const uint32_t tiny = std::bit_cast<uint32_t>(static_cast<float>(fraction) * 0x1p-24f);
  return std::bit_cast<float>(sign | (exponent == 0 ? tiny : normal));
}
inline float round_to_bf16(float value) { return to_float(to_bf16(value)); }

struct f8e4m3 {
  uint8_t bits;
};
inline constexpr float kMaxF8E4M3 = 448;

// Round to nearest, ties to even; what is beyond 448 becomes 448, infinities too; NaN stays NaN.
inline f8e4m3 to_f8e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  const auto code = [&](uint32_t of) { return f8e4m3{static_cast<uint8_t>(sign | of)}; };
  if (magnitude > 0x7f800000u) return code(0x7f);
  if (magnitude >= std::bit_cast<uint32_t>(kMaxF8E4M3)) return code(0x7e);
  // Below 2^-6 a code counts steps of 2^-9; adding 2^23 rounds their number.
  if (magnitude < std::bit_cast<uint32_t>(0x1p-6f))
    return code(std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p9f + 0x1p23f) & 0xfu);
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return code((rounded >> 20) - (120u << 3));  // exponents differ by 127 - 7
}

inline float to_float(f8e4m3 value) {
  const uint32_t sign = uint32_t{value.bits & 0x80u} << 24, magnitude = value.bits & 0x7fu;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000u);
  const float positive = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f
                                       : std::bit_cast<float>((magnitude + (120u << 3)) << 20);
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(positive));
}

// The largest value that a type of few bits holds.
constexpr float largest_of(DType dtype) { return dtype == DType::i8 ? 127.0f : kMaxF8E4M3; }
constexpr bool is_narrow(DType dtype) { return dtype == DType::i8 || dtype == DType::f8e4m3; }

}  // namespace orrery
