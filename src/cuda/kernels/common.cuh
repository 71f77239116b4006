// Shared by the kernels: typed loads and stores of f32, bf16 and f16, warp and block sums, division
// by a constant, strided index spaces, launch checks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <source_location>
#include <type_traits>

#include "base/error.h"
#include "cuda/context.h"
#include "tensor/view.h"

namespace orrery::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

template <typename T>
constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

inline void check_launch(const std::source_location& where = std::source_location::current()) {
  check(cudaGetLastError(), where);
}

// ---- values ------------------------------------------------------------------------------------

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_f32(__half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T from_f32(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return __float2bfloat16_rn(x);
}

// The rounding that a value of type T suffers between two steps of an operation.
template <typename T>
__device__ __forceinline__ float rounded(float x) {
  return to_f32(from_f32<T>(x));
}

// kFast: to about 1e-6, for results that are rounded to bf16 anyway.
template <bool kFast>
__device__ __forceinline__ float silu(float x) {
  if constexpr (kFast)
    return __fdividef(x, 1.0f + __expf(-x));
  else
    return x / (1.0f + expf(-x));
}

// V neighbouring elements as f32. 16-byte accesses where V elements fill them; the address must be
// aligned to min(16, V elements).
template <int V, typename T>
__device__ __forceinline__ void load(float (&to)[V], const T* from) {
  constexpr int kBytes = V * int(sizeof(T));
  if constexpr (kBytes >= 4) {
    constexpr int kUnit = kBytes < 16 ? kBytes : 16;
    using Unit =
        std::conditional_t<kUnit == 4, uint32_t, std::conditional_t<kUnit == 8, uint2, uint4>>;
    alignas(16) T values[V];
#pragma unroll
    for (int i = 0; i < kBytes / kUnit; ++i) {
      reinterpret_cast<Unit*>(values)[i] = reinterpret_cast<const Unit*>(from)[i];
    }
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = to_f32(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = to_f32(from[i]);
  }
}

template <int V, typename T>
__device__ __forceinline__ void store(T* to, const float (&from)[V]) {
  constexpr int kBytes = V * int(sizeof(T));
  if constexpr (kBytes >= 4) {
    constexpr int kUnit = kBytes < 16 ? kBytes : 16;
    using Unit =
        std::conditional_t<kUnit == 4, uint32_t, std::conditional_t<kUnit == 8, uint2, uint4>>;
    alignas(16) T values[V];
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = from_f32<T>(from[i]);
#pragma unroll
    for (int i = 0; i < kBytes / kUnit; ++i) {
      reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(values)[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = from_f32<T>(from[i]);
  }
}

// The same with the type known at run time only: one branch that the whole warp takes alike.
template <int V>
__device__ __forceinline__ void load(float (&to)[V], const void* base, DType dtype,
                                     int64_t offset) {
  if (dtype == DType::bf16)
    load<V>(to, static_cast<const __nv_bfloat16*>(base) + offset);
  else if (dtype == DType::f32)
    load<V>(to, static_cast<const float*>(base) + offset);
  else
    load<V>(to, static_cast<const __half*>(base) + offset);
}

template <int V>
__device__ __forceinline__ void store(void* base, DType dtype, int64_t offset,
                                      const float (&from)[V]) {
  if (dtype == DType::bf16)
    store<V>(static_cast<__nv_bfloat16*>(base) + offset, from);
  else
    store<V>(static_cast<float*>(base) + offset, from);
}

__device__ __forceinline__ float load_one(const void* base, DType dtype, int64_t offset) {
  float value[1];
  load<1>(value, base, dtype, offset);
  return value[0];
}

__device__ __forceinline__ void store_one(void* base, DType dtype, int64_t offset, float value) {
  const float values[1] = {value};
  store<1>(base, dtype, offset, values);
}

// Calls fn with a value of the C++ type of an f32 or bf16 tensor.
template <typename Fn>
void with_type(DType dtype, const Fn& fn) {
  if (dtype == DType::bf16)
    fn(__nv_bfloat16{});
  else
    fn(float{});
}

// ---- reductions --------------------------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kAllLanes, x, lanes);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, lanes));
  return x;
}

// Over a block of kThreads threads; every thread gets the result. `shared` holds 32 floats and may
// be used again at once.
template <int kThreads, typename Reduce>
__device__ __forceinline__ float block_reduce(float x, float* shared, float neutral,
                                              const Reduce& reduce) {
  x = reduce(x);
  if constexpr (kThreads > 32) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    x = reduce(lane < kThreads / 32 ? shared[lane] : neutral);
  }
  return x;
}

template <int kThreads>
__device__ __forceinline__ float block_sum(float x, float* shared) {
  return block_reduce<kThreads>(x, shared, 0.0f, [](float v) { return warp_sum(v); });
}

template <int kThreads>
__device__ __forceinline__ float block_max(float x, float* shared) {
  return block_reduce<kThreads>(x, shared, -INFINITY, [](float v) { return warp_max(v); });
}

// ---- index spaces ------------------------------------------------------------------------------

// Division of 0 <= n < 2^31 by a constant: one multiplication and a shift.
struct Divisor {
  uint32_t value = 1, multiplier = 1, shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t d) : value(d) {
    while (shift < 32 && (uint64_t{1} << shift) < d) ++shift;
    multiplier = uint32_t(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d + 1);
  }
  __device__ __forceinline__ uint32_t divide(uint32_t n) const {
    return (__umulhi(n, multiplier) + n) >> shift;
  }
};

// Up to kMaxRank loops over N tensors at once, innermost last.
template <int N>
struct Loops {
  int rank = 0;
  int64_t size[kMaxRank] = {};
  int64_t stride[N][kMaxRank] = {};

  int64_t numel() const {
    int64_t count = 1;
    for (int d = 0; d < rank; ++d) count *= size[d];
    return count;
  }
};

// The loops over elements of equally shaped views, ordered so that the first view's strides fall,
// dimensions of size 1 dropped and mergeable ones merged. Element order is free here.
template <int N>
Loops<N> make_loops(const View* const (&views)[N], int used) {
  const Shape& shape = views[0]->shape;
  int order[kMaxRank], rank = 0;
  for (int d = 0; d < shape.rank(); ++d) {
    if (shape[d] != 1) order[rank++] = d;
  }
  std::stable_sort(order, order + rank,
                   [&](int a, int b) { return views[0]->strides[a] > views[0]->strides[b]; });
  Loops<N> loops;
  for (int i = 0; i < rank; ++i) {
    const int d = order[i];
    bool merges = loops.rank > 0;
    for (int n = 0; n < used && merges; ++n) {
      merges = loops.stride[n][loops.rank - 1] == views[n]->strides[d] * shape[d];
    }
    const int to = merges ? loops.rank - 1 : loops.rank++;
    loops.size[to] = merges ? loops.size[to] * shape[d] : shape[d];
    for (int n = 0; n < used; ++n) loops.stride[n][to] = views[n]->strides[d];
  }
  if (loops.rank == 0) {
    loops.rank = 1;
    loops.size[0] = 1;
  }
  return loops;
}

// Largest power of two, at most `limit`, that divides every given number (0 divides evenly).
inline int common_width(int limit, std::initializer_list<int64_t> numbers) {
  int width = limit;
  for (int64_t number : numbers) {
    while (number % width != 0) width /= 2;
  }
  return width;
}

inline int64_t address_in_elements(const View& view) {
  const auto address = int64_t(reinterpret_cast<uintptr_t>(view.data));
  return address % size_of(view.dtype) == 0 ? address / size_of(view.dtype) : 1;
}

// What a kernel needs of a strided row tensor: [rows..., width] with contiguous rows.
struct Operand {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t stride = 0;  // elements from row to row
};

inline Operand rows_of(const View& view) {
  if (!view) return {};
  return {view.data, view.dtype, view.rank() > 1 && view.dim(0) > 1 ? view.stride(0) : 0};
}

}  // namespace orrery::cuda
