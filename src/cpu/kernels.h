// The inner loops of the CPU backend: contiguous f32 rows in, contiguous f32 rows out. One table of
// them exists per instruction set; kernels_body.h is the one source all tables are compiled from.
// Every function's result for an element depends on that element's operands alone, never on how
// rows or columns were cut into calls, so threads may share work in any way without changing a bit.
#pragma once

#include <cstdint>
#include <string_view>

namespace orrery::cpu {

inline constexpr int kMaxVectors = 3;  // widest register tile, in vectors

// What follows a product: c = act(c + bias) + residual.
enum class Act : uint8_t { none, silu, relu2 };

// Stored types the loops convert from and to.
enum class Stored : uint8_t { f32, bf16, f16, f8e4m3, i8 };

// c [rows, width] (+)= sum over k < depth of a[row][begin + k] * b[k][0 .. width). `rows` and
// `width` belong to the entry; a has `rows` pointers; b is packed.
using Tile = void (*)(float* c, int64_t ldc, const float* const* a, int64_t begin, const float* b,
                      int64_t depth, bool accumulate);

struct Kernels {
  std::string_view name;
  int64_t lanes;                  // floats of a vector
  int64_t rows[kMaxVectors + 1];  // rows of tile[v]
  Tile tile[kMaxVectors + 1];     // tile[v] is v vectors wide; entry 0 is unused

  void (*to_f32)(float* out, const void* x, Stored type, int64_t n);  // x may be unaligned
  void (*to_bf16)(void* out, const float* x, int64_t n);              // to nearest, ties to even
  // out[k * width + r] = x[r * ldx + k], r < rows (a multiple of 4), k < n.
  void (*transpose)(float* out, int64_t width, const float* x, int64_t ldx, int64_t rows,
                    int64_t n);

  // out = act(x + bias) + residual; bias and residual may be null; out may be x.
  void (*epilogue)(float* out, const float* x, const float* bias, const float* residual, Act act,
                   int64_t n);
  void (*silu_gate)(float* out, const float* gate, const float* up, int64_t n);
  void (*scale)(float* out, const float* x, float factor, int64_t n);
  void (*add_scaled)(float* out, const float* x, float factor, int64_t n);  // out += factor x
  void (*scale_weighted)(float* out, const float* x, float factor, const float* weight, int64_t n);
  // Rows of n, `pitch`es apart: y = x * f * weight, then SiLU if wanted, with f = 1 / sqrt(mean of
  // squares
  // + eps), or 1 / max(length, 1e-12) when mean is false. out may be x.
  void (*norm_rows)(float* out, int64_t out_pitch, const float* x, int64_t x_pitch, int64_t rows,
                    int64_t n, const float* weight, bool mean, float eps, bool silu);
  float (*dot)(const float* x, const float* y, int64_t n);
  // y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin; y may be x.
  void (*rotate)(float* y1, float* y2, const float* x1, const float* x2, const float* cos,
                 const float* sin, int64_t n);
  // out = x + sin^2(a x) b, |a x| up to kSnakeLimit.
  void (*snake)(float* out, const float* x, const float* a, const float* b, int64_t n);

  float (*max)(const float* x, int64_t n);  // -inf when n is 0; skips NaN
  // x = exp(factor x - shift) in place, and their sum.
  float (*exp_sum)(float* x, float factor, float shift, int64_t n);
};

inline constexpr float kSnakeLimit = 4096;

const Kernels& generic_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();

// True when this CPU runs the table.
bool runs(const Kernels& kernels);
// The table of that name, or the best this CPU runs when the name is empty. Refuses others.
const Kernels& choose_kernels(std::string_view name);

}  // namespace orrery::cpu
