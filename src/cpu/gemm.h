// Matrix products from packed panels and row pointers: what linear, convolution and attention
// share.
//
// The second operand is packed in panels of two vectors of columns (the last one, two or three),
// each [depth, width] contiguous; the first is given by a pointer per row plus offsets ("taps"), so
// that the rows of a convolution need no copy. One element of the result is one chain of
// multiply-adds per depth slice, whatever panel, tile or thread computes it.
#pragma once

#include <vector>

#include "cpu/context.h"
#include "tensor/view.h"

namespace orrery::cpu {

// How n columns are cut into panels.
class Panels {
 public:
  Panels(const Kernels& kernels, int64_t n);
  int64_t count() const { return count_; }
  int64_t padded() const {  // columns with padding
    return count_ == 0 ? 0 : begin(count_ - 1) + width(count_ - 1);
  }
  int64_t begin(int64_t panel) const { return panel * step_; }
  int64_t width(int64_t panel) const { return vectors(panel) * lanes_; }
  int64_t vectors(int64_t panel) const { return panel + 1 == count_ ? last_ : 2; }
  // Columns of the panel that are not padding.
  int64_t columns(int64_t panel) const { return std::min(width(panel), n_ - begin(panel)); }
  // Where a panel starts in a packed operand of that depth.
  int64_t offset(int64_t panel, int64_t depth) const { return begin(panel) * depth; }

 private:
  int64_t n_, lanes_, step_, count_, last_;
};

// Depth of one slice: a panel's slice stays in the first-level cache while the rows pass by.
inline constexpr int64_t kDepthSlice = 256;
// Row pointers come in multiples of this: every tile height divides it.
inline constexpr int64_t kRowStep = 24;

// dst [k, width] from the first `rows` of src [rows, k] (stored type, stride 1 along k): columns
// past `rows` become 0.
void pack_columns(const Kernels& kernels, float* dst, int64_t width, const void* src, DType dtype,
                  int64_t element, int64_t row_stride, int64_t rows, int64_t k);

// Stretch of the depth: taps in front of the row pointers, `depth` floats after each.
struct DepthSlice {
  const int64_t* taps;
  int64_t num_taps;
  int64_t depth;
  int64_t begin;  // position in the packed depth
};

// The slices of rows that are contiguous over their whole depth; `taps` backs them.
void cut_depth(std::vector<int64_t>& taps, std::vector<DepthSlice>& slices, int64_t depth);

// c [rows up to kRowStep, panels of [first, last)] (+)= rows x packed over the slices; column 0 of
// c is the first column of panel `first`. `rows` holds pointers up to the next multiple of
// kRowStep.
void multiply(const Kernels& kernels, float* c, int64_t ldc, const float* const* rows,
              int64_t num_rows, const float* packed, int64_t packed_depth, const Panels& panels,
              int64_t first, int64_t last, std::span<const DepthSlice> slices, bool accumulate);

// Columns [first, first + n) of a row of results: bias, activation, residual, one rounding.
struct Finish {
  const float* bias = nullptr;  // f32, all columns
  Act act = Act::none;
  void row(const Kernels& kernels, const MutView& out, int64_t out_element, const View& residual,
           int64_t residual_element, const float* c, int64_t first, int64_t n) const;
};

}  // namespace orrery::cpu
