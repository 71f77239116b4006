#include "cpu/context.h"

namespace orrery::cpu {

float* Scratch::need(int64_t floats) {
  const auto bytes = static_cast<size_t>(floats) * sizeof(float);
  if (bytes > buffer_.bytes()) {
    buffer_.reset();
    buffer_ = allocate_host(bytes);
  }
  base_ = static_cast<float*>(buffer_.data());
  return base_;
}

void Scratch::need_each(int threads, int64_t floats) {
  // Whole cache lines, and an odd number of them: blocks must not fall on the same cache sets.
  each_ = ((floats + 15) / 16 | 1) * 16;
  need(each_ * threads);
}

Stored stored(DType dtype) {
  switch (dtype) {
    case DType::bf16: return Stored::bf16;
    case DType::f16: return Stored::f16;
    case DType::f8e4m3: return Stored::f8e4m3;
    case DType::i8: return Stored::i8;
    default: return Stored::f32;
  }
}

const float* read_row(const Kernels& kernels, float* buffer, const void* data, DType dtype,
                      int64_t element, int64_t n, int64_t stride) {
  const std::byte* source = at(data, element, dtype);
  if (stride == 1) {
    if (dtype == DType::f32 && reinterpret_cast<uintptr_t>(source) % alignof(float) == 0) {
      return reinterpret_cast<const float*>(source);
    }
    kernels.to_f32(buffer, source, stored(dtype), n);
    return buffer;
  }
  const int64_t step = stride * size_of(dtype);
  if (dtype == DType::f32) {
    for (int64_t i = 0; i < n; ++i) std::memcpy(buffer + i, source + i * step, sizeof(float));
    return buffer;
  }
  alignas(64) uint16_t packed[kChunk];
  for (int64_t done = 0; done < n; done += kChunk) {
    const int64_t count = std::min(kChunk, n - done);
    for (int64_t i = 0; i < count; ++i) std::memcpy(packed + i, source + (done + i) * step, 2);
    kernels.to_f32(buffer + done, packed, stored(dtype), count);
  }
  return buffer;
}

void finish_row(const Kernels& kernels, const float* row, void* data, DType dtype, int64_t element,
                int64_t n, int64_t stride) {
  std::byte* target = at(data, element, dtype);
  if (stride == 1) {
    if (dtype == DType::bf16) {
      kernels.to_bf16(target, row, n);
    } else if (static_cast<const void*>(row) != target) {
      std::memcpy(target, row, static_cast<size_t>(n) * sizeof(float));
    }
    return;
  }
  const int64_t step = stride * size_of(dtype);
  if (dtype == DType::f32) {
    for (int64_t i = 0; i < n; ++i) std::memcpy(target + i * step, row + i, sizeof(float));
    return;
  }
  alignas(64) uint16_t packed[kChunk];
  for (int64_t done = 0; done < n; done += kChunk) {
    const int64_t count = std::min(kChunk, n - done);
    kernels.to_bf16(packed, row + done, count);
    for (int64_t i = 0; i < count; ++i) std::memcpy(target + (done + i) * step, packed + i, 2);
  }
}

}  // namespace orrery::cpu
