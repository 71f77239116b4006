// Element types and the bf16 / f16 conversions every layer shares.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace orrery {

enum class DType : uint8_t { f32, bf16, f16, i32, i64, u8 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32: return 4;
    case DType::bf16:
    case DType::f16: return 2;
    case DType::i64: return 8;
    case DType::u8: return 1;
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

}  // namespace orrery
