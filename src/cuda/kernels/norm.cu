// RMS norms of rows, and the fused per-head norm + rotary embedding of queries and keys.
//
// rms_norm: x, out [..., C], rows contiguous, any outer strides (out may be x); weight [C]. 4 flops and
// 2 element accesses per element; floor = bytes over copy bandwidth. 32 threads a row up to C = 1024,
// 256 above; a row of up to 4 vectors a thread stays in registers between the two passes.
//
// qk_norm_rope: x, out [S, H, D], any row and head strides; cos, sin f32 [S, D / 2]. One warp per (row,
// head); a lane owns pairs (i, i + D / 2), so the rotation needs no exchange. About 10 flops per
// element; bytes: x and out once, cos and sin once from memory (heads of a row share them in cache).
// Writing at any row stride lets the output be the tail of a larger key buffer: no concatenation.
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

template <typename T>
__device__ __forceinline__ float normalised(float x, float scale, float weight, float root, NormKind kind, bool activate) {
  float y;
  if (kind == NormKind::qwen) y = rounded<T>(x * scale) * weight;
  else if (kind == NormKind::nemotron) y = weight * (x * scale);
  else y = rounded<T>(x * scale) * root * weight;
  return activate ? silu(y) : y;
}

__device__ __forceinline__ float row_scale(float square_sum, int64_t width, const Norm& norm) {
  if (norm.kind == NormKind::channel) return 1.0f / fmaxf(sqrtf(square_sum), 1e-12f);
  return rsqrtf(square_sum / float(width) + norm.eps);
}

// kRowThreads threads own a row; kVectors vectors of V elements each stay in registers (0: read again).
template <typename To, typename T, int kRowThreads, int V, int kVectors>
__global__ void __launch_bounds__(256) rms_norm_kernel(To* out, const T* x, const void* weight, DType weight_dtype,
                                                       int64_t width, OuterRows outer, Norm norm) {
  constexpr int kRowsPerBlock = 256 / kRowThreads;
  __shared__ float shared[32];
  const int64_t row = int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x / kRowThreads;
  if (row >= outer.rows) return;  // whole warps leave; rows of 256 threads fill their blocks
  int64_t rest = row;
  for (int d = outer.rank - 1; d >= 0; --d) {
    const int64_t next = d ? rest / outer.size[d] : 0, index = rest - next * outer.size[d];
    out += index * outer.out_stride[d];
    x += index * outer.x_stride[d];
    rest = next;
  }
  const int64_t first = int64_t(threadIdx.x % kRowThreads) * V;
  constexpr int64_t kStep = int64_t(kRowThreads) * V;

  float kept[kVectors > 0 ? kVectors : 1][V];
  float sum = 0.0f;
  if constexpr (kVectors > 0) {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      const int64_t at = first + n * kStep;
      if (at < width) {
        load<V>(kept[n], x + at);
#pragma unroll
        for (int i = 0; i < V; ++i) sum = fmaf(kept[n][i], kept[n][i], sum);
      }
    }
  } else {
    for (int64_t at = first; at < width; at += kStep) {
      load<V>(kept[0], x + at);
#pragma unroll
      for (int i = 0; i < V; ++i) sum = fmaf(kept[0][i], kept[0][i], sum);
    }
  }
  sum = block_sum<kRowThreads>(sum, shared);
  const float scale = row_scale(sum, width, norm);
  const float root = sqrtf(float(width));

  const auto finish = [&](float(&values)[V], int64_t at) {
    float w[V];
    load<V>(w, weight, weight_dtype, at);
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = normalised<T>(values[i], scale, w[i], root, norm.kind, norm.silu);
    store<V>(out + at, values);
  };
  if constexpr (kVectors > 0) {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      if (first + n * kStep < width) finish(kept[n], first + n * kStep);
    }
  } else {
    for (int64_t at = first; at < width; at += kStep) {
      load<V>(kept[0], x + at);
      finish(kept[0], at);
    }
  }
}

template <typename To, typename T, int kRowThreads, int V>
void launch_rms_norm(Stream stream, MutView out, View x, View weight, const OuterRows& outer, const Norm& norm) {
  const int64_t width = x.dim(-1);
  const int64_t vectors = ceil_div<int64_t>(width, int64_t(kRowThreads) * V);
  const unsigned blocks = unsigned(ceil_div<int64_t>(outer.rows, 256 / kRowThreads));
  const auto launch = [&](auto count) {
    rms_norm_kernel<To, T, kRowThreads, V, decltype(count)::value><<<blocks, 256, 0, stream>>>(
        static_cast<To*>(out.mut()), static_cast<const T*>(x.data), weight.data, weight.dtype, width, outer, norm);
  };
  if (V == 1 || vectors > 4) launch(std::integral_constant<int, 0>{});
  else if (vectors == 1) launch(std::integral_constant<int, 1>{});
  else if (vectors == 2) launch(std::integral_constant<int, 2>{});
  else launch(std::integral_constant<int, 4>{});
  check_launch();
}

template <typename To, typename T>
void launch_rms_norm(Stream stream, MutView out, View x, View weight, const Norm& norm) {
  const OuterRows outer = outer_rows(out, x);
  int width = common_width(8, {x.dim(-1), address_in_elements(out), address_in_elements(x), address_in_elements(weight)});
  for (int d = 0; d < outer.rank; ++d) width = common_width(width, {outer.out_stride[d], outer.x_stride[d]});
  const bool narrow = x.dim(-1) <= 1024;
  if (width == 8 && narrow) launch_rms_norm<To, T, 32, 8>(stream, out, x, weight, outer, norm);
  else if (width == 8) launch_rms_norm<To, T, 256, 8>(stream, out, x, weight, outer, norm);
  else if (narrow) launch_rms_norm<To, T, 32, 1>(stream, out, x, weight, outer, norm);
  else launch_rms_norm<To, T, 256, 1>(stream, out, x, weight, outer, norm);
}

struct Heads {
  int64_t rows, heads, half;
  int64_t x_row, x_head, out_row, out_head;  // strides
};

template <typename To, typename T, int V>
__global__ void __launch_bounds__(256) qk_norm_rope_kernel(To* out, const T* x, const void* weight, DType weight_dtype,
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
#pragma unroll
      for (int i = 0; i < V; ++i) {
        low[i] = rounded<T>(normalised<T>(low[i], scale, w_low[i], 1.0f, norm.kind, false));
        high[i] = rounded<T>(normalised<T>(high[i], scale, w_high[i], 1.0f, norm.kind, false));
      }
    }
    float y_low[V], y_high[V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
      y_low[i] = low[i] * c[i] - high[i] * s[i];
      y_high[i] = high[i] * c[i] + low[i] * s[i];
    }
    store<V>(out + at, y_low);
    store<V>(out + shape.half + at, y_high);
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

void qk_norm_rope(Stream stream, MutView out, View x, View weight, View cos, View sin, const Norm& norm) {
  const Heads shape{x.dim(0), x.dim(1), x.dim(2) / 2, x.stride(0), x.stride(1), out.stride(0), out.stride(1)};
  int width = common_width(2, {shape.half, address_in_elements(out), address_in_elements(x), address_in_elements(cos),
                               address_in_elements(sin)});
  if (shape.rows > 1) width = common_width(width, {shape.x_row, shape.out_row});
  if (shape.heads > 1) width = common_width(width, {shape.x_head, shape.out_head});
  if (weight) width = common_width(width, {address_in_elements(weight)});
  const unsigned blocks = unsigned(ceil_div<int64_t>(shape.rows * shape.heads, 8));
  with_type(out.dtype, [&](auto to) {
    with_type(x.dtype, [&](auto from) {
      const auto launch = [&](auto constant) {
        qk_norm_rope_kernel<decltype(to), decltype(from), decltype(constant)::value><<<blocks, 256, 0, stream>>>(
            static_cast<decltype(to)*>(out.mut()), static_cast<const decltype(from)*>(x.data), weight.data,
            weight.dtype, static_cast<const float*>(cos.data), static_cast<const float*>(sin.data), shape, norm);
      };
      if (width == 2) launch(std::integral_constant<int, 2>{});
      else launch(std::integral_constant<int, 1>{});
    });
  });
  check_launch();
}

}  // namespace orrery::cuda
