// Strided copies with conversion (transpose, patchify, concatenation, cast, nearest upsampling),
// fill and linear combinations.
//
// Layout: any strides up to rank 6; dimensions are sorted by the output's strides and merged first.
// Flops: none to 2 per term. Bytes: each input element read once, each output element written once.
// Floor: bytes over the device's copy bandwidth (4.2 TB/s counted read + written on an H200).
// Measured on an H200 (bench/device_ops copy): rows 3.9 TB/s, sums of two 4.26 TB/s, f32 from
// bf16 3.9, transposes 1.8, nearest upsampling by 2 x 2 2.3 (44160 x 4096 and 4 x 180 x 320 x 512).
// Four kernels: rows (both sides contiguous, 16-byte accesses), tiles (the input is contiguous
// along another dimension: 32 x 32 through shared memory), elements (anything else), and the linear
// combination, which is the row kernel with several inputs.
#include "cuda/kernels.h"
#include "cuda/kernels/common.cuh"

namespace orrery::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kMaxTerms = 8;
constexpr int64_t kMaxItems = int64_t{1} << 31;

// One launch over loops whose items (vectors of V along the innermost loop) number below 2^31.
template <int N>
struct Space {
  int rank;
  uint32_t items;
  Divisor size[kMaxRank];
  int64_t stride[N][kMaxRank];
};

template <int N>
Space<N> make_space(const Loops<N>& loops, int width) {
  Space<N> space;
  space.rank = loops.rank;
  space.items = uint32_t(loops.numel() / width);
  for (int d = 0; d < loops.rank; ++d) {
    const bool inner = d + 1 == loops.rank;
    space.size[d] = Divisor(uint32_t(inner ? loops.size[d] / width : loops.size[d]));
    for (int n = 0; n < N; ++n) space.stride[n][d] = loops.stride[n][d] * (inner ? width : 1);
  }
  return space;
}

template <int N>
__device__ __forceinline__ void offsets(int64_t (&offset)[N], const Space<N>& space, uint32_t item,
                                        int used) {
#pragma unroll
  for (int n = 0; n < N; ++n) offset[n] = 0;
  for (int d = space.rank - 1; d >= 0; --d) {
    const uint32_t next = d ? space.size[d].divide(item) : 0;
    const int64_t index = item - next * space.size[d].value;
    item = next;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n < used) offset[n] += index * space.stride[n][d];
    }
  }
}

struct Terms {
  int count;
  const void* data[kMaxTerms];
  DType dtype[kMaxTerms];
  float factor[kMaxTerms];
  int stride[kMaxTerms];  // between neighbours along the innermost loop
};

// Tensor 0 of the space is the output, tensor n the (n - 1)-th term. One item a thread: several
// make the contiguous cases slower.
template <int V, int kTerms>
__global__ void __launch_bounds__(kThreads)
    combine(void* out, DType dtype, __grid_constant__ const Terms terms,
            __grid_constant__ const Space<kTerms + 1> space) {
  const uint32_t item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= space.items) return;
  int64_t offset[kTerms + 1];
  offsets(offset, space, item, terms.count + 1);
  float sum[V];
#pragma unroll
  for (int n = 0; n < kTerms; ++n) {
    if (n >= terms.count) break;
    float x[V];
    if (terms.stride[n] == 1) {
      load<V>(x, terms.data[n], terms.dtype[n], offset[n + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) {
        float one[1];
        load<1>(one, terms.data[n], terms.dtype[n], offset[n + 1] + i * terms.stride[n]);
        x[i] = one[0];
      }
    }
#pragma unroll
    for (int i = 0; i < V; ++i)
      sum[i] = n == 0 ? terms.factor[n] * x[i] : fmaf(terms.factor[n], x[i], sum[i]);
  }
  store<V>(out, dtype, offset[0], sum);
}

template <int kTerms>
void launch_combine(Stream stream, MutView out, Terms terms, const Loops<kTerms + 1>& loops,
                    int width) {
  for (int n = 0; n < terms.count; ++n) terms.stride[n] = int(loops.stride[n + 1][loops.rank - 1]);
  const auto space = make_space(loops, width);
  const unsigned blocks = unsigned(ceil_div<int64_t>(space.items, kThreads));
  if (width == 8)
    combine<8, kTerms><<<blocks, kThreads, 0, stream>>>(out.mut(), out.dtype, terms, space);
  else if (width == 4)
    combine<4, kTerms><<<blocks, kThreads, 0, stream>>>(out.mut(), out.dtype, terms, space);
  else if (width == 2)
    combine<2, kTerms><<<blocks, kThreads, 0, stream>>>(out.mut(), out.dtype, terms, space);
  else
    combine<1, kTerms><<<blocks, kThreads, 0, stream>>>(out.mut(), out.dtype, terms, space);
  check_launch();
}

// Inputs whose neighbours are at most this far apart (or the same) are picked one by one from lines
// that the warp reads whole anyway.
constexpr int64_t kMaxPickStride = 4;

// How many neighbouring elements of the output one thread makes: of tensors contiguous along the
// innermost loop, all other strides and the address are multiples of it.
template <int N>
int access_width(const Loops<N>& loops, const View* const (&views)[N], int used) {
  const int inner = loops.rank - 1;
  int width = common_width(8, {loops.size[inner]});
  for (int n = 0; n < used; ++n) {
    const int64_t stride = loops.stride[n][inner];
    if (n > 0 && stride != 1 && stride >= 0 && stride <= kMaxPickStride) continue;
    if (stride != 1) return 1;
    width = common_width(width, {loops.size[inner], address_in_elements(*views[n])});
    for (int d = 0; d < inner; ++d) width = common_width(width, {loops.stride[n][d]});
  }
  return width;
}

// Calls fn with views cut along the outermost dimension so that each part has fewer than 2^31
// elements.
template <typename Fn>
void in_parts(const MutView& out, const Fn& fn) {
  if (out.numel() < kMaxItems) return fn(0, -1, int64_t{0});
  int dim = 0;
  for (int d = 1; d < out.rank(); ++d) {
    if (out.dim(d) > out.dim(dim)) dim = d;
  }
  const int64_t rest = out.numel() / out.dim(dim);
  const int64_t step = std::max<int64_t>(1, (kMaxItems - 1) / rest);
  for (int64_t begin = 0; begin < out.dim(dim); begin += step) {
    fn(begin, dim, std::min(step, out.dim(dim) - begin));
  }
}

template <int kTerms>
void combine_views(Stream stream, MutView out, std::span<const Term> terms) {
  in_parts(out, [&](int64_t begin, int dim, int64_t size) {
    const auto part = [&](const View& view) {
      return dim < 0 ? view : view.slice(dim, begin, size);
    };
    const MutView to = MutView::cast(part(out));
    View parts[kTerms + 1];
    const View* views[kTerms + 1];
    parts[0] = to;
    Terms list;
    list.count = int(terms.size());
    for (size_t n = 0; n < terms.size(); ++n) {
      parts[n + 1] = part(terms[n].x);
      list.data[n] = parts[n + 1].data;
      list.dtype[n] = parts[n + 1].dtype;
      list.factor[n] = terms[n].factor;
    }
    for (int n = 0; n <= kTerms; ++n) views[n] = &parts[n];
    const View* const(&all)[kTerms + 1] = views;
    const auto loops = make_loops<kTerms + 1>(all, list.count + 1);
    launch_combine<kTerms>(stream, to, list, loops,
                           access_width<kTerms + 1>(loops, all, list.count + 1));
  });
}

// ---- transposing copy
// ----------------------------------------------------------------------------

constexpr int kTile = 32;
constexpr int kTileRows = 8;

// Plane (a, b): x is contiguous along a, out along b. The other loops are in `space`, one per grid
// z.
struct Plane {
  uint32_t size_a, size_b;
  int64_t x_b, out_a;  // strides
};

template <typename To, typename From>
__global__ void __launch_bounds__(kTile* kTileRows)
    transpose(To* out, const From* x, Plane plane, Space<2> space) {
  __shared__ float tile[kTile][kTile + 1];
  int64_t offset[2];
  offsets(offset, space, blockIdx.z, 2);
  out += offset[0];
  x += offset[1];
  const uint32_t a0 = blockIdx.x * kTile, b0 = blockIdx.y * kTile;
  for (uint32_t row = threadIdx.y; row < kTile; row += kTileRows) {
    const uint32_t a = a0 + threadIdx.x, b = b0 + row;
    if (a < plane.size_a && b < plane.size_b) tile[row][threadIdx.x] = to_f32(x[a + b * plane.x_b]);
  }
  __syncthreads();
  for (uint32_t row = threadIdx.y; row < kTile; row += kTileRows) {
    const uint32_t a = a0 + row, b = b0 + threadIdx.x;
    if (a < plane.size_a && b < plane.size_b)
      out[a * plane.out_a + b] = from_f32<To>(tile[threadIdx.x][row]);
  }
}

// True when the copy was a transposition that the tile kernel suits, and has been launched.
bool try_transpose(Stream stream, MutView out, View x, const Loops<2>& loops) {
  const int b = loops.rank - 1;
  int a = -1;
  for (int d = 0; d < b; ++d) {
    if (loops.stride[1][d] == 1 && loops.size[d] >= 8) a = d;
  }
  if (a < 0 || loops.size[b] < 8 || loops.stride[0][b] != 1 || loops.stride[1][b] == 1)
    return false;
  Loops<2> outer;
  for (int d = 0; d < b; ++d) {
    if (d == a) continue;
    outer.size[outer.rank] = loops.size[d];
    for (int n = 0; n < 2; ++n) outer.stride[n][outer.rank] = loops.stride[n][d];
    ++outer.rank;
  }
  if (outer.rank == 0) {
    outer.rank = 1;
    outer.size[0] = 1;
  }
  const int64_t tiles_b = ceil_div<int64_t>(loops.size[b], kTile);
  if (outer.numel() > 65535 || tiles_b > 65535) return false;
  const Plane plane{uint32_t(loops.size[a]), uint32_t(loops.size[b]), loops.stride[1][b],
                    loops.stride[0][a]};
  const dim3 grid(unsigned(ceil_div<int64_t>(loops.size[a], kTile)), unsigned(tiles_b),
                  unsigned(outer.numel()));
  const auto space = make_space(outer, 1);
  with_type(out.dtype, [&](auto to) {
    using To = decltype(to);
    const auto launch = [&](auto* from) {
      transpose<To><<<grid, dim3(kTile, kTileRows), 0, stream>>>(static_cast<To*>(out.mut()), from,
                                                                 plane, space);
    };
    if (x.dtype == DType::f16)
      launch(static_cast<const __half*>(x.data));
    else if (x.dtype == DType::bf16)
      launch(static_cast<const __nv_bfloat16*>(x.data));
    else
      launch(static_cast<const float*>(x.data));
  });
  check_launch();
  return true;
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    fill_kernel(void* out, DType dtype, float value, Space<1> space) {
  const uint32_t item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= space.items) return;
  int64_t offset[1];
  offsets(offset, space, item, 1);
  float values[V];
#pragma unroll
  for (int i = 0; i < V; ++i) values[i] = value;
  store<V>(out, dtype, offset[0], values);
}

}  // namespace

bool kernels_run_here() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, fill_kernel<1>);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();
    return false;
  }
  check(error);
  return true;
}

void copy(Stream stream, MutView out, View x) {
  in_parts(out, [&](int64_t begin, int dim, int64_t size) {
    const MutView to = dim < 0 ? out : out.slice(dim, begin, size);
    const View from = dim < 0 ? x : x.slice(dim, begin, size);
    const View* const views[2] = {&to, &from};
    const Loops<2> loops = make_loops<2>(views, 2);
    const bool flat = loops.rank == 1 && loops.stride[0][0] == 1 && loops.stride[1][0] == 1;
    if (flat && to.dtype == from.dtype) {
      check(cudaMemcpyAsync(to.mut(), from.data, size_t(to.bytes()), cudaMemcpyDeviceToDevice,
                            stream));
    } else if (!try_transpose(stream, to, from, loops)) {
      Terms terms;
      terms.count = 1;
      terms.data[0] = from.data;
      terms.dtype[0] = from.dtype;
      terms.factor[0] = 1.0f;
      launch_combine<1>(stream, to, terms, loops, access_width<2>(loops, views, 2));
    }
  });
}

void fill(Stream stream, MutView out, float value) {
  in_parts(out, [&](int64_t begin, int dim, int64_t size) {
    const MutView to = dim < 0 ? out : out.slice(dim, begin, size);
    const View* const views[1] = {&to};
    const Loops<1> loops = make_loops<1>(views, 1);
    const int width = access_width<1>(loops, views, 1);
    const auto space = make_space(loops, width == 8 ? 8 : 1);
    const unsigned blocks = unsigned(ceil_div<int64_t>(space.items, kThreads));
    if (width == 8)
      fill_kernel<8><<<blocks, kThreads, 0, stream>>>(to.mut(), to.dtype, value, space);
    else
      fill_kernel<1><<<blocks, kThreads, 0, stream>>>(to.mut(), to.dtype, value, space);
    check_launch();
  });
}

void lincomb(Stream stream, MutView out, std::span<const Term> terms) {
  if (terms.size() <= 2)
    combine_views<2>(stream, out, terms);
  else
    combine_views<kMaxTerms>(stream, out, terms);
}

}  // namespace orrery::cuda
