// Host-side helpers that the sm90 launchers share.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace orrery::cuda::sm90 {

constexpr int kMaxSharedBytes = 232448;  // of one CTA on sm_90
constexpr int64_t kMaxRows = int64_t{1} << 30;

// Why the current device cannot run code for sm_90a, or nullptr.
inline const char* device_reason() {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return "there is no CUDA device";
  }
  return major == 9 && minor == 0 ? nullptr : "the kernels need compute capability 9.0";
}

// Of the current device.
inline int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// What TMA and 16-byte accesses ask of a tensor of bf16 rows.
inline bool aligned_rows(const void* base, int64_t stride) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && stride > 0 && stride % 8 == 0 &&
         stride < (int64_t{1} << 39);
}

// Remembers for which devices a kernel has been prepared.
class PerDevice {
 public:
  const char* allow_shared_memory(const void* kernel, int bytes) {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return "there is no CUDA device";
    const uint64_t bit = uint64_t{1} << (device % 64);
    if ((prepared_.load(std::memory_order_relaxed) & bit) != 0) return nullptr;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) !=
        cudaSuccess) {
      cudaGetLastError();
      return "the kernel could not be loaded with the shared memory of sm_90";
    }
    prepared_.fetch_or(bit, std::memory_order_relaxed);
    return nullptr;
  }

 private:
  std::atomic<uint64_t> prepared_{0};
};

// Map over a bf16 tensor, innermost dimension first, strides in bytes of the others, read in boxes
// of 64 innermost elements with the 128-byte swizzle. What lies outside reads as zeros.
bool encode_bf16_map(CUtensorMap* map, const void* base, const std::array<uint64_t, 4>& dims,
                     const std::array<uint64_t, 3>& strides, const std::array<uint32_t, 4>& box);

// Map over bf16 [rows, heads, head_dim] as (column, row, 64-column chunk, head), read in boxes of
// 64 columns x `box_rows` rows with the 128-byte swizzle. Rows past the end read as zeros.
bool encode_tensor_map(CUtensorMap* map, const void* base, int64_t rows, int heads, int head_dim,
                       int64_t row_stride, int box_rows);

}  // namespace orrery::cuda::sm90
