// Matrices of 8 bits and back: scales from the largest magnitudes, codes, values.
//
// Layout: [M, N] with contiguous rows, any row stride; one f32 scale a block of rows x columns.
// Flops: one division an element. Bytes: x once for the codes, once more where scales are made.
// Floor: bytes over copy bandwidth. Not tuned: a norm or an epilogue that writes 8 bits itself
// saves the pass altogether.
#include <cuda_fp8.h>

#include "cuda/kernels.h"
#include "cuda/kernels/common.cuh"

namespace orrery::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 4;             // of one thread
constexpr int64_t kMaxBlocks = 65535;   // of threads, in each dimension of a grid
constexpr int64_t kChunkItems = 16384;  // elements of one scale that a block of threads looks at

struct Matrix {
  void* data;
  DType dtype;
  int64_t rows, columns, stride;
};

struct Scales {
  float* data;
  int64_t down_stride, across_stride;
  int64_t tall, wide;    // rows and columns of a block
  int64_t down, across;  // how many blocks
  __device__ float* at(int64_t row, int64_t column) const {
    return data + row / tall * down_stride + column / wide * across_stride;
  }
  __device__ float* of(int64_t block) const {
    return data + block / across * down_stride + block % across * across_stride;
  }
};

Matrix matrix_of(const View& view) {
  return {const_cast<void*>(view.data), view.dtype, view.dim(0), view.dim(1),
          view.dim(0) > 1 ? view.stride(0) : view.dim(1)};
}

Scales scales_of(const orrery::Operand& x) {
  return {const_cast<float*>(x.scales.as<float>()),
          x.scales.stride(0),
          x.scales.stride(1),
          x.block.rows == 0 ? x.dim(0) : x.block.rows,
          x.block.columns == 0 ? x.dim(1) : x.block.columns,
          x.scales.dim(0),
          x.scales.dim(1)};
}

__device__ __forceinline__ float value_at(const Matrix& m, int64_t row, int64_t column) {
  const int64_t at = row * m.stride + column;
  switch (m.dtype) {
    case DType::bf16: return to_f32(static_cast<const __nv_bfloat16*>(m.data)[at]);
    case DType::i8: return float(static_cast<const int8_t*>(m.data)[at]);
    case DType::f8e4m3: return float(static_cast<const __nv_fp8_e4m3*>(m.data)[at]);
    default: return static_cast<const float*>(m.data)[at];
  }
}

// Non-negative floats compare as their bits; the largest of a block is collected in its scale.
__global__ void __launch_bounds__(kThreads) collect_amax(Matrix x, Scales scales) {
  for (int64_t block = blockIdx.y; block < scales.down * scales.across; block += gridDim.y) {
    const int64_t row = block / scales.across * scales.tall;
    const int64_t column = block % scales.across * scales.wide;
    const int64_t columns = min(scales.wide, x.columns - column);
    const int64_t count = min(scales.tall, x.rows - row) * columns;
    float largest = 0;
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count;
         i += int64_t(gridDim.x) * kThreads) {
      largest = fmaxf(largest, fabsf(value_at(x, row + i / columns, column + i % columns)));
    }
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, lane));
    if (threadIdx.x % 32 == 0)
      atomicMax(reinterpret_cast<int*>(scales.of(block)), __float_as_int(largest));
  }
}

__global__ void __launch_bounds__(kThreads) finish_scales(Scales scales, float largest_code) {
  const int64_t block = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (block >= scales.down * scales.across) return;
  float* scale = scales.of(block);
  *scale = *scale > 0 ? __fdiv_rn(*scale, largest_code) : 1.0f;
}

__device__ __forceinline__ uint8_t code_of(float value, DType dtype) {
  if (dtype == DType::f8e4m3)
    return uint8_t(__nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3));
  if (isnan(value)) return 0;
  return uint8_t(int8_t(__float2int_rn(fminf(fmaxf(value, -127.0f), 127.0f))));
}

// kQuantises: out = codes of x / scale; else out = x * scale.
template <bool kQuantises>
__global__ void __launch_bounds__(kThreads) scale_elements(Matrix out, Matrix x, Scales scales) {
  const int64_t groups = (x.columns + kColumns - 1) / kColumns;
  const int64_t item = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = item / groups, first = item % groups * kColumns;
  if (row >= x.rows) return;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int64_t column = first + i;
    if (column >= x.columns) return;
    const float value = value_at(x, row, column), scale = *scales.at(row, column);
    const int64_t at = row * out.stride + column;
    if constexpr (kQuantises) {
      static_cast<uint8_t*>(out.data)[at] = code_of(__fdiv_rn(value, scale), out.dtype);
    } else if (out.dtype == DType::bf16) {
      static_cast<__nv_bfloat16*>(out.data)[at] = __float2bfloat16_rn(value * scale);
    } else {
      static_cast<float*>(out.data)[at] = value * scale;
    }
  }
}

unsigned blocks_for(const View& x) {
  return unsigned(ceil_div<int64_t>(x.dim(0) * ceil_div<int64_t>(x.dim(1), kColumns), kThreads));
}

}  // namespace

void quantise(Stream stream, MutOperand out, View x, Scaling scaling) {
  const Scales scales = scales_of(out);
  const Matrix from = matrix_of(x);
  if (scaling == Scaling::amax) {
    const int64_t count = scales.down * scales.across;
    fill(stream, out.scales, 0.0f);
    const int64_t chunks = std::clamp<int64_t>(
        ceil_div<int64_t>(scales.tall * scales.wide, kChunkItems), 1, kMaxBlocks);
    collect_amax<<<dim3(unsigned(chunks), unsigned(std::min(count, kMaxBlocks))), kThreads, 0,
                   stream>>>(from, scales);
    check_launch();
    finish_scales<<<unsigned(ceil_div<int64_t>(count, kThreads)), kThreads, 0, stream>>>(
        scales, largest_of(out.dtype));
    check_launch();
  }
  scale_elements<true><<<blocks_for(x), kThreads, 0, stream>>>(matrix_of(out), from, scales);
  check_launch();
}

void dequantise(Stream stream, MutView out, const orrery::Operand& x) {
  scale_elements<false>
      <<<blocks_for(x), kThreads, 0, stream>>>(matrix_of(out), matrix_of(x), scales_of(x));
  check_launch();
}

}  // namespace orrery::cuda
