// Convolution without a library, and the second half of the transposed 1-D convolution.
//
// conv_direct: implicit GEMM on the ordinary cores, f32 arithmetic. x [D, H, W, Cin] and out
// [D', H', W', Cout] channels last with any outer strides, w [Cout, taps, Cin] contiguous. 64 x 64
// output tiles (positions x channels), 16 input channels at a time, 4 x 4 results a thread; bias
// and residual in the epilogue. Flops: 2 M Cout taps Cin, floor at the fp32 rate (about 60 TFLOP/s
// on an H200; not measured by itself). Bytes: x and w from cache per tile. Serves f32, which must
// not use tf32, and shapes that cuDNN refuses.
//
// pair_frames: sums of two of four frames, as sm90_conv.h wants them; 8 channels a thread, which
// walks the pairs. No product; bytes: two frames of x in, four of t out a pair, floor at copy
// bandwidth. It is part of what sm90_conv.cu gives as measured.
//
// fold: out[n] = bias + the up to ceil(k / s) columns that land on n. Bytes: columns (f32) once,
// out once; the matrix product before it does the flops.
#include "cuda/kernels.h"
#include "cuda/kernels/common.cuh"

namespace orrery::cuda {

namespace {

constexpr int kTile = 64;
constexpr int kDepth = 16;

struct DirectConv {
  int64_t positions, cin, cout;
  int64_t in[3], out[3], kernel[3];
  int64_t stride[3], dilation[3], pad[3];
  int64_t x_stride[3], y_stride[3], residual_stride[3];
  DType bias_dtype;
};

template <typename To, typename T, typename R>
__global__ void __launch_bounds__(256)
    conv_kernel(To* out, const T* x, const T* w, const void* bias, const R* residual,
                __grid_constant__ const DirectConv c) {
  __shared__ float a_tile[kDepth][kTile + 4], b_tile[kDepth][kTile + 4];
  const int thread = threadIdx.x;
  // Loading: one position (or output channel) and four channels a thread.
  const int load_row = thread / 4, load_channel = thread % 4 * 4;
  const int64_t position = int64_t(blockIdx.x) * kTile + load_row;
  const int64_t filter = int64_t(blockIdx.y) * kTile + load_row;
  int64_t origin[3];
  {
    int64_t rest = position < c.positions ? position : 0;
    for (int d = 2; d >= 0; --d) {
      origin[d] = rest % c.out[d] * c.stride[d] - c.pad[d];
      rest /= c.out[d];
    }
  }
  const int row = thread / 16 * 4, column = thread % 16 * 4;
  float sum[4][4] = {};
  const int64_t taps = c.kernel[0] * c.kernel[1] * c.kernel[2];
  for (int64_t tap = 0; tap < taps; ++tap) {
    int64_t rest = tap, offset = 0;
    bool inside = position < c.positions;
    for (int d = 2; d >= 0; --d) {
      const int64_t at = origin[d] + rest % c.kernel[d] * c.dilation[d];
      rest /= c.kernel[d];
      inside = inside && at >= 0 && at < c.in[d];
      offset += at * c.x_stride[d];
    }
    for (int64_t depth = 0; depth < c.cin; depth += kDepth) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t channel = depth + load_channel + i;
        const bool valid = channel < c.cin;
        a_tile[load_channel + i][load_row] = valid && inside ? to_f32(x[offset + channel]) : 0.0f;
        b_tile[load_channel + i][load_row] =
            valid && filter < c.cout ? to_f32(w[(filter * taps + tap) * c.cin + channel]) : 0.0f;
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
        float a[4], b[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[i] = a_tile[k][row + i];
          b[i] = b_tile[k][column + i];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(a[i], b[j], sum[i][j]);
        }
      }
      __syncthreads();
    }
  }
  for (int i = 0; i < 4; ++i) {
    int64_t rest = int64_t(blockIdx.x) * kTile + row + i;
    if (rest >= c.positions) continue;
    int64_t to = 0, from = 0;
    for (int d = 2; d >= 0; --d) {
      const int64_t at = rest % c.out[d];
      rest /= c.out[d];
      to += at * c.y_stride[d];
      from += at * c.residual_stride[d];
    }
    for (int j = 0; j < 4; ++j) {
      const int64_t channel = int64_t(blockIdx.y) * kTile + column + j;
      if (channel >= c.cout) continue;
      float value = sum[i][j];
      if (bias) value += load_one(bias, c.bias_dtype, channel);
      if (residual) value += to_f32(residual[from + channel]);
      out[to + channel] = from_f32<To>(value);
    }
  }
}

struct FoldShape {
  Fold fold;
  int64_t rows, channels, inputs, out_row, columns_row;
  DType bias_dtype;
};

template <typename T>
__global__ void __launch_bounds__(256)
    fold_kernel(T* out, const float* columns, const void* bias, FoldShape s) {
  const int64_t item = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (item >= s.rows * s.channels) return;
  const int64_t row = item / s.channels, channel = item - row * s.channels;
  // t * stride + tap = n + padding, 0 <= tap < taps
  const int64_t reach = s.fold.begin + row + s.fold.padding;
  float sum = bias ? load_one(bias, s.bias_dtype, channel) : 0.0f;
  const int64_t last = reach / s.fold.stride;
  const int64_t first = reach < s.fold.taps ? 0 : (reach - s.fold.taps) / s.fold.stride + 1;
  for (int64_t t = first; t <= last; ++t) {
    const int64_t local = t - s.fold.first;
    if (local < 0 || local >= s.inputs) continue;
    sum += columns[local * s.columns_row + channel * s.fold.taps + (reach - t * s.fold.stride)];
  }
  out[row * s.out_row + channel] = from_f32<T>(sum);
}

__global__ void __launch_bounds__(256)
    pair_frames_kernel(__nv_bfloat16* t, const __nv_bfloat16* x, int64_t frame_stride,
                       int64_t row_stride, int64_t vectors, int64_t rows, int64_t frames,
                       int64_t first, int64_t pairs) {
  constexpr int V = 8;
  const int64_t vector = int64_t(blockIdx.x) * 256 + threadIdx.x, row = blockIdx.y;
  if (vector >= vectors) return;
  x += row * row_stride + vector * V;
  t += (row * vectors + vector) * V;
  const int64_t plane = rows * vectors * V;
  const auto frame = [&](float(&to)[V], int64_t index) {
    if (index >= 0 && index < frames) {
      load<V>(to, x + index * frame_stride);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) to[i] = 0;
    }
  };
  float a[V], b[V], c[V], d[V], sum[V];
  frame(a, first);
  frame(b, first + 1);
  for (int64_t pair = 0; pair < pairs; ++pair, t += 4 * plane) {
    frame(c, first + 2 * pair + 2);
    frame(d, first + 2 * pair + 3);
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = a[i] - c[i];
    store<V>(t, sum);
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = b[i] + c[i];
    store<V>(t + plane, sum);
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = c[i] - b[i];
    store<V>(t + 2 * plane, sum);
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = d[i] - b[i];
    store<V>(t + 3 * plane, sum);
#pragma unroll
    for (int i = 0; i < V; ++i) a[i] = c[i], b[i] = d[i];
  }
}

}  // namespace

void pair_frames(Stream stream, MutView t, View x, int64_t first, int64_t first_row) {
  const int64_t rows = t.dim(2), vectors = t.dim(3) * t.dim(4) / 8;
  const dim3 grid(unsigned(ceil_div<int64_t>(vectors, 256)), unsigned(rows));
  pair_frames_kernel<<<grid, 256, 0, stream>>>(
      static_cast<__nv_bfloat16*>(t.mut()),
      static_cast<const __nv_bfloat16*>(x.data) + first_row * x.stride(1), x.stride(0), x.stride(1),
      vectors, rows, x.dim(0), first, t.dim(0));
  check_launch();
}

void conv_direct(Stream stream, MutView out, View x, View w, View bias, const Conv3d& conv,
                 View residual) {
  DirectConv c{};
  c.positions = out.dim(0) * out.dim(1) * out.dim(2);
  c.cin = x.dim(3);
  c.cout = out.dim(3);
  for (int d = 0; d < 3; ++d) {
    const auto i = size_t(d);
    c.in[d] = x.dim(d);
    c.out[d] = out.dim(d);
    c.kernel[d] = w.dim(1 + d);
    c.stride[d] = conv.stride[i];
    c.dilation[d] = conv.dilation[i];
    c.pad[d] = conv.pad_before[i];
    c.x_stride[d] = x.stride(d);
    c.y_stride[d] = out.stride(d);
    c.residual_stride[d] = residual ? residual.stride(d) : 0;
  }
  c.bias_dtype = bias.dtype;
  const dim3 grid(unsigned(ceil_div<int64_t>(c.positions, kTile)),
                  unsigned(ceil_div<int64_t>(c.cout, kTile)));
  with_type(out.dtype, [&](auto to) {
    with_type(x.dtype, [&](auto from) {
      with_type(residual.dtype, [&](auto add) {
        using To = decltype(to);
        using T = decltype(from);
        using R = decltype(add);
        conv_kernel<To, T, R><<<grid, 256, 0, stream>>>(
            static_cast<To*>(out.mut()), static_cast<const T*>(x.data),
            static_cast<const T*>(w.data), bias.data, static_cast<const R*>(residual.data), c);
      });
    });
  });
  check_launch();
}

void fold(Stream stream, MutView out, View columns, View bias, const Fold& fold) {
  const FoldShape s{fold,          out.dim(0),        out.dim(1), columns.dim(0),
                    out.stride(0), columns.stride(0), bias.dtype};
  const unsigned blocks = unsigned(ceil_div<int64_t>(s.rows * s.channels, 256));
  with_type(out.dtype, [&](auto type) {
    using T = decltype(type);
    fold_kernel<T><<<blocks, 256, 0, stream>>>(
        static_cast<T*>(out.mut()), static_cast<const float*>(columns.data), bias.data, s);
  });
  check_launch();
}

}  // namespace orrery::cuda
