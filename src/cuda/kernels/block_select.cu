// Block selection in steps around one matrix product per head: cell means, scores of block pairs,
// their shares of the softmax where lists are shared or a mass is wanted, the best blocks of each
// row.
//
// Layout: x [S, heads, D] -> pooled [heads, cells, D], cells of 16 tokens; t [rows * cells_q,
// cells] f32 = pooled q . pooled k (by cuBLASLt) -> scores [rows, blocks] f32 -> ascending lists.
// Flops: 2 cells_q cells_k D per head, in the product. Bytes: q and k once, t written and read once
// (2 GB for 32 heads of 2760 x 2816 cells), scores a few times from cache. Floor at that size in
// f32: 0.21 ms for pooling, 0.5 ms for t, 1.3 ms for the product in fp32. Measured on an H200
// (bench/device_ops select_blocks): 3.97 ms. bf16 with head_dim 64 or 128 runs in sm90_select.cu.
#include "cuda/kernels.h"
#include "cuda/kernels/block_choice.cuh"
#include "cuda/kernels/common.cuh"

namespace orrery::cuda {

namespace {

constexpr int kCell = 16;
constexpr int kRowThreads = 256;
constexpr float kLn2 = 0.6931471805599453f;

struct PoolShape {
  int64_t tokens, cells, d, row_stride, head_stride;
};

template <typename T>
__global__ void __launch_bounds__(128)
    pool_kernel(T* pooled, const T* x, PoolShape s, float factor) {
  const int64_t cell = blockIdx.x, head = blockIdx.y;
  const int64_t begin = cell * kCell;
  const int count = int(min(int64_t{kCell}, s.tokens - begin));
  x += begin * s.row_stride + head * s.head_stride;
  pooled += (head * s.cells + cell) * s.d;
  for (int64_t i = threadIdx.x; i < s.d; i += blockDim.x) {
    float sum = 0.0f;
    for (int n = 0; n < count; ++n) sum += to_f32(x[n * s.row_stride + i]);
    pooled[i] = from_f32<T>(sum / float(count) * factor);
  }
}

struct ScoreShape {
  int64_t rows, blocks, q_cells, k_cells, t_row, score_row;
  int64_t cells_q, cells_k;  // in a block
};

__global__ void __launch_bounds__(256) score_kernel(float* scores, const float* t, ScoreShape s) {
  const int64_t item = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (item >= s.rows * s.blocks) return;
  const int64_t row = item / s.blocks, block = item - row * s.blocks;
  const int64_t q_end = min(s.q_cells, (row + 1) * s.cells_q),
                k_end = min(s.k_cells, (block + 1) * s.cells_k);
  float top = -INFINITY;
  bool is_nan = false;
  for (int64_t i = row * s.cells_q; i < q_end; ++i) {
    for (int64_t j = block * s.cells_k; j < k_end; ++j) {
      const float value = t[i * s.t_row + j];
      is_nan |= isnan(value);
      top = fmaxf(top, value);
    }
  }
  float sum = 0.0f;
  for (int64_t i = row * s.cells_q; i < q_end; ++i) {
    for (int64_t j = block * s.cells_k; j < k_end; ++j) sum += exp2f(t[i * s.t_row + j] - top);
  }
  float score = kLn2 * top + logf(sum);
  if (is_nan)
    score = NAN;
  else if (isinf(top))
    score = top;
  scores[row * s.score_row + block] = score;
}

// One block of threads per row. A score that is not finite makes the row's shares NaN, but for
// -inf, whose share is zero.
__global__ void __launch_bounds__(kRowThreads)
    share_kernel(float* ranks, const float* scores, int64_t blocks, int64_t rank_row,
                 int64_t score_row, bool first) {
  __shared__ float shared[32];
  ranks += blockIdx.x * rank_row;
  scores += blockIdx.x * score_row;
  float top = -INFINITY;
  for (int64_t i = threadIdx.x; i < blocks; i += kRowThreads) top = fmaxf(top, scores[i]);
  top = block_max<kRowThreads>(top, shared);
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < blocks; i += kRowThreads) sum += expf(scores[i] - top);
  sum = block_sum<kRowThreads>(sum, shared);
  for (int64_t i = threadIdx.x; i < blocks; i += kRowThreads) {
    const float share = expf(scores[i] - top) / sum;
    ranks[i] = first ? share : ranks[i] + share;
  }
}

struct TopShape {
  TopBlocks top;
  int64_t capacity, rank_row;
  bool chooses;  // there are ranks
};

// The `wanted`-th largest key(i) of those i in [begin, end) for which keep(i), by digits of 8 bits;
// `wanted` becomes how many of exactly that key belong to the largest. Called by the whole block.
template <typename Key, typename Keep>
__device__ uint32_t nth_largest(uint32_t& wanted, int begin, int end, const Key& key,
                                const Keep& keep) {
  __shared__ uint32_t histogram[256];
  __shared__ uint32_t prefix_shared, wanted_shared;
  uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    histogram[threadIdx.x] = 0;
    __syncthreads();
    for (int i = begin + int(threadIdx.x); i < end; i += kRowThreads) {
      const uint32_t k = key(i);
      if (keep(i) && (shift == 24 || k >> (shift + 8) == prefix))
        atomicAdd(&histogram[k >> shift & 255u], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = 255;
      while (digit > 0 && histogram[digit] < wanted) wanted -= histogram[digit--];
      prefix_shared = prefix << 8 | uint32_t(digit);
      wanted_shared = wanted;
    }
    __syncthreads();
    prefix = prefix_shared;
    wanted = wanted_shared;
    __syncthreads();
  }
  return prefix;
}

// A whole block as a team of count_of_mass().
struct BlockTeam {
  float* shared;  // of 32
  __device__ int first() const { return int(threadIdx.x); }
  __device__ int size() const { return kRowThreads; }
  __device__ float sum(float x) const { return block_sum<kRowThreads>(x, shared); }
};

// One block of threads per row: a digit search finds the rank at the cut and, among equals there,
// the hash at the cut; one ordered pass writes the kept blocks.
__global__ void __launch_bounds__(kRowThreads)
    top_kernel(int32_t* indices, int32_t* counts, const float* ranks, TopShape s) {
  static_assert(kRowThreads == 256, "one thread clears one digit's counter");
  __shared__ int warp_totals[kRowThreads / 32];
  __shared__ float shared[32];
  const BlockGrid& grid = s.top.grid;
  const int64_t row = blockIdx.x, grid_row = s.top.first_row + row;
  ranks += row * s.rank_row;
  indices += row * s.capacity;
  const int thread = threadIdx.x;
  const int begin = int(grid.head_end), end = int(grid.tail_begin), blocks = int(grid.blocks);
  bool all = !s.chooses || grid_row < grid.dense_head_end || grid_row >= grid.dense_tail_begin ||
             begin == end;

  bool is_finite = true;
  if (!all) {
    for (int i = begin + thread; i < end; i += kRowThreads)
      is_finite = is_finite && isfinite(ranks[i]);
  }
  const bool first_ones = !__syncthreads_and(is_finite);

  int count = int(s.top.budget);
  if (!all && s.top.mass > 0.0f) {
    float held = 0.0f;
    for (int i = thread; i < begin; i += kRowThreads) held += ranks[i];
    for (int i = end + thread; i < blocks; i += kRowThreads) held += ranks[i];
    held = block_sum<kRowThreads>(held, shared);
    if (first_ones)
      count = end - begin;
    else
      count = held >= s.top.mass ? 0
                                 : count_of_mass(BlockTeam{shared}, begin, end, s.top.mass - held,
                                                 [&](int i) { return sortable(ranks[i]); });
  }
  all = all || count >= end - begin;

  uint32_t cut = 0xffffffffu, hash_cut = 0;
  if (!all && !first_ones && count > 0) {
    uint32_t wanted = uint32_t(count);
    const auto key = [&](int i) { return sortable(ranks[i]); };
    cut = nth_largest(wanted, begin, end, key, [](int) { return true; });
    hash_cut = nth_largest(
        wanted, begin, end, [](int i) { return ~spread(i); }, [&](int i) { return key(i) == cut; });
  }

  int written = 0;
  for (int base = 0; base < blocks; base += kRowThreads) {
    const int i = base + thread;
    bool keep = i < blocks;
    if (keep && !all && i >= begin && i < end) {
      if (first_ones) {
        keep = i - begin < count;
      } else {
        const uint32_t key = sortable(ranks[i]);
        keep = key > cut || (key == cut && ~spread(i) >= hash_cut);
      }
    }
    const unsigned votes = __ballot_sync(kAllLanes, keep);
    if (thread % 32 == 0) warp_totals[thread / 32] = __popc(votes);
    __syncthreads();
    int position = written + __popc(votes & ((1u << thread % 32) - 1u));
    for (int w = 0; w < kRowThreads / 32; ++w) {
      if (w < thread / 32) position += warp_totals[w];
      written += warp_totals[w];
    }
    if (keep) indices[position] = i;
    __syncthreads();
  }
  if (thread == 0) counts[row] = written;
}

}  // namespace

void pool_cells(Stream stream, MutView pooled, View x, float factor) {
  const PoolShape s{x.dim(0), pooled.dim(1), x.dim(2), x.stride(0), x.dim(1) > 1 ? x.stride(1) : 0};
  const dim3 grid(unsigned(s.cells), unsigned(x.dim(1)));
  with_type(x.dtype, [&](auto type) {
    using T = decltype(type);
    pool_kernel<T><<<grid, 128, 0, stream>>>(static_cast<T*>(pooled.mut()),
                                             static_cast<const T*>(x.data), s, factor);
  });
  check_launch();
}

void score_blocks(Stream stream, MutView scores, View t, int64_t cells_q, int64_t cells_k) {
  const ScoreShape s{scores.dim(0), scores.dim(1),    t.dim(0), t.dim(1),
                     t.stride(0),   scores.stride(0), cells_q,  cells_k};
  const unsigned blocks = unsigned(ceil_div<int64_t>(s.rows * s.blocks, 256));
  score_kernel<<<blocks, 256, 0, stream>>>(scores.as<float>(), t.as<float>(), s);
  check_launch();
}

void add_shares(Stream stream, MutView ranks, View scores, bool first) {
  share_kernel<<<unsigned(scores.dim(0)), kRowThreads, 0, stream>>>(
      ranks.as<float>(), scores.as<float>(), scores.dim(1), ranks.stride(0), scores.stride(0),
      first);
  check_launch();
}

void top_blocks(Stream stream, MutView indices, MutView counts, View ranks, const TopBlocks& top) {
  const TopShape s{top, indices.stride(0), ranks ? ranks.stride(0) : 0, bool(ranks)};
  top_kernel<<<unsigned(counts.dim(0)), kRowThreads, 0, stream>>>(
      indices.as<int32_t>(), counts.as<int32_t>(), ranks.as<float>(), s);
  check_launch();
}

}  // namespace orrery::cuda
