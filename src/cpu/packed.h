// Matrix products from packed panels and row pointers: what attention and its block selection are
// made of. Linear and convolution are oneDNN's.
//
// The second operand is packed in panels of two vectors of columns (the last one, two or three),
// each [depth, width] contiguous; the first is given by a pointer per row. One element of the
// result is one chain of multiply-adds per slice of the depth, whatever panel, tile or thread
// computes it.
#pragma once

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

// c [rows up to kRowStep, panels of [first, last)] (+)= rows x packed[begin .. begin + depth);
// column 0 of c is the first column of panel `first`. `rows` holds pointers up to the next multiple
// of kRowStep.
void multiply(const Kernels& kernels, float* c, int64_t ldc, const float* const* rows,
              int64_t num_rows, const float* packed, int64_t packed_depth, const Panels& panels,
              int64_t first, int64_t last, int64_t begin, int64_t depth, bool accumulate);

}  // namespace orrery::cpu
