// Row kernels around the matrix products: bias + activation + residual, embedding rows, snake.
//
// Layout: [M, N] with contiguous rows, any row stride; per-column vectors broadcast over M.
// Flops: about 10 per element. Bytes: every input and output element once (vectors stay in cache).
// Floor: bytes over copy bandwidth. Measured on an H200 (bench/device_ops silu_gate snake):
// silu_gate of 44160 x 24576 0.861 ms, floor 0.766; snake of 378240 x 320 0.310 ms, floor 0.114
// (sines). One item is V neighbouring columns of one row, in 16-byte accesses where addresses and
// strides allow.
#include "cuda/kernels.h"
#include "cuda/kernels/common.cuh"

namespace orrery::cuda {

namespace {

constexpr int kThreads = 256;

unsigned blocks_for(int64_t items) { return unsigned(ceil_div<int64_t>(items, kThreads)); }

struct Rows {
  int64_t rows;
  int64_t items_per_row;
  bool is_small;  // item numbers fit 32 bits, whose division is several times cheaper
};

Rows make_rows(int64_t rows, int64_t items_per_row) {
  return {rows, items_per_row, (rows + 1) * items_per_row + 256 < INT32_MAX};
}

// The row and first column of this thread's item; row >= rows when there is none.
struct Place {
  int64_t row, column;
};

template <int V>
__device__ __forceinline__ Place place_of(const Rows& rows) {
  const int64_t item = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = rows.is_small ? int64_t(uint32_t(item) / uint32_t(rows.items_per_row))
                                    : item / rows.items_per_row;
  return {row, (item - row * rows.items_per_row) * V};
}

// Calls fn with V as a compile-time constant.
template <typename Fn>
void with_width(int width, const Fn& fn) {
  if (width == 8)
    fn(std::integral_constant<int, 8>{});
  else if (width == 4)
    fn(std::integral_constant<int, 4>{});
  else if (width == 2)
    fn(std::integral_constant<int, 2>{});
  else
    fn(std::integral_constant<int, 1>{});
}

// Width at which all given views (empty ones aside) can be accessed together.
int width_of(int64_t columns, std::initializer_list<View> views) {
  int width = common_width(8, {columns});
  for (const View& view : views) {
    if (!view) continue;
    width = common_width(width, {address_in_elements(view), rows_of(view).stride});
  }
  return width;
}

template <bool kFast, int V>
__device__ __forceinline__ void activate(float (&x)[V], Activation kind) {
  if (kind == Activation::silu) {
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] = silu<kFast>(x[i]);
  } else if (kind == Activation::relu2) {
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] = x[i] <= 0.0f ? 0.0f : x[i] * x[i];  // NaN stays
  }
}

struct Epilogue {
  Operand out, x, bias, residual;
  int64_t up;  // where silu_gate's second half starts, in elements
  Activation kind;
};

template <int V>
__global__ void __launch_bounds__(kThreads) epilogue_kernel(Epilogue e, Rows rows) {
  const Place at = place_of<V>(rows);
  if (at.row >= rows.rows) return;
  float x[V];
  load<V>(x, e.x.data, e.x.dtype, at.row * e.x.stride + at.column);
  if (e.bias.data) {
    float bias[V];
    load<V>(bias, e.bias.data, e.bias.dtype, at.column);
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] += bias[i];
  }
  const bool is_narrow = e.out.dtype == DType::bf16;
  const Activation kind = e.kind == Activation::silu_gate ? Activation::silu : e.kind;
  if (is_narrow)
    activate<true>(x, kind);
  else
    activate<false>(x, kind);
  if (e.kind == Activation::silu_gate) {
    float up[V];
    load<V>(up, e.x.data, e.x.dtype, at.row * e.x.stride + e.up + at.column);
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] *= up[i];
  }
  if (e.residual.data) {
    float residual[V];
    load<V>(residual, e.residual.data, e.residual.dtype, at.row * e.residual.stride + at.column);
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] += residual[i];
  }
  store<V>(const_cast<void*>(e.out.data), e.out.dtype, at.row * e.out.stride + at.column, x);
}

// Token ids travel as kernel parameters: no staging buffer that a replayed graph could find
// changed.
constexpr int kIdsPerLaunch = 512;
struct Ids {
  int32_t id[kIdsPerLaunch];
};

template <int V>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(Operand out, Operand table, __grid_constant__ const Ids ids, Rows rows) {
  const Place at = place_of<V>(rows);
  if (at.row >= rows.rows) return;
  float x[V];
  load<V>(x, table.data, table.dtype, int64_t(ids.id[at.row]) * table.stride + at.column);
  store<V>(const_cast<void*>(out.data), out.dtype, at.row * out.stride + at.column, x);
}

__global__ void __launch_bounds__(kThreads)
    gather_strided_kernel(Operand out, Operand table, int64_t column_stride,
                          __grid_constant__ const Ids ids, Rows rows) {
  const Place at = place_of<1>(rows);
  if (at.row >= rows.rows) return;
  const float x =
      load_one(table.data, table.dtype, ids.id[at.row] * table.stride + at.column * column_stride);
  store_one(const_cast<void*>(out.data), out.dtype, at.row * out.stride + at.column, x);
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    snake_kernel(Operand out, Operand x, Operand alpha, Operand beta, Rows rows) {
  const Place at = place_of<V>(rows);
  if (at.row >= rows.rows) return;
  float value[V], a[V], b[V];
  load<V>(value, x.data, x.dtype, at.row * x.stride + at.column);
  load<V>(a, alpha.data, alpha.dtype, at.column);
  load<V>(b, beta.data, beta.dtype, at.column);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const float wave = sinf(expf(a[i]) * value[i]);
    value[i] += wave * wave / (expf(b[i]) + 1e-9f);
  }
  store<V>(const_cast<void*>(out.data), out.dtype, at.row * out.stride + at.column, value);
}

}  // namespace

void epilogue(Stream stream, MutView out, View x, View bias, View residual, Activation kind) {
  const int64_t columns = out.dim(1);
  const Epilogue e{rows_of(out), rows_of(x), rows_of(bias), rows_of(residual), columns, kind};
  with_width(width_of(columns, {out, x, bias, residual}), [&](auto width) {
    constexpr int V = decltype(width)::value;
    epilogue_kernel<V><<<blocks_for(out.numel() / V), kThreads, 0, stream>>>(
        e, make_rows(out.dim(0), columns / V));
  });
  check_launch();
}

void gather_rows(Stream stream, MutView out, View table, std::span<const int64_t> ids) {
  require(table.dim(0) <= INT32_MAX, ErrorKind::unsupported, "gather_rows: a table of ",
          table.dim(0), " rows, at most 2^31 - 1 are supported");
  const int64_t columns = out.dim(1), count = out.dim(0);
  const Operand from{table.data, table.dtype, table.stride(0)};
  Ids part;
  for (int64_t begin = 0; begin < count; begin += kIdsPerLaunch) {
    const int64_t size = std::min<int64_t>(kIdsPerLaunch, count - begin);
    for (int64_t i = 0; i < size; ++i) part.id[i] = int32_t(ids[size_t(begin + i)]);
    const MutView to = out.slice(0, begin, size);
    if (!table.rows_contiguous()) {
      gather_strided_kernel<<<blocks_for(to.numel()), kThreads, 0, stream>>>(
          rows_of(to), from, table.stride(1), part, make_rows(size, columns));
      check_launch();
      continue;
    }
    const int width = common_width(width_of(columns, {to, table}), {table.stride(0)});
    with_width(width, [&](auto constant) {
      constexpr int V = decltype(constant)::value;
      gather_kernel<V><<<blocks_for(to.numel() / V), kThreads, 0, stream>>>(
          rows_of(to), from, part, make_rows(size, columns / V));
    });
    check_launch();
  }
}

void snake(Stream stream, MutView out, View x, View alpha, View beta) {
  const int64_t columns = out.dim(1);
  with_width(width_of(columns, {out, x, alpha, beta}), [&](auto width) {
    constexpr int V = decltype(width)::value;
    snake_kernel<V><<<blocks_for(out.numel() / V), kThreads, 0, stream>>>(
        rows_of(out), rows_of(x), rows_of(alpha), rows_of(beta),
        make_rows(out.dim(0), columns / V));
  });
  check_launch();
}

}  // namespace orrery::cuda
