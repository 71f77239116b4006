// RMS norms of rows, and the fused per-head norm + rotary embedding of queries and keys.
//
// Measured on an H200 (bench/device_ops norm): 44160 x 4096 0.183 ms, floor 0.170; 4 x 360 x 640 x
// 512 with SiLU 0.492 ms, floor 0.442, x 256 0.281 ms, floor 0.221; queries of 44160 x 32 x 128
// 0.203 ms, floor 0.176.
//
// rms_norm: x, out [..., C], rows contiguous, any outer strides (out may be x); weight [C]. 4 flops
// and 2 element accesses per element; floor = bytes over copy bandwidth. 32 threads a row up to C =
// 1024, 256 above; a row of up to 4 vectors a thread stays in registers between the two passes.
//
// qk_norm_rope: x, out [S, H, D], any row and head strides; cos, sin f32 [S, D / 2]. One warp per
// row, or per (row, head) for odd sizes; a lane owns pairs (i, i + D / 2), so the rotation needs no
// exchange. About 10 flops per element; bytes: x and out once, cos and sin once from memory (heads
// of a row share them in cache). Writing at any row stride lets the output be the tail of a larger
// key buffer: no concatenation.
#include "cuda/kernels.h"
#include "cuda/kernels/common.cuh"

namespace orrery::cuda {

namespace {

struct OuterRows {
  int rank = 0;
  int64_t rows = 1;
  int64_t size[kMaxRank] = {};
  int64_t out_stride[kMaxRank] = {};
  int64_t x_stride[kMaxRank] = {};
};

// The row index space without the last dimension, merged.
OuterRows outer_rows(const View& out, const View& x) {
  OuterRows outer;
  for (int d = 0; d + 1 < out.rank(); ++d) {
    outer.rows *= out.dim(d);
    if (out.dim(d) == 1) continue;
    const int last = outer.rank - 1;
    const bool merges = last >= 0 && outer.out_stride[last] == out.stride(d) * out.dim(d) &&
                        outer.x_stride[last] == x.stride(d) * x.dim(d);
    const int to = merges ? last : outer.rank++;
    outer.size[to] = merges ? outer.size[to] * out.dim(d) : out.dim(d);
    outer.out_stride[to] = out.stride(d);
    outer.x_stride[to] = x.stride(d);
  }
  return outer;
}

// x (of a row with the given scale) normalised and weighted in place, rounded inside as the kind
// says.
template <typename T, int V>
__device__ __forceinline__ void normalise(float (&x)[V], const float (&w)[V], float scale,
                                          float root, NormKind kind) {
  if (kind == NormKind::qwen) {
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] = rounded<T>(x[i] * scale) * w[i];
  } else if (kind == NormKind::nemotron) {
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] = w[i] * (x[i] * scale);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] = rounded<T>(x[i] * scale) * root * w[i];
  }
}

__device__ __forceinline__ float row_scale(float square_sum, int64_t width, const Norm& norm) {
  if (norm.kind == NormKind::channel) return 1.0f / fmaxf(sqrtf(square_sum), 1e-12f);
  return rsqrtf(square_sum / float(width) + norm.eps);
}

// kRowThreads threads own kRows rows, one after the other; kVectors vectors of V elements of each
// stay in registers (0: read again, one row). Narrow rows go several at a time: more bytes are on
// their way, and blocks live longer than it takes to start them.
template <typename To, typename T, int kRowThreads, int V, int kVectors, int kRows>
__global__ void __launch_bounds__(256)
    rms_norm_kernel(To* out, const T* x, const void* weight, DType weight_dtype, int64_t width,
                    OuterRows outer, Norm norm) {
  static_assert(kRows == 1 || (kVectors > 0 && kRowThreads == 32));
  constexpr int kGroups = 256 / kRowThreads;
  __shared__ float shared[32];
  const int64_t begin = (int64_t(blockIdx.x) * kGroups + threadIdx.x / kRowThreads) * kRows;
  if (begin >= outer.rows) return;  // whole warps leave; rows of 256 threads fill their blocks
  const T* from[kRows];
  To* to[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // Past the end the last row again: the same values to the same place.
    int64_t rest = min(begin + r, outer.rows - 1);
    from[r] = x;
    to[r] = out;
    for (int d = outer.rank - 1; d >= 0; --d) {
      const int64_t next = d ? rest / outer.size[d] : 0, index = rest - next * outer.size[d];
      to[r] += index * outer.out_stride[d];
      from[r] += index * outer.x_stride[d];
      rest = next;
    }
  }
  const int64_t first = int64_t(threadIdx.x % kRowThreads) * V;
  constexpr int64_t kStep = int64_t(kRowThreads) * V;

  float kept[kRows][kVectors > 0 ? kVectors : 1][V];
  float scale[kRows] = {};
  if constexpr (kVectors > 0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int n = 0; n < kVectors; ++n) {
        const int64_t at = first + n * kStep;
        if (at < width) load<V>(kept[r][n], from[r] + at);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int n = 0; n < kVectors; ++n) {
        if (first + n * kStep >= width) continue;
#pragma unroll
        for (int i = 0; i < V; ++i) scale[r] = fmaf(kept[r][n][i], kept[r][n][i], scale[r]);
      }
    }
  } else {
    for (int64_t at = first; at < width; at += kStep) {
      load<V>(kept[0][0], from[0] + at);
#pragma unroll
      for (int i = 0; i < V; ++i) scale[0] = fmaf(kept[0][0][i], kept[0][0][i], scale[0]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    scale[r] = row_scale(block_sum<kRowThreads>(scale[r], shared), width, norm);
  }
  const float root = sqrtf(float(width));

  const auto finish = [&](float(&values)[V], const float(&w)[V], int r, int64_t at) {
    normalise<T>(values, w, scale[r], root, norm.kind);
    if (norm.silu) {
#pragma unroll
      for (int i = 0; i < V; ++i) values[i] = silu<!std::is_same_v<To, float>>(values[i]);
    }
    store<V>(to[r] + at, values);
  };
  float w[V];
  if constexpr (kVectors > 0) {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      const int64_t at = first + n * kStep;
      if (at >= width) continue;
      load<V>(w, weight, weight_dtype, at);
#pragma unroll
      for (int r = 0; r < kRows; ++r) finish(kept[r][n], w, r, at);
    }
  } else {
    for (int64_t at = first; at < width; at += kStep) {
      load<V>(kept[0][0], from[0] + at);
      load<V>(w, weight, weight_dtype, at);
      finish(kept[0][0], w, 0, at);
    }
  }
}

template <int n>
using Number = std::integral_constant<int, n>;

template <typename To, typename T, int kRowThreads, int V>
void launch_rms_norm(Stream stream, MutView out, View x, View weight, const OuterRows& outer,
                     const Norm& norm) {
  const int64_t width = x.dim(-1);
  const int64_t vectors = ceil_div<int64_t>(width, int64_t(kRowThreads) * V);
  constexpr int kMany = kRowThreads == 32 ? 4 : 1;  // rows of one vector
  const auto launch = [&](auto count, auto rows) {
    constexpr int kRows = decltype(rows)::value;
    const unsigned blocks = unsigned(ceil_div<int64_t>(outer.rows, kRows * (256 / kRowThreads)));
    rms_norm_kernel<To, T, kRowThreads, V, decltype(count)::value, kRows>
        <<<blocks, 256, 0, stream>>>(static_cast<To*>(out.mut()), static_cast<const T*>(x.data),
                                     weight.data, weight.dtype, width, outer, norm);
  };
  if (V == 1 || vectors > 4)
    launch(Number<0>{}, Number<1>{});
  else if (vectors == 1)
    launch(Number<1>{}, Number<kMany>{});
  else if (vectors == 2)
    launch(Number<2>{}, Number<(kMany + 1) / 2>{});
  else
    launch(Number<4>{}, Number<1>{});
  check_launch();
}

template <typename To, typename T>
void launch_rms_norm(Stream stream, MutView out, View x, View weight, const Norm& norm) {
  const OuterRows outer = outer_rows(out, x);
  int width = common_width(8, {x.dim(-1), address_in_elements(out), address_in_elements(x),
                               address_in_elements(weight)});
  for (int d = 0; d < outer.rank; ++d)
    width = common_width(width, {outer.out_stride[d], outer.x_stride[d]});
  const bool narrow = x.dim(-1) <= 1024;
  if (width == 8 && narrow)
    launch_rms_norm<To, T, 32, 8>(stream, out, x, weight, outer, norm);
  else if (width == 8)
    launch_rms_norm<To, T, 256, 8>(stream, out, x, weight, outer, norm);
  else if (narrow)
    launch_rms_norm<To, T, 32, 1>(stream, out, x, weight, outer, norm);
  else
    launch_rms_norm<To, T, 256, 1>(stream, out, x, weight, outer, norm);
}

struct Heads {
  int64_t rows, heads, half;
  int64_t x_row, x_head, out_row, out_head;  // strides
};

template <typename T, int V>
__device__ __forceinline__ void norm_pairs(float (&low)[V], float (&high)[V],
                                           const float (&w_low)[V], const float (&w_high)[V],
                                           float scale, NormKind kind) {
  normalise<T>(low, w_low, scale, 1.0f, kind);
  normalise<T>(high, w_high, scale, 1.0f, kind);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    low[i] = rounded<T>(low[i]);
    high[i] = rounded<T>(high[i]);
  }
}

template <int V>
__device__ __forceinline__ void rotate(float (&low)[V], float (&high)[V], const float (&c)[V],
                                       const float (&s)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const float x1 = low[i], x2 = high[i];
    low[i] = x1 * c[i] - x2 * s[i];
    high[i] = x2 * c[i] + x1 * s[i];
  }
}

// head_dim 64, 128 or 256: kLanes lanes own a head, 8 pairs each in 16-byte accesses; a warp walks
// over the heads of one row and keeps that row's cos and sin.
template <typename To, typename T, int kLanes>
__global__ void __launch_bounds__(128)
    qk_norm_rope_wide_kernel(To* out, const T* x, const void* weight, DType weight_dtype,
                             const float* cos, const float* sin, Heads shape, Norm norm) {
  constexpr int V = 8, kHeads = 32 / kLanes;
  const int64_t row = int64_t(blockIdx.x) * 4 + threadIdx.x / 32;
  if (row >= shape.rows) return;
  const int lane = threadIdx.x % 32, at = lane % kLanes * V;
  float c[V], s[V], w_low[V] = {}, w_high[V] = {};
  load<V>(c, cos + row * shape.half + at);
  load<V>(s, sin + row * shape.half + at);
  if (weight) {
    load<V>(w_low, weight, weight_dtype, at);
    load<V>(w_high, weight, weight_dtype, shape.half + at);
  }
  x += row * shape.x_row + at;
  out += row * shape.out_row + at;
#pragma unroll 2
  for (int64_t first = 0; first < shape.heads; first += kHeads) {
    const int64_t head = first + lane / kLanes;
    const bool is_mine = head < shape.heads;
    float low[V] = {}, high[V] = {};
    if (is_mine) {
      load<V>(low, x + head * shape.x_head);
      load<V>(high, x + head * shape.x_head + shape.half);
    }
    if (weight) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < V; ++i) sum = fmaf(low[i], low[i], fmaf(high[i], high[i], sum));
#pragma unroll
      for (int lanes = kLanes / 2; lanes > 0; lanes /= 2)
        sum += __shfl_xor_sync(kAllLanes, sum, lanes);
      norm_pairs<T>(low, high, w_low, w_high, row_scale(sum, 2 * shape.half, norm), norm.kind);
    }
    rotate(low, high, c, s);
    if (is_mine) {
      store<V>(out + head * shape.out_head, low);
      store<V>(out + head * shape.out_head + shape.half, high);
    }
  }
}

template <typename To, typename T, int V>
__global__ void __launch_bounds__(256)
    qk_norm_rope_kernel(To* out, const T* x, const void* weight, DType weight_dtype,
                        const float* cos, const float* sin, Heads shape, Norm norm) {
  const int64_t pair = int64_t(blockIdx.x) * 8 + threadIdx.x / 32;
  if (pair >= shape.rows * shape.heads) return;
  const int64_t row = pair / shape.heads, head = pair - row * shape.heads;
  x += row * shape.x_row + head * shape.x_head;
  out += row * shape.out_row + head * shape.out_head;
  const int64_t first = int64_t(threadIdx.x % 32) * V;

  float scale = 1.0f;
  if (weight) {
    float sum = 0.0f;
    for (int64_t at = first; at < shape.half; at += 32 * V) {
      float low[V], high[V];
      load<V>(low, x + at);
      load<V>(high, x + shape.half + at);
#pragma unroll
      for (int i = 0; i < V; ++i) sum = fmaf(low[i], low[i], fmaf(high[i], high[i], sum));
    }
    scale = row_scale(warp_sum(sum), 2 * shape.half, norm);
  }
  // Each lane reads again only what it alone will overwrite, so out may be x.
  for (int64_t at = first; at < shape.half; at += 32 * V) {
    float low[V], high[V], c[V], s[V];
    load<V>(low, x + at);
    load<V>(high, x + shape.half + at);
    load<V>(c, cos + row * shape.half + at);
    load<V>(s, sin + row * shape.half + at);
    if (weight) {
      float w_low[V], w_high[V];
      load<V>(w_low, weight, weight_dtype, at);
      load<V>(w_high, weight, weight_dtype, shape.half + at);
      norm_pairs<T>(low, high, w_low, w_high, scale, norm.kind);
    }
    rotate(low, high, c, s);
    store<V>(out + at, low);
    store<V>(out + shape.half + at, high);
  }
}

}  // namespace

void rms_norm(Stream stream, MutView out, View x, View weight, const Norm& norm) {
  with_type(out.dtype, [&](auto to) {
    with_type(x.dtype, [&](auto from) {
      launch_rms_norm<decltype(to), decltype(from)>(stream, out, x, weight, norm);
    });
  });
}

void qk_norm_rope(Stream stream, MutView out, View x, View weight, View cos, View sin,
                  const Norm& norm) {
  const Heads shape{x.dim(0),    x.dim(1),      x.dim(2) / 2, x.stride(0),
                    x.stride(1), out.stride(0), out.stride(1)};
  int width = common_width(8, {shape.half, address_in_elements(out), address_in_elements(x),
                               address_in_elements(cos), address_in_elements(sin)});
  if (shape.rows > 1) width = common_width(width, {shape.x_row, shape.out_row});
  if (shape.heads > 1) width = common_width(width, {shape.x_head, shape.out_head});
  if (weight) width = common_width(width, {address_in_elements(weight)});
  with_type(out.dtype, [&](auto to) {
    with_type(x.dtype, [&](auto from) {
      using To = decltype(to);
      using T = decltype(from);
      const auto launch = [&](auto kernel, int64_t blocks, int threads) {
        kernel<<<unsigned(blocks), unsigned(threads), 0, stream>>>(
            static_cast<To*>(out.mut()), static_cast<const T*>(x.data), weight.data, weight.dtype,
            static_cast<const float*>(cos.data), static_cast<const float*>(sin.data), shape, norm);
      };
      const int64_t row_blocks = ceil_div<int64_t>(shape.rows, 4);
      const int64_t head_blocks = ceil_div<int64_t>(shape.rows * shape.heads, 8);
      if (width == 8 && shape.half == 32)
        launch(qk_norm_rope_wide_kernel<To, T, 4>, row_blocks, 128);
      else if (width == 8 && shape.half == 64)
        launch(qk_norm_rope_wide_kernel<To, T, 8>, row_blocks, 128);
      else if (width == 8 && shape.half == 128)
        launch(qk_norm_rope_wide_kernel<To, T, 16>, row_blocks, 128);
      else if (width >= 2)
        launch(qk_norm_rope_kernel<To, T, 2>, head_blocks, 256);
      else
        launch(qk_norm_rope_kernel<To, T, 1>, head_blocks, 256);
    });
  });
  check_launch();
}

}  // namespace orrery::cuda
