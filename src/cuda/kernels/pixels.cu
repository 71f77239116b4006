// What ends a decode: values to bytes, their bounds, and whether all are finite. Contiguous
// tensors, an element a thread and step.
//
// Flops: a few per element. Bytes: clamp 8 per element, to_bytes 5, find_non_finite 2 or 4. Floor:
// bytes over copy bandwidth; a 720p frame of 2.8 million values takes a few microseconds of it,
// beside about 20 ms of convolutions.
#include "cuda/kernels.h"
#include "cuda/kernels/common.cuh"

namespace orrery::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;  // several for each multiprocessor; the loops do the rest

unsigned blocks_for(int64_t count) {
  return unsigned(std::min(kMaxBlocks, ceil_div<int64_t>(count, kThreads)));
}

__device__ int64_t first_element() { return int64_t(blockIdx.x) * kThreads + threadIdx.x; }
__device__ int64_t element_step() { return int64_t(gridDim.x) * kThreads; }

__global__ void __launch_bounds__(kThreads)
    clamp_kernel(float* x, int64_t count, float low, float high) {
  for (int64_t i = first_element(); i < count; i += element_step()) {
    // NaN compares false with both.
    const float value = x[i];
    x[i] = value < low ? low : value > high ? high : value;
  }
}

__global__ void __launch_bounds__(kThreads)
    to_bytes_kernel(uint8_t* out, const float* x, int64_t count) {
  for (int64_t i = first_element(); i < count; i += element_step()) {
    // Two roundings, as on the host; fmaxf of NaN and 0 is 0.
    const float unit = fminf(fmaxf(__fadd_rn(__fmul_rn(x[i], 0.5f), 0.5f), 0.0f), 1.0f);
    out[i] = uint8_t(rintf(unit * 255.0f));
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    find_non_finite_kernel(int32_t* found, const T* x, int64_t count) {
  bool here = false;
  for (int64_t i = first_element(); i < count; i += element_step()) here |= !isfinite(to_f32(x[i]));
  if (here) *found = 1;
}

}  // namespace

void clamp(Stream stream, MutView x, float low, float high) {
  clamp_kernel<<<blocks_for(x.numel()), kThreads, 0, stream>>>(x.as<float>(), x.numel(), low, high);
  check_launch();
}

void to_bytes(Stream stream, MutView out, View x) {
  to_bytes_kernel<<<blocks_for(x.numel()), kThreads, 0, stream>>>(out.as<uint8_t>(), x.as<float>(),
                                                                  x.numel());
  check_launch();
}

void find_non_finite(Stream stream, int32_t* found, View x) {
  with_type(x.dtype, [&](auto type) {
    using T = decltype(type);
    find_non_finite_kernel<T><<<blocks_for(x.numel()), kThreads, 0, stream>>>(
        found, static_cast<const T*>(x.data), x.numel());
  });
  check_launch();
}

}  // namespace orrery::cuda
