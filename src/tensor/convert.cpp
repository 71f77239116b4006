#include "tensor/convert.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace orrery {

namespace {

template <typename T>
T element(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

float value_of(const std::byte* at, DType dtype) {
  switch (dtype) {
    case DType::f32: return element<float>(at);
    case DType::bf16: return to_float(element<bf16>(at));
    case DType::f8e4m3: return to_float(element<f8e4m3>(at));
    case DType::i8: return element<int8_t>(at);
    default: return to_float(element<f16>(at));
  }
}

void convert_row(MutView out, int64_t first, const std::byte* from, DType dtype, int64_t width) {
  const int64_t step = size_of(dtype);
  if (dtype == out.dtype) {
    std::memcpy(out.as<std::byte>() + first * step, from, static_cast<size_t>(width * step));
    return;
  }
  for (int64_t c = 0; c < width; ++c) {
    const float value = value_of(from + c * step, dtype);
    if (out.dtype == DType::f32)
      out.as<float>()[first + c] = value;
    else
      out.as<bf16>()[first + c] = to_bf16(value);
  }
}

}  // namespace

void convert(MutView out, View x) {
  const bool from_float = x.dtype == DType::f32 || x.dtype == DType::bf16 ||
                          x.dtype == DType::f16 || is_narrow(x.dtype);
  const bool to_float = out.dtype == DType::f32 || out.dtype == DType::bf16;
  require(x.dtype == out.dtype || (from_float && to_float), "convert: ", name_of(x.dtype),
          " does not become ", name_of(out.dtype));
  require(out.shape == x.shape && out.contiguous() && (x.contiguous() || x.rank() == 2),
          "convert: ", x.shape, " into ", out.shape, " needs equal shapes and contiguous rows");
  const int64_t rows = x.contiguous() ? 1 : x.dim(0);
  const int64_t width = x.numel() / std::max<int64_t>(rows, 1);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t start = x.contiguous() ? 0 : r * x.stride(0);
    convert_row(out, r * width, static_cast<const std::byte*>(x.data) + start * size_of(x.dtype),
                x.dtype, width);
  }
}

}  // namespace orrery
