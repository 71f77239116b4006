#include "cpu/packed.h"

namespace orrery::cpu {

Panels::Panels(const Kernels& kernels, int64_t n)
    : n_(n), lanes_(kernels.lanes), step_(2 * kernels.lanes) {
  // A remainder of at most one vector widens the last full panel instead of half-filling its own.
  const int64_t full = n / step_, rest = n % step_;
  if (rest == 0) {
    count_ = full;
    last_ = 2;
  } else if (rest <= lanes_ && full > 0) {
    count_ = full;
    last_ = 3;
  } else {
    count_ = full + 1;
    last_ = rest <= lanes_ ? 1 : 2;
  }
}

void pack_columns(const Kernels& kernels, float* dst, int64_t width, const void* src, DType dtype,
                  int64_t element, int64_t row_stride, int64_t rows, int64_t k) {
  constexpr int64_t kPiece = 64;
  constexpr int64_t kMaxWidth = 48;
  alignas(64) float block[kMaxWidth * kPiece];
  // Columns of padding are zero rows of the block.
  std::fill(block + rows * kPiece, block + width * kPiece, 0.0f);
  for (int64_t k0 = 0; k0 < k; k0 += kPiece) {
    const int64_t n = std::min(kPiece, k - k0);
    for (int64_t r = 0; r < rows; ++r) {
      kernels.to_f32(block + r * kPiece, at(src, element + r * row_stride + k0, dtype),
                     stored(dtype), n);
    }
    kernels.transpose(dst + k0 * width, width, block, kPiece, width, n);
  }
}

void multiply(const Kernels& kernels, float* c, int64_t ldc, const float* const* rows,
              int64_t num_rows, const float* packed, int64_t packed_depth, const Panels& panels,
              int64_t first, int64_t last, int64_t begin, int64_t depth, bool accumulate) {
  for (int64_t slice = 0; slice < depth; slice += kDepthSlice) {
    const int64_t size = std::min(kDepthSlice, depth - slice);
    for (int64_t panel = first; panel < last; ++panel) {
      const int64_t vectors = panels.vectors(panel), height = kernels.rows[vectors];
      const float* b =
          packed + panels.offset(panel, packed_depth) + (begin + slice) * panels.width(panel);
      float* column = c + panels.begin(panel) - panels.begin(first);
      for (int64_t r = 0; r < num_rows; r += height) {
        kernels.tile[vectors](column + r * ldc, ldc, rows + r, slice, b, size, accumulate);
      }
    }
    accumulate = true;
  }
}

}  // namespace orrery::cpu
