// Kernels of the selector: pooling, then scores and the choice in one kernel. No score leaves
// shared memory.
//
// Operations: 2 (Sq / 16) (Skv / 16) head_dim hq, and an exponential per pair of cells.
//
// Bytes: q and k once, 1/16 of that written and read again.
//
// Floor, Sq 44160, Skv 44672, 32/8 heads of 128: 63 GFLOP, 0.064 ms; 0.48 GB at 4.2 TB/s, 0.115 ms.
//
// Measured on an H200: 0.56 ms for lists of 128-row blocks, 0.61 ms of 64-row blocks, 0.50 ms of
// 64-row blocks for four heads.
//
// Reproduce: bench/cuda/build_sm90.sh build/sm90.so, then
// python3 bench/cuda/sm90_attention.py build/sm90.so select
#include <cuda_runtime.h>

#include <cmath>
#include <type_traits>

#include "block_choice.cuh"
#include "sm90_pipeline.cuh"
#include "sm90_select.h"

namespace orrery::cuda {
namespace sm90 {
namespace {

constexpr int kCell = 16;   // tokens
constexpr int kBlock = 64;  // tokens of the blocks that are scored
constexpr int kBlockCells = kBlock / kCell;
constexpr int kTileCells = 64;  // pooled keys of a tile, and pooled queries of a CTA
constexpr int kTileBlocks = kTileCells / kBlockCells;
constexpr int kStages = 2;     // of K tiles, for each warpgroup
constexpr int kMaxGroups = 3;  // warpgroups of a CTA, which take the K tiles in turn
constexpr int kGroupThreads = 128;
constexpr int kPoolThreads = 256;

// Where a cell stands among the pooled rows: inside each 16 cells (4 blocks) such that one thread's
// share of the product holds all four key cells of a block and two of its four query cells, the
// other two being with lane ^ 4.
__host__ __device__ constexpr int pooled_row(int cell) {
  return cell / 16 * 16 + cell % 4 / 2 * 8 + cell / 4 % 4 * 2 + cell % 2;
}

// ---- Pooling ----------------------------------------------------------------------------------

struct PoolArgs {
  const __nv_bfloat16* x;  // [tokens, heads, kD]
  __nv_bfloat16* pooled;   // [cells padded to a tile, heads, kD], rows by pooled_row
  int64_t stride;
  int tokens;
  int heads;
  int cells;         // padded
  float multiplier;  // of the mean, before the one rounding
};

// A warp pools one cell of one head.
template <int kD>
__global__ void __launch_bounds__(kPoolThreads) pool_kernel(const PoolArgs a) {
  constexpr int kColumns = kD / 32;  // of a lane
  const int64_t index = int64_t{blockIdx.x} * (kPoolThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (index >= int64_t{a.cells} * a.heads) return;
  const int cell = static_cast<int>(index / a.heads);
  const int head = static_cast<int>(index % a.heads);
  const int first = cell * kCell;
  const int count = min(kCell, a.tokens - first);
  const __nv_bfloat16* from = a.x + first * a.stride + int64_t{head} * kD + lane * kColumns;
  float sum[kColumns] = {};
#pragma unroll
  for (int token = 0; token < kCell; ++token) {
    if (token < count) {
      uint32_t packed[kColumns / 2];
      if constexpr (kColumns == 4) {
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(from + token * a.stride));
        packed[0] = two.x;
        packed[1] = two.y;
      } else {
        packed[0] = __ldg(reinterpret_cast<const uint32_t*>(from + token * a.stride));
      }
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        sum[i] += i % 2 == 0 ? low_bf16(packed[i / 2]) : high_bf16(packed[i / 2]);
      }
    }
  }
  const float divisor = static_cast<float>(max(count, 1));
  uint32_t* to = reinterpret_cast<uint32_t*>(
      a.pooled + (int64_t{pooled_row(cell)} * a.heads + head) * kD + lane * kColumns);
#pragma unroll
  for (int i = 0; i < kColumns; i += 2) {
    to[i / 2] = pack_bf16(sum[i] / divisor * a.multiplier, sum[i + 1] / divisor * a.multiplier);
  }
}

// ---- Scores and top-k -------------------------------------------------------------------------

struct SelectArgs {
  int q_cells;  // real ones
  int k_cells;
  int k_tiles;
  int group;
  int heads_per_list;
  int merge_q;  // block_q / 64
  int merge_k;  // block_k / 64
  int list_rows;
  int blocks;     // of block_k keys
  int score_row;  // floats between rows of scores in shared memory
  int head_end;
  int tail_begin;
  int budget;
  float mass;
  int dense_head_end;
  int dense_tail_begin;
  int32_t* indices;
  int32_t* counts;
  int capacity;
  float* scores;
};

template <int kD, int kGroups>
struct SelectLayout {
  static constexpr int kThreads = kGroups * kGroupThreads;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kChunks = kD / 64;
  static constexpr int kChunkBytes = kTileCells * 128;
  static constexpr int kTileBytes = kChunks * kChunkBytes;
  // One buffer of queries; then a ring of keys for each warpgroup.
  static constexpr int kBarriers = (1 + kGroups * kStages) * kTileBytes;
  static constexpr RingShape kQ{1, kTileBytes, 0, kBarriers};
  static constexpr RingShape kK{kStages, kTileBytes, kTileBytes, kQ.barriers_end(), kGroups};
  static constexpr int kScores = (kK.barriers_end() + 15) / 16 * 16;
};

// log2(2^a + 2^b).
__device__ __forceinline__ float log2_add(float a, float b) {
  const float top = fmaxf(a, b);
  if (top == -INFINITY) return a + b;  // -inf, or NaN
  return top + log2_approx(exp2_approx(a - top) + exp2_approx(b - top));
}

// Scores, in log2 units, of 16 query blocks against all key blocks of one head into shared memory.
// Each warpgroup takes every kGroups-th tile of keys through stages of its own: the more of them,
// the more of the latency of loads, products and exponentials is hidden.
template <int kD, int kGroups>
__device__ __forceinline__ void score_blocks(const SelectArgs& a, const CUtensorMap* map_q,
                                             const CUtensorMap* map_k, float* scores, int head,
                                             int q_tile,
                                             Ring<SelectLayout<kD, kGroups>::kQ>& q_ring,
                                             Ring<SelectLayout<kD, kGroups>::kK>& k_ring) {
  using L = SelectLayout<kD, kGroups>;
  const int group = warp_uniform(threadIdx.x / kGroupThreads);
  const int warp = warp_uniform(threadIdx.x % kGroupThreads / 32), lane = threadIdx.x % 32;
  const bool loads = threadIdx.x % kGroupThreads == 0;
  const auto load = [&](const auto& ring, const CUtensorMap* map, int tile, int of_head) {
    mbarrier_arrive_expect(ring.full(), L::kTileBytes);
#pragma unroll
    for (int chunk = 0; chunk < L::kChunks; ++chunk) {
      tma_load_4d(ring.buffer() + chunk * L::kChunkBytes, map, 0, tile * kTileCells, chunk, of_head,
                  ring.full(), kEvictLast);
    }
  };
  if (threadIdx.x == 0) load(q_ring, map_q, q_tile, head);
  if (loads) {
    auto ahead = k_ring;
    for (int i = 0; i < kStages && group + i * kGroups < a.k_tiles; ++i, ahead.next()) {
      load(ahead, map_k, group + i * kGroups, head / a.group);
    }
  }
  q_ring.wait();

  // This thread's query block and the cells of its two accumulator rows.
  const int block_q = 4 * warp + lane / 8;
  const int q_cell = (q_tile * kTileBlocks + block_q) * kBlockCells + lane / 4 % 2;
  const bool q_valid[2] = {q_cell < a.q_cells, q_cell + 2 < a.q_cells};
  const uint64_t q = k_major_descriptor(q_ring.buffer());

  for (int tile = group; tile < a.k_tiles; tile += kGroups, k_ring.next()) {
    k_ring.wait();
    float t[kTileCells / 2];
    const uint64_t k = k_major_descriptor(k_ring.buffer());
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      const uint32_t at = step / 4 * L::kChunkBytes + step % 4 * 32;
      wgmma_ss(t, advance(q, at), advance(k, at), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(t);
    k_ring.template release<1>(k_ring.slot(), lane);
    if (loads) {
      // Every warp of the group has read the buffer. Also after the last tiles: no phase of a
      // barrier passes unseen, whatever head comes next.
      mbarrier_wait(k_ring.empty(k_ring.slot()), k_ring.at.phase);
      const int next = tile + kStages * kGroups;
      if (next < a.k_tiles) load(k_ring, map_k, next, head / a.group);
    }

    // Past the end of the cells lie zeros, which must not count; most tiles have none.
    auto reduce = [&](auto edge) {
#pragma unroll
      for (int i = 0; i < kTileBlocks / 4; ++i) {
        const int block = tile * kTileBlocks + 4 * i + lane % 4;
        float x[8];  // key cells 0 to 3 of the thread's first row, then of its second
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const int cell = n % 4, row = n / 4;
          x[n] = t[4 * (2 * i + cell / 2) + 2 * row + cell % 2];
          if constexpr (edge.value) {
            if (!q_valid[row] || block * kBlockCells + cell >= a.k_cells) x[n] = -INFINITY;
          }
        }
        float top = x[0];
#pragma unroll
        for (int n = 1; n < 8; ++n) top = fmaxf(top, x[n]);
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 4));
        const float base = top == -INFINITY ? 0.0f : top;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; ++n) sum += exp2_approx(x[n] - base);
        sum += __shfl_xor_sync(0xffffffffu, sum, 4);
        if (lane / 4 % 2 == 0) scores[block_q * a.score_row + block] = base + log2_approx(sum);
      }
    };
    if ((tile + 1) * kTileCells > a.k_cells || (q_tile + 1) * kTileCells > a.q_cells) {
      reduce(std::true_type{});
    } else {
      reduce(std::false_type{});
    }
  }
  q_ring.next();
  __syncthreads();
}

// Joins the scores of 64 x 64 blocks to those of larger blocks, in place.
template <int kThreads>
__device__ __forceinline__ void merge_scores(const SelectArgs& a, float* scores) {
  if (a.merge_q == 1 && a.merge_k == 1) return;
  const int small_blocks = a.k_tiles * kTileBlocks;
  for (int row = 0; row < kTileBlocks / a.merge_q; ++row) {
    for (int base = 0; base < a.blocks; base += kThreads) {
      const int block = base + threadIdx.x;
      float joined = -INFINITY;
      if (block < a.blocks) {
        for (int i = 0; i < a.merge_q; ++i) {
          for (int j = 0; j < a.merge_k && block * a.merge_k + j < small_blocks; ++j) {
            const float* from = scores + (row * a.merge_q + i) * a.score_row;
            joined = log2_add(joined, from[block * a.merge_k + j]);
          }
        }
      }
      __syncthreads();
      if (block < a.blocks) scores[row * a.score_row + block] = joined;
      __syncthreads();
    }
  }
}

// Adds each block's share of its row's estimated softmax; `shares` may be `scores`. One warp a row.
template <int kWarps>
__device__ __forceinline__ void add_shares(const SelectArgs& a, const float* scores, float* shares,
                                           bool first) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int row = warp; row < kTileBlocks / a.merge_q; row += kWarps) {
    const float* from = scores + row * a.score_row;
    float* to = shares + row * a.score_row;
    float top = -INFINITY, sum = 0.0f;
    for (int b = lane; b < a.blocks; b += 32) top = fmaxf(top, from[b]);
    for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
    const float base = top == -INFINITY ? 0.0f : top;
    for (int b = lane; b < a.blocks; b += 32) sum += exp2_approx(from[b] - base);
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    for (int b = lane; b < a.blocks; b += 32) {
      to[b] = (first ? 0.0f : to[b]) + exp2_approx(from[b] - base) / sum;
    }
  }
  __syncthreads();
}

// A warp as a team of count_of_mass().
struct WarpTeam {
  __device__ __forceinline__ int first() const { return static_cast<int>(threadIdx.x % 32); }
  __device__ __forceinline__ int size() const { return 32; }
  __device__ __forceinline__ float sum(float x) const {
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
  }
};

// The largest `cut` such that at least `wanted` of the keys reach it; `exact` says that exactly
// that many do. Called by a whole warp, with 0 < wanted <= end - begin.
template <typename Key>
__device__ __forceinline__ uint32_t find_cut(int begin, int end, int wanted, const Key& key,
                                             bool* exact) {
  const int lane = threadIdx.x % 32;
  uint32_t low = 0xffffffffu, high = 0;
  for (int b = begin + lane; b < end; b += 32) {
    const uint32_t k = key(b);
    low = min(low, k);
    high = max(high, k);
  }
  low = __reduce_min_sync(0xffffffffu, low);
  high = __reduce_max_sync(0xffffffffu, high);
  // The bits above the first that differs are common to all keys.
  const int bits = 32 - __clz(low ^ high);
  uint32_t cut = bits == 32 ? 0 : high >> bits << bits;
  *exact = end - begin == wanted;
  for (int bit = bits - 1; bit >= 0 && !*exact; --bit) {
    const uint32_t trial = cut | 1u << bit;
    int count = 0;
    for (int b = begin + lane; b < end; b += 32) count += key(b) >= trial;
    count = __reduce_add_sync(0xffffffffu, count);
    if (count >= wanted) cut = trial;
    *exact = count == wanted;
  }
  return cut;
}

// Whether no row has anything to choose.
__device__ __forceinline__ bool keeps_all(const SelectArgs& a) {
  const int candidates = a.tail_begin - a.head_end;
  return candidates == 0 || (a.mass == 0.0f && a.budget >= candidates);
}

// Writes the lists of this CTA's rows from what ranks the blocks, which become sortable integers in
// place. One warp a row.
template <int kWarps>
__device__ __forceinline__ void write_lists(const SelectArgs& a, float* ranks, int list,
                                            int first_row) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int r = warp; r < kTileBlocks / a.merge_q; r += kWarps) {
    const int row = first_row + r;
    if (row >= a.list_rows) break;
    float* rank = ranks + r * a.score_row;
    uint32_t* keys = reinterpret_cast<uint32_t*>(rank);
    auto key = [&](int b) { return keys[b]; };
    const int candidates = a.tail_begin - a.head_end;
    bool all = row < a.dense_head_end || row >= a.dense_tail_begin || keeps_all(a);
    bool finite = true;
    int wanted = a.budget;
    uint32_t cut = 0, spread_cut = 0;
    if (!all) {
      for (int b = a.head_end + lane; b < a.tail_begin; b += 32) {
        finite &= isfinite(rank[b]) != 0;
        keys[b] = sortable(rank[b]);
      }
      finite = __all_sync(0xffffffffu, finite);
      if (a.mass > 0.0f) {
        wanted = candidates;
        if (finite) {
          float held = 0.0f;
          for (int b = lane; b < a.head_end; b += 32) held += rank[b];
          for (int b = a.tail_begin + lane; b < a.blocks; b += 32) held += rank[b];
          held = WarpTeam{}.sum(held);
          wanted = held >= a.mass
                       ? 0
                       : count_of_mass(WarpTeam{}, a.head_end, a.tail_begin, a.mass - held, key);
        }
        all = wanted == candidates;
      }
      if (finite && wanted > 0 && !all) {
        bool exact;
        cut = find_cut(a.head_end, a.tail_begin, wanted, key, &exact);
        if (!exact) {  // equal ranks at the cut: some of them are in
          int above = 0;
          for (int b = a.head_end + lane; b < a.tail_begin; b += 32) above += key(b) > cut;
          above = __reduce_add_sync(0xffffffffu, above);
          auto tie = [&](int b) { return key(b) == cut ? ~spread(b) : 0u; };
          spread_cut = find_cut(a.head_end, a.tail_begin, wanted - above, tie, &exact);
        }
      }
    }
    __syncwarp();  // keys written by other lanes are read below
    const int64_t at = int64_t{list} * a.list_rows + row;
    int32_t* to = a.indices + at * a.capacity;
    int written = 0;
    for (int base = 0; base < a.blocks; base += 32) {
      const int b = base + lane;
      bool keep = b < a.blocks;
      if (keep && !all && b >= a.head_end && b < a.tail_begin) {
        if (wanted == 0 || !finite) {
          keep = b - a.head_end < wanted;
        } else {
          keep = key(b) > cut || (key(b) == cut && ~spread(b) >= spread_cut);
        }
      }
      const uint32_t votes = __ballot_sync(0xffffffffu, keep);
      if (keep) to[written + __popc(votes & ((1u << lane) - 1))] = b;
      written += __popc(votes);
    }
    if (lane == 0) a.counts[at] = written;
  }
}

// One CTA: 16 query blocks of 64 rows against all key blocks, for the heads of one list.
template <int kD, int kGroups>
__global__ void __launch_bounds__(kGroups* kGroupThreads)
    select_kernel(const __grid_constant__ CUtensorMap map_q,
                  const __grid_constant__ CUtensorMap map_k, const SelectArgs a) {
  using L = SelectLayout<kD, kGroups>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = shared_address(shared);
  float* scores = reinterpret_cast<float*>(shared + L::kScores);
  if (threadIdx.x == 0) {
    Ring<L::kQ>::init(smem, 1);
    Ring<L::kK>::init(smem, kGroupThreads / 32);
    mbarrier_init_fence();
  }
  __syncthreads();

  const int q_tile = blockIdx.x, list = blockIdx.y;
  float* ranks = scores;
  Ring<L::kQ> q_ring{smem};
  Ring<L::kK> k_ring{smem, warp_uniform(threadIdx.x / kGroupThreads) * kStages};
  const bool needs_scores = a.scores != nullptr || !keeps_all(a);
  const bool by_share = a.heads_per_list > 1 || a.mass > 0.0f;
  for (int i = 0; needs_scores && i < a.heads_per_list; ++i) {
    score_blocks<kD, kGroups>(a, &map_q, &map_k, scores, list * a.heads_per_list + i, q_tile,
                              q_ring, k_ring);
    merge_scores<L::kThreads>(a, scores);
    if (by_share) {
      if (a.heads_per_list > 1) ranks = scores + kTileBlocks * a.score_row;
      add_shares<L::kWarps>(a, scores, ranks, i == 0);
    }
  }
  const int rows = kTileBlocks / a.merge_q;
  if (a.scores != nullptr) {
    for (int r = 0; r < rows && q_tile * rows + r < a.list_rows; ++r) {
      float* to = a.scores + (int64_t{list} * a.list_rows + q_tile * rows + r) * a.blocks;
      const float unit = by_share ? 1.0f : kLn2;
      for (int b = threadIdx.x; b < a.blocks; b += L::kThreads) {
        to[b] = ranks[r * a.score_row + b] * unit;
      }
    }
    __syncthreads();
  }
  write_lists<L::kWarps>(a, ranks, list, q_tile * rows);
}

// ---- Launch -----------------------------------------------------------------------------------

int padded_cells(int64_t tokens) {
  return static_cast<int>((tokens + kTileCells * kCell - 1) / (kTileCells * kCell) * kTileCells);
}

int score_row_floats(const Sm90SelectParams& p) {
  return padded_cells(p.skv) / kBlockCells + 1;  // odd, so that rows start in different banks
}

template <int kD, int kGroups>
int select_shared_bytes(const Sm90SelectParams& p) {
  const int64_t floats =
      int64_t{kTileBlocks} * score_row_floats(p) * (p.heads_per_list > 1 ? 2 : 1);
  const int64_t bytes = SelectLayout<kD, kGroups>::kScores + 4 * floats;
  return static_cast<int>(bytes < (1 << 30) ? bytes : 1 << 30);
}

// With as many warpgroups as leave room for the scores; sm90_select_supports() knows that one does.
template <int kD, int kGroups>
const char* launch_groups(const Sm90SelectParams& p, const CUtensorMap& map_q,
                          const CUtensorMap& map_k, const SelectArgs& a, cudaStream_t stream) {
  const int bytes = select_shared_bytes<kD, kGroups>(p);
  if constexpr (kGroups > 1) {
    if (bytes > kMaxSharedBytes) return launch_groups<kD, kGroups - 1>(p, map_q, map_k, a, stream);
  }
  const dim3 grid(static_cast<unsigned>(padded_cells(p.sq) / kTileCells),
                  static_cast<unsigned>(p.hq / p.heads_per_list));
  return launch(select_kernel<kD, kGroups>,
                {.ctas = grid, .threads = kGroups * kGroupThreads, .shared_bytes = bytes}, stream,
                map_q, map_k, a);
}

template <int kD>
const char* launch_select(const Sm90SelectParams& p, cudaStream_t stream) {
  const int q_cells = padded_cells(p.sq), k_cells = padded_cells(p.skv);
  __nv_bfloat16* pooled_q = static_cast<__nv_bfloat16*>(p.workspace);
  __nv_bfloat16* pooled_k = pooled_q + int64_t{q_cells} * p.hq * kD;
  const PoolArgs pools[2] = {{static_cast<const __nv_bfloat16*>(p.q), pooled_q, p.q_stride,
                              static_cast<int>(p.sq), p.hq, q_cells, p.scale * kLog2E},
                             {static_cast<const __nv_bfloat16*>(p.k), pooled_k, p.k_stride,
                              static_cast<int>(p.skv), p.hkv, k_cells, 1.0f}};
  for (const PoolArgs& pool : pools) {
    const int64_t warps = int64_t{pool.cells} * pool.heads;
    pool_kernel<kD><<<static_cast<unsigned>((warps + kPoolThreads / 32 - 1) / (kPoolThreads / 32)),
                      kPoolThreads, 0, stream>>>(pool);
  }

  CUtensorMap map_q, map_k;
  constexpr int kBytes = sizeof(__nv_bfloat16);
  if (!encode_head_map(&map_q, pooled_q, kBytes, q_cells, p.hq, kD, int64_t{p.hq} * kD,
                       kTileCells) ||
      !encode_head_map(&map_k, pooled_k, kBytes, k_cells, p.hkv, kD, int64_t{p.hkv} * kD,
                       kTileCells)) {
    return "the driver refused a tensor map";
  }
  SelectArgs a{};
  a.q_cells = static_cast<int>((p.sq + kCell - 1) / kCell);
  a.k_cells = static_cast<int>((p.skv + kCell - 1) / kCell);
  a.k_tiles = k_cells / kTileCells;
  a.group = p.hq / p.hkv;
  a.heads_per_list = p.heads_per_list;
  a.merge_q = p.block_q / kBlock;
  a.merge_k = p.block_k / kBlock;
  a.list_rows = static_cast<int>((p.sq + p.block_q - 1) / p.block_q);
  a.blocks = static_cast<int>((p.skv + p.block_k - 1) / p.block_k);
  a.score_row = score_row_floats(p);
  a.head_end = p.head_end;
  a.tail_begin = p.tail_begin;
  a.budget = p.budget;
  a.mass = p.mass;
  a.dense_head_end = p.dense_head_end;
  a.dense_tail_begin = p.dense_tail_begin;
  a.indices = p.indices;
  a.counts = p.counts;
  a.capacity = p.capacity;
  a.scores = p.scores;

  return launch_groups<kD, kMaxGroups>(p, map_q, map_k, a, stream);
}

bool is_power_of_two(int x) { return x > 0 && (x & (x - 1)) == 0; }

}  // namespace
}  // namespace sm90

size_t sm90_select_workspace(const Sm90SelectParams& p) {
  return (size_t(sm90::padded_cells(p.sq)) * p.hq + size_t(sm90::padded_cells(p.skv)) * p.hkv) *
         p.head_dim * 2;
}

const char* sm90_select_supports(const Sm90SelectParams& p) {
  using namespace sm90;
  if (const char* reason = device_reason()) return reason;
  if (p.head_dim != 64 && p.head_dim != 128) return "head_dim must be 64 or 128";
  if (p.hq <= 0 || p.hkv <= 0 || p.hq % p.hkv != 0) {
    return "the query heads must be a multiple of the KV heads";
  }
  if (p.sq <= 0 || p.skv <= 0 || p.sq > kMaxRows || p.skv > kMaxRows) {
    return "sq and skv must be between 1 and 2^30";
  }
  if (!std::isfinite(p.scale)) return "the scale must be finite";
  if (p.heads_per_list <= 0 || (p.hq / p.hkv) % p.heads_per_list != 0) {
    return "heads_per_list must divide the query heads of one KV head";
  }
  if (!is_power_of_two(p.block_q) || p.block_q < 64 || p.block_q > 1024 ||
      !is_power_of_two(p.block_k) || p.block_k < 64 || p.block_k > 1024) {
    return "block_q and block_k must be powers of two from 64 to 1024";
  }
  const int64_t blocks = (p.skv + p.block_k - 1) / p.block_k;
  if (!(p.mass >= 0)) return "the mass must not be negative";
  if (p.head_end < 0 || p.tail_begin < p.head_end || p.tail_begin > blocks || p.budget < 0) {
    return "the protected blocks must be a head and a tail of the key blocks";
  }
  if (p.hq / p.heads_per_list > 65535) return "there can be at most 65535 lists a row";
  if (!aligned_rows(p.q, p.q_stride) || !aligned_rows(p.k, p.k_stride)) {
    return "q and k must be 16-byte aligned with row strides of a multiple of 8 elements";
  }
  const int bytes =
      p.head_dim == 128 ? select_shared_bytes<128, 1>(p) : select_shared_bytes<64, 1>(p);
  if (bytes > kMaxSharedBytes) {
    return "16 rows of block scores must fit in shared memory: fewer keys, or lists for one head";
  }
  return nullptr;
}

const char* sm90_select(const Sm90SelectParams& p, void* stream) {
  if (const char* reason = sm90_select_supports(p)) return reason;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  return p.head_dim == 128 ? sm90::launch_select<128>(p, s) : sm90::launch_select<64>(p, s);
}

}  // namespace orrery::cuda
