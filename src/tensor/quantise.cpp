#include "tensor/quantise.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace orrery {

namespace {

float read(const View& x, int64_t row, int64_t column) {
  const int64_t at = row * x.stride(0) + column;
  switch (x.dtype) {
    case DType::bf16: return to_float(x.as<bf16>()[at]);
    case DType::f8e4m3: return to_float(x.as<f8e4m3>()[at]);
    case DType::i8: return x.as<int8_t>()[at];
    default: return x.as<float>()[at];
  }
}

int8_t to_i8(float value) {
  if (std::isnan(value)) return 0;
  return static_cast<int8_t>(std::nearbyint(std::clamp(value, -127.0f, 127.0f)));
}

// Calls fn(scale, first row, rows, first column, columns) for every block of an operand.
template <typename Fn>
void each_block(const Operand& x, const Fn& fn) {
  const int64_t rows = x.dim(0), columns = x.dim(1);
  const int64_t tall = x.block.rows == 0 ? rows : x.block.rows;
  const int64_t wide = x.block.columns == 0 ? columns : x.block.columns;
  for (int64_t i = 0; i < x.scales.dim(0); ++i) {
    for (int64_t j = 0; j < x.scales.dim(1); ++j) {
      const auto* scale = x.scales.as<float>() + i * x.scales.stride(0) + j * x.scales.stride(1);
      fn(const_cast<float&>(*scale), i * tall, std::min(tall, rows - i * tall), j * wide,
         std::min(wide, columns - j * wide));
    }
  }
}

}  // namespace

void quantise(MutOperand out, View x, Scaling scaling) {
  const bool is_f8 = out.dtype == DType::f8e4m3;
  each_block(out, [&](float& scale, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    if (scaling == Scaling::amax) {
      float largest = 0;
      for (int64_t r = row; r < row + rows; ++r) {
        for (int64_t c = column; c < column + columns; ++c)
          largest = std::fmax(largest, std::fabs(read(x, r, c)));
      }
      scale = largest > 0 ? largest / largest_of(out.dtype) : 1.0f;
    }
    for (int64_t r = row; r < row + rows; ++r) {
      for (int64_t c = column; c < column + columns; ++c) {
        const float value = read(x, r, c) / scale;
        const int64_t at = r * out.stride(0) + c;
        if (is_f8)
          out.as<f8e4m3>()[at] = to_f8e4m3(value);
        else
          out.as<int8_t>()[at] = to_i8(value);
      }
    }
  });
}

void dequantise(MutView out, const Operand& x) {
  each_block(x, [&](float scale, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    for (int64_t r = row; r < row + rows; ++r) {
      for (int64_t c = column; c < column + columns; ++c) {
        const float value = read(x, r, c) * scale;
        const int64_t at = r * out.stride(0) + c;
        if (out.dtype == DType::bf16)
          out.as<bf16>()[at] = to_bf16(value);
        else
          out.as<float>()[at] = value;
      }
    }
  });
}

}  // namespace orrery
