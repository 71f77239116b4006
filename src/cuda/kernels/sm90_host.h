// Host-side helpers that the sm90 launchers share.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
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

// ---- Tensor maps ------------------------------------------------------------------------------
// What lies outside of a tensor reads as zeros.

// A tensor as TMA sees it, innermost dimension first.
struct TensorBox {
  const void* base = nullptr;
  int element_bytes = 2;  // bf16, or 1 for any 8-bit type
  std::array<uint64_t, 4> dims{};
  std::array<uint64_t, 3> strides{};  // bytes, of the dimensions after the innermost
  std::array<uint32_t, 4> box{};      // what one load brings: 64 or 128 bytes of the innermost
};

// Swizzled by the width of the box. False if the driver refuses.
bool encode_tensor_map(CUtensorMap* map, const TensorBox& tensor);

// Map over [rows, heads, head_dim] as (column, row, chunk of 128 bytes, head), read in boxes of a
// chunk x `box_rows` rows. Strides are in elements.
bool encode_head_map(CUtensorMap* map, const void* base, int element_bytes, int64_t rows, int heads,
                     int head_dim, int64_t row_stride, int box_rows);

// Map over a matrix [rows, columns], read in boxes of 128 bytes x `box_rows` rows.
bool encode_matrix_map(CUtensorMap* map, const void* base, int element_bytes, int64_t rows,
                       int64_t columns, int64_t row_stride, int box_rows);

}  // namespace orrery::cuda::sm90
