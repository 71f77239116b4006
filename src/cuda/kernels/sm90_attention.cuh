// Attention for Hopper: the kernel template behind sm90_attention.h.
//
// One CTA is a producer warpgroup, of which one thread feeds tiles of 128 keys through TMA rings,
// and two consumer warpgroups of 64 query rows each. docs/hopper-attention.md has the design.
//
// Operations: 4 Sq Skv head_dim hq, times the share of blocks kept, or half of it when causal.
//
// Bytes: q, k, v and out once, since K and V of a KV head stay in L2; never the bound.
//
// Floor, Sq 44160, Skv 44672, 32/8 heads of 128: 32.3 TFLOP at 989.5 TFLOP/s, 32.7 ms; at the
// 1.61 GHz that an H200's 700 W allow, 37.1 ms.
//
// Best measured there: 42.3 ms dense (763 TFLOP/s, tensor pipe 94% busy); with 184 of 698 blocks
// 14.3 ms for per-head lists, 11.4 ms for lists of four heads.
//
// Reproduce: bench/cuda/build_sm90.sh build/sm90.so, then
// python3 bench/cuda/sm90_attention.py build/sm90.so dense sparse
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "sm90.cuh"
#include "sm90_attention.h"
#include "sm90_host.h"

namespace orrery::cuda::sm90 {

// Which rows the two consumer warpgroups of a CTA hold.
enum class RowMapping {
  kRowPair,      // 128 consecutive rows of one head, 64 each; they share every K/V tile
  kHeadPair,     // the same 64 rows of two heads of one KV head; they share every K/V tile
  kIndependent,  // two unrelated 64-row blocks, each with its own list and its own K/V ring
};

struct AttentionConfig {
  int head_dim;
  RowMapping mapping;
  bool sparse;  // tiles come from a list of 64-key blocks instead of consecutive keys
  bool causal;
  int cluster;   // CTAs that share K/V tiles by multicast, each with other heads of the KV head
  int k_stages;  // depth of the K ring
  int v_stages;  // depth of the V ring
};

constexpr int kTileKeys = 128;
constexpr int kListBlock = 64;  // keys per list entry as the kernel sees it: two fill a tile
constexpr int kRows = 64;       // query rows of a warpgroup
constexpr int kConsumers = 2;   // warpgroups
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kChunkColumns = 64;
constexpr int kChunkRowBytes = kChunkColumns * 2;

// Registers a thread after reallocation; a CTA of 384 threads starts with 168 each.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 3 * 168,
              "reallocation cannot hand out more registers than the CTA starts with");

// Items of one CTA whose results need a second pass are marked in a bit set of this size.
constexpr int kMaxItemsPerCta = 2048;

// Where everything is in the CTA's shared memory, in bytes.
template <AttentionConfig C>
struct Layout {
  static constexpr int kChunks = C.head_dim / kChunkColumns;
  static constexpr int kRings = C.mapping == RowMapping::kIndependent ? 2 : 1;
  static constexpr int kQBytes = kRows * C.head_dim * 2;
  static constexpr int kQChunkBytes = kRows * kChunkRowBytes;
  static constexpr int kTileBytes = kTileKeys * C.head_dim * 2;
  static constexpr int kTileChunkBytes = kTileKeys * kChunkRowBytes;

  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kConsumers * kQBytes;
  static constexpr int kV = kK + kRings * C.k_stages * kTileBytes;
  static constexpr int kFullQ = kV + kRings * C.v_stages * kTileBytes;
  static constexpr int kEmptyQ = kFullQ + 8 * kConsumers;
  static constexpr int kFullK = kEmptyQ + 8 * kConsumers;
  static constexpr int kEmptyK = kFullK + 8 * kRings * C.k_stages;
  static constexpr int kFullV = kEmptyK + 8 * kRings * C.k_stages;
  static constexpr int kEmptyV = kFullV + 8 * kRings * C.v_stages;
  static constexpr int kMeeting = kEmptyV + 8 * kRings * C.v_stages;
  static constexpr int kRedo = kMeeting + 8;  // a word: any; then the bit set
  static constexpr int kRedoWords = 1 + kMaxItemsPerCta / 32;
  static constexpr int kBytes = kRedo + 4 * kRedoWords;

  static_assert(C.head_dim == 64 || C.head_dim == 128, "head_dim must be 64 or 128");
  static_assert(kBytes <= 232448, "the tiles must fit the 227 KB of shared memory of one CTA");
  static_assert(C.cluster == 1 || (C.cluster == 2 && kChunks == 2),
                "each of two CTAs loads one 64-column chunk of every tile");
  static_assert(C.cluster == 1 || C.mapping != RowMapping::kIndependent,
                "CTAs can only share tiles of one list");
  static_assert(C.mapping == RowMapping::kRowPair || (C.sparse && !C.causal),
                "dense and causal items are 128 rows of one head");
};

struct AttentionArgs {
  __nv_bfloat16* out;
  float* lse;
  const int32_t* indices;
  const int32_t* counts;
  int64_t out_stride;
  float scale_log2;  // scale * log2(e)
  int sq;
  int skv;
  int hq;
  int group;       // query heads per KV head
  int items;       // work items; a cluster takes one at a time
  int row_blocks;  // per head, of 128 rows for kRowPair and of 64 else
  int list_rows;   // ceil(sq / block_q)
  int block_q;
  int blocks_per_entry;  // block_k / 64
  int capacity;
  int heads_per_list;
};

// What one warpgroup works on for one item.
struct WorkItem {
  int head;
  int kv_head;
  int row;     // first of 64 query rows
  bool valid;  // false for the odd warpgroup at the end of kIndependent
};

// KV head outermost, heads of the group innermost: all SMs work on one KV head at a time, whose K
// and V stay in L2. Causal items: row block outermost, the longest first.
template <AttentionConfig C>
__device__ __forceinline__ WorkItem decode_item(const AttentionArgs& a, int item, int rank,
                                                int warpgroup) {
  constexpr bool kIndependent = C.mapping == RowMapping::kIndependent;
  constexpr bool kHeadPair = C.mapping == RowMapping::kHeadPair;
  constexpr int kHeadsPerItem = C.cluster * (kHeadPair ? 2 : 1);
  const int index = kIndependent ? 2 * item + warpgroup : item;
  const int per_row_block = a.group / kHeadsPerItem;
  const int per_kv_head = a.row_blocks * per_row_block;
  WorkItem w;
  if constexpr (C.causal) {
    static_assert(C.cluster == 1 && C.mapping == RowMapping::kRowPair);
    const int from_end = index / a.hq;
    w.head = index - from_end * a.hq;
    w.kv_head = w.head / a.group;
    w.row = (2 * (a.row_blocks - 1 - from_end) + warpgroup) * kRows;
    w.valid = true;
    return w;
  }
  w.kv_head = index / per_kv_head;
  const int rest = index - w.kv_head * per_kv_head;
  const int row_block = rest / per_row_block;
  int head = (rest - row_block * per_row_block) * kHeadsPerItem;
  if constexpr (kHeadPair) {
    head += 2 * rank + warpgroup;
    w.row = row_block * kRows;
  } else if constexpr (kIndependent) {
    w.row = row_block * kRows;
  } else {
    head += rank;
    w.row = (2 * row_block + warpgroup) * kRows;
  }
  w.head = w.kv_head * a.group + head;
  w.valid = !kIndependent || w.head < a.hq;
  return w;
}

// The list of one item in units of 64-key blocks.
struct BlockList {
  const int32_t* indices;
  int blocks;
  int blocks_per_entry;
  int past_end;  // a row past the last key: TMA fills such a block with zeros

  // First key of the block at `position`.
  __device__ __forceinline__ int key(int position) const {
    if (position >= blocks) return past_end;
    if (blocks_per_entry == 1) return __ldg(indices + position) * kListBlock;
    const int entry = position / blocks_per_entry;
    const int block = __ldg(indices + entry) * blocks_per_entry + position % blocks_per_entry;
    return block * kListBlock;
  }
};

// The tiles of one item. They are processed from the last keys to the first, so that a ragged end
// or an odd block is in tile 0 and later tiles need no mask.
struct TilePlan {
  int tiles;
  int limit;  // valid keys of tile 0
  BlockList list;
};

// The plan of the item whose rows start at `first_row`.
template <AttentionConfig C>
__device__ __forceinline__ TilePlan plan_tiles(const AttentionArgs& a, int head, int first_row) {
  TilePlan plan{};
  if constexpr (!C.sparse) {
    int keys = a.skv;
    if constexpr (C.causal) {
      const int last_row = min(first_row + 2 * kRows, a.sq) - 1;
      keys = max(0, min(a.skv, last_row + 1 + a.skv - a.sq));
    }
    plan.tiles = (keys + kTileKeys - 1) / kTileKeys;
    plan.limit = keys - (plan.tiles - 1) * kTileKeys;
  } else {
    const int64_t row = int64_t{head / a.heads_per_list} * a.list_rows + first_row / a.block_q;
    const int count = __ldg(a.counts + row);
    plan.list = {a.indices + row * a.capacity, count * a.blocks_per_entry, a.blocks_per_entry,
                 a.skv};
    const int all = (a.skv + kListBlock - 1) / kListBlock;
    int last_keys = kListBlock;  // real keys of the list's last block
    if (count > 0) {
      const int end = (__ldg(plan.list.indices + count - 1) + 1) * a.blocks_per_entry;
      if (end >= all) last_keys = a.skv - (all - 1) * kListBlock;
      plan.list.blocks -= max(0, end - all);  // the last entry may reach past the keys
    }
    plan.tiles = (plan.list.blocks + 1) / 2;
    plan.limit = (plan.list.blocks % 2 == 1 ? 0 : kListBlock) + last_keys;
  }
  return plan;
}

// Where all threads of the cluster meet, `phase` being how often they have met before modulo 2. A
// barrier in memory rather than a numbered one, since the roles meet from different code.
template <AttentionConfig C>
__device__ __forceinline__ void meet(uint32_t smem, uint32_t phase) {
  __syncwarp();
  if constexpr (C.cluster == 1) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem + Layout<C>::kMeeting);
    mbarrier_wait(smem + Layout<C>::kMeeting, phase);
  } else {
    cluster_arrive();
    cluster_wait();
  }
}

// ---- Second pass ------------------------------------------------------------------------------
// Item n of this CTA (and, since they share tiles, of its cluster) must be computed again.

template <AttentionConfig C>
__device__ __forceinline__ void mark_redo(uint32_t smem, int n) {
  const uint32_t any = smem + Layout<C>::kRedo;
#pragma unroll
  for (int rank = 0; rank < C.cluster; ++rank) {
    shared_or_remote(map_to_rank(any, rank), 1u);
    shared_or_remote(map_to_rank(any + 4 + n / 32 * 4, rank), 1u << (n % 32));
  }
}

__device__ __forceinline__ bool must_redo(const uint32_t* redo, int n) {
  return (redo[1 + n / 32] >> (n % 32)) & 1;
}

// ---- Producer ---------------------------------------------------------------------------------

// One thread that feeds one ring, and Q to the warpgroups that read it.
template <AttentionConfig C>
struct Producer {
  using L = Layout<C>;
  static constexpr bool kIndependent = C.mapping == RowMapping::kIndependent;
  static constexpr int kBoxKeys = C.sparse ? kListBlock : kTileKeys;

  const AttentionArgs& a;
  const CUtensorMap* map_q;
  const CUtensorMap* map_k;
  const CUtensorMap* map_v;
  uint32_t smem;
  int ring;
  int rank;
  RingPosition<C.k_stages> k_position;
  RingPosition<C.v_stages> v_position;
  RingPosition<1> q_position;

  // First keys of the boxes of a tile.
  struct TileKeys {
    int key[kTileKeys / kBoxKeys];
  };

  // All column chunks of a tile; in a cluster this CTA's chunk, for both CTAs.
  __device__ __forceinline__ void load_tile(const CUtensorMap* map, uint32_t to, uint32_t full,
                                            const TileKeys& keys, int head) {
    mbarrier_arrive_expect(full, L::kTileBytes);
#pragma unroll
    for (int box = 0; box < kTileKeys / kBoxKeys; ++box) {
      const uint32_t box_to = to + box * kBoxKeys * kChunkRowBytes;
      if constexpr (C.cluster == 1) {
#pragma unroll
        for (int chunk = 0; chunk < L::kChunks; ++chunk) {
          tma_load_4d(box_to + chunk * L::kTileChunkBytes, map, 0, keys.key[box], chunk, head, full,
                      kEvictLast);
        }
      } else {
        tma_load_4d_multicast(box_to + rank * L::kTileChunkBytes, map, 0, keys.key[box], rank, head,
                              full, 3, kEvictLast);
      }
    }
  }

  __device__ __forceinline__ void load_k(const TileKeys& keys, int head) {
    const int slot = ring * C.k_stages + k_position.stage;
    mbarrier_wait(smem + L::kEmptyK + 8 * slot, k_position.phase ^ 1);
    load_tile(map_k, smem + L::kK + slot * L::kTileBytes, smem + L::kFullK + 8 * slot, keys, head);
    k_position.next();
  }

  __device__ __forceinline__ void load_v(const TileKeys& keys, int head) {
    const int slot = ring * C.v_stages + v_position.stage;
    mbarrier_wait(smem + L::kEmptyV + 8 * slot, v_position.phase ^ 1);
    load_tile(map_v, smem + L::kV + slot * L::kTileBytes, smem + L::kFullV + 8 * slot, keys, head);
    v_position.next();
  }

  __device__ __forceinline__ void load_q(const WorkItem& w, int warpgroup) {
    const uint32_t full = smem + L::kFullQ + 8 * warpgroup;
    mbarrier_wait(smem + L::kEmptyQ + 8 * warpgroup, q_position.phase ^ 1);
    if (!w.valid) {
      mbarrier_arrive(full);
      return;
    }
    mbarrier_arrive_expect(full, L::kQBytes);
#pragma unroll
    for (int chunk = 0; chunk < L::kChunks; ++chunk) {
      tma_load_4d(smem + L::kQ + warpgroup * L::kQBytes + chunk * L::kQChunkBytes, map_q, 0, w.row,
                  chunk, w.head, full, kEvictFirst);
    }
  }

  // Loads Q, then K one tile ahead of V.
  __device__ __forceinline__ void feed(int item) {
    const WorkItem w = decode_item<C>(a, item, rank, kIndependent ? ring : 0);
    TilePlan plan{};
    if (w.valid) plan = plan_tiles<C>(a, w.head, w.row);
    auto tile_keys = [&](int tile) {
      const int ordinal = plan.tiles - 1 - tile;
      if constexpr (C.sparse) {
        return TileKeys{plan.list.key(2 * ordinal), plan.list.key(2 * ordinal + 1)};
      } else {
        return TileKeys{ordinal * kTileKeys};
      }
    };

    TileKeys keys{};
    if (plan.tiles > 0) {
      keys = tile_keys(0);
      load_k(keys, w.kv_head);
    }
    if constexpr (kIndependent) {
      load_q(w, ring);
    } else {
      load_q(w, 0);
      load_q(decode_item<C>(a, item, rank, 1), 1);
    }
    q_position.next();
    for (int tile = 1; tile < plan.tiles; ++tile) {
      const TileKeys next = tile_keys(tile);
      load_k(next, w.kv_head);
      load_v(keys, w.kv_head);
      keys = next;
    }
    if (plan.tiles > 0) load_v(keys, w.kv_head);
  }
};

// ---- Consumer ---------------------------------------------------------------------------------

// One warpgroup's 64 rows. A thread holds parts of two rows: lane / 4 and lane / 4 + 8 of its
// warp's 16, called row 0 and row 1 here.
template <AttentionConfig C>
struct Consumer {
  using L = Layout<C>;
  static constexpr int kD = C.head_dim;
  static constexpr bool kIndependent = C.mapping == RowMapping::kIndependent;

  const AttentionArgs& a;
  uint32_t smem;
  int warpgroup;
  int ring;
  int rank;
  int warp;  // of the warpgroup
  int lane;
  RingPosition<C.k_stages> k_position;
  RingPosition<C.v_stages> v_position;
  RingPosition<1> q_position;

  uint32_t q[kD / 4];         // A fragments of Q
  float s[kTileKeys / 2];     // scores, then probabilities
  uint32_t p[kTileKeys / 4];  // A fragments of P
  float o[kD / 2];
  float reference[2];  // subtracted from a row's scores, in log2 units
  float sum[2];        // this thread's part of a row's sum of probabilities

  __device__ __forceinline__ int k_slot() const { return ring * C.k_stages + k_position.stage; }
  __device__ __forceinline__ int v_slot() const { return ring * C.v_stages + v_position.stage; }

  __device__ __forceinline__ void wait_k() {
    mbarrier_wait(smem + L::kFullK + 8 * k_slot(), k_position.phase);
  }
  __device__ __forceinline__ void wait_v() {
    mbarrier_wait(smem + L::kFullV + 8 * v_slot(), v_position.phase);
  }

  // Tells the producers of the cluster that this warp has read the buffer.
  __device__ __forceinline__ void release(uint32_t empty) {
    if constexpr (C.cluster == 1) {
      if (lane == 0) mbarrier_arrive(empty);
    } else {
      if (lane < C.cluster) mbarrier_arrive_remote(map_to_rank(empty, lane));
    }
  }
  __device__ __forceinline__ void release_k() {
    release(smem + L::kEmptyK + 8 * k_slot());
    k_position.next();
  }
  __device__ __forceinline__ void release_v() {
    release(smem + L::kEmptyV + 8 * v_slot());
    v_position.next();
  }

  // Moves Q into registers. As the A operand of every QK product it would otherwise be read from
  // shared memory once a tile.
  __device__ __forceinline__ void take_q() {
    const int row = 16 * warp + lane % 16;
    const uint32_t from = smem + L::kQ + warpgroup * L::kQBytes + row * kChunkRowBytes;
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      const int unit = 2 * (step % 4) + lane / 16;  // 16-byte unit of the 128-byte row
      load_matrix_x4(q + 4 * step, from + step / 4 * L::kQChunkBytes + ((unit ^ (row % 8)) << 4));
    }
  }
  // The loads of take_q() are over only when something has used what they bring: an arrival is not
  // ordered behind loads that nobody waits for.
  __device__ __forceinline__ void release_q() {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem + L::kEmptyQ + 8 * warpgroup);
    q_position.next();
  }

  // S = Q K^T.
  __device__ __forceinline__ void issue_qk() {
    const uint64_t k = k_major_descriptor(smem + L::kK + k_slot() * L::kTileBytes);
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      wgmma_rs_k_major(s, q + 4 * step, advance(k, step / 4 * L::kTileChunkBytes + step % 4 * 32),
                       step > 0);
    }
    wgmma_commit();
  }

  // O += P V.
  __device__ __forceinline__ void issue_pv() {
    const uint64_t v =
        mn_major_descriptor(smem + L::kV + v_slot() * L::kTileBytes, L::kTileChunkBytes);
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      wgmma_rs_mn_major(o, p + 4 * step, advance(v, step * 16 * kChunkRowBytes));
    }
    wgmma_commit();
  }

  // Sets scores of keys at or past `limit` in the tile to -inf; for a causal call row r also ends
  // at `causal_limit` + 8 r.
  __device__ __forceinline__ void mask(int limit, int causal_limit) {
    const int column = 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i) {
      const int row = i / 2 % 2;
      const int end = C.causal ? min(limit, causal_limit + 8 * row) : limit;
      if (8 * (i / 4) + i % 2 + column >= end) s[i] = -INFINITY;
    }
  }

  // Largest score of each row, in log2 units.
  __device__ __forceinline__ void row_maxima(float (&top)[2]) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float m[2] = {-INFINITY, -INFINITY};  // two chains
#pragma unroll
      for (int j = 0; j < kTileKeys / 8; ++j) {
        m[j % 2] = fmaxf(m[j % 2], fmaxf(s[4 * j + 2 * row], s[4 * j + 2 * row + 1]));
      }
      m[0] = fmaxf(m[0], m[1]);
      m[0] = fmaxf(m[0], __shfl_xor_sync(0xffffffffu, m[0], 1));
      m[0] = fmaxf(m[0], __shfl_xor_sync(0xffffffffu, m[0], 2));
      top[row] = m[0] * a.scale_log2;
    }
  }

  // Scores to probabilities relative to `reference`, and their sum.
  __device__ __forceinline__ void exponentiate() {
    float base[2], part[2][2] = {};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      base[row] = reference[row] == -INFINITY ? 0.0f : reference[row];
    }
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i) {
      const int row = i / 2 % 2;
      s[i] = exp2_approx(__fmaf_rn(s[i], a.scale_log2, -base[row]));
      part[row][i / 4 % 2] += s[i];
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) sum[row] += part[row][0] + part[row][1];
  }

  // The running maximum, exact for any input. A row's reference only moves when its maximum grows
  // by more than 2^kSlack: the result does not depend on it. Returns whether O must be scaled.
  static constexpr float kSlack = 8.0f;
  __device__ __forceinline__ bool track_maximum(float (&factor)[2]) {
    float top[2];
    row_maxima(top);
    const bool moved =
        __any_sync(0xffffffffu, top[0] > reference[0] + kSlack || top[1] > reference[1] + kSlack);
    if (moved) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float next = fmaxf(reference[row], top[row]);
        factor[row] = exp2_approx(reference[row] - (next == -INFINITY ? 0.0f : next));
        reference[row] = next;
        sum[row] *= factor[row];
      }
    }
    return moved;
  }

  __device__ __forceinline__ void scale_output(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) o[i] *= factor[i / 2 % 2];
  }

  __device__ __forceinline__ void pack_probabilities() {
#pragma unroll
    for (int i = 0; i < kTileKeys / 4; ++i) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
  }

  // One item. With kTracking false the references are fixed after the first tile, kHeadroom above
  // its maxima, and the steady loop needs no maximum: floating point has the range for rows whose
  // later scores exceed the first tile's by less than 2^(kHeadroom + 64), which the sums show at
  // the end. Returns false for a warp with another row, whose item must be done again with
  // kTracking.
  static constexpr float kHeadroom = 32.0f;
  static constexpr float kMaxSum = 0x1p64f;

  template <bool kTracking>
  __device__ __forceinline__ bool attend(const WorkItem& w) {
    mbarrier_wait(smem + L::kFullQ + 8 * warpgroup, q_position.phase);
    if (!w.valid) {
      release_q();
      return true;
    }
    const bool upper_rows = C.mapping == RowMapping::kRowPair && warpgroup == 1;
    const TilePlan plan = plan_tiles<C>(a, w.head, w.row - (upper_rows ? kRows : 0));
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) o[i] = 0.0f;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      reference[row] = -INFINITY;
      sum[row] = 0.0f;
    }
    if (plan.tiles == 0) {
      release_q();
      finish(w);
      return true;
    }
    take_q();

    // Column c of tile t is visible to row 0 of this thread while c < causal_limit + 128 t; from
    // tile `masked_tiles` on the warpgroup's rows see everything.
    int causal_limit = 0, masked_tiles = 1;
    if constexpr (C.causal) {
      const int visible = w.row + 1 + a.skv - a.sq;  // keys of the warpgroup's first row
      causal_limit = visible + 16 * warp + lane / 4 - (plan.tiles - 1) * kTileKeys;
      masked_tiles = plan.tiles - min(plan.tiles - 1, max(0, visible) / kTileKeys);
    }

    float factor[2] = {1.0f, 1.0f};
    wait_k();
    wgmma_fence();
    issue_qk();
    wgmma_wait<0>();
    pin_registers(s);
    release_q();
    release_k();
    mask(plan.limit, causal_limit);
    row_maxima(reference);
    if constexpr (!kTracking) {
      reference[0] += kHeadroom;
      reference[1] += kHeadroom;
    }
    exponentiate();
    pack_probabilities();

    // QK of this tile and PV of the one before are in flight together; the softmax of this tile
    // runs under the PV product and under the other warpgroup's products, from which this one
    // drifts apart by itself.
    auto step = [&](int tile, auto masked) {
      wait_k();
      wgmma_fence();
      issue_qk();
      wait_v();
      wgmma_fence();
      issue_pv();
      wgmma_wait<1>();
      pin_registers(s);
      release_k();
      if constexpr (masked.value) mask(kTileKeys, causal_limit + tile * kTileKeys);
      bool moved = false;
      if constexpr (kTracking) moved = track_maximum(factor);
      exponentiate();
      pin_registers(s);
      // The wait stands in both branches of a test that never holds, so that the exponentials stay
      // above it: the scheduler moves a wait up inside a basic block but not across a branch.
      // Independent warpgroups are bound by their loads and run faster when the packing mixes with
      // the exponentials instead.
      if (!kIndependent && a.group <= 0) {
        wgmma_wait<0>();
        pin_registers(o);
        scale_output(factor);
      } else {
        wgmma_wait<0>();
        pin_registers(o);
      }
      if (kTracking && moved) scale_output(factor);
      release_v();
      pack_probabilities();
    };
    int tile = 1;
    if constexpr (C.causal) {
      for (; tile < masked_tiles; ++tile) step(tile, std::true_type{});
    }
    for (; tile < plan.tiles; ++tile) step(tile, std::false_type{});

    wait_v();
    wgmma_fence();
    issue_pv();
    wgmma_wait<0>();
    pin_registers(o);
    release_v();
    return finish(w) || kTracking;
  }

  // Writes the normalised rows and their LSE; false if a sum is out of the trusted range. The four
  // lanes of a row exchange 4-byte pieces so that each writes 16 bytes.
  __device__ __forceinline__ bool finish(const WorkItem& w) {
    const int piece = lane % 4;
    bool trusted = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[r];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      trusted = trusted && total < kMaxSum && reference[r] > -INFINITY;
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
      const int row = w.row + 16 * warp + lane / 4 + 8 * r;
      const bool inside = row < a.sq;
      if (a.lse != nullptr && inside && piece == 0) {
        constexpr float kLn2 = 0.693147180559945f;
        a.lse[int64_t{w.head} * a.sq + row] =
            total == 0.0f ? -INFINITY : (reference[r] + log2_approx(total)) * kLn2;
      }
      __nv_bfloat16* to = a.out + row * a.out_stride + int64_t{w.head} * kD;
#pragma unroll
      for (int j = 0; j < kD / 8; j += 4) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (j + i) + 2 * r;
          x[i] = pack_bf16(o[at] * inverse, o[at + 1] * inverse);
        }
        transpose_quad(x, piece);
        if (inside) {
          *reinterpret_cast<uint4*>(to + 8 * (j + piece)) = make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
    }
    return __all_sync(0xffffffffu, trusted);
  }
};

// ---- Kernel -----------------------------------------------------------------------------------

// `Variant::kConfig` is the configuration: a type, since the launch stub that nvcc generates cannot
// name a structural value.
template <class Variant>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ CUtensorMap map_q,
                     const __grid_constant__ CUtensorMap map_k,
                     const __grid_constant__ CUtensorMap map_v, const AttentionArgs a) {
  constexpr AttentionConfig C = Variant::kConfig;
  using L = Layout<C>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = shared_address(shared);
  uint32_t* redo = reinterpret_cast<uint32_t*>(shared + L::kRedo);
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  const int warp = warp_uniform(threadIdx.x / 32 % 4);
  const int lane = threadIdx.x % 32;
  const int rank = C.cluster == 1 ? 0 : static_cast<int>(cluster_rank());
  // Item n of this cluster. Causal items get shorter, so their rounds alternate in direction.
  const int clusters = gridDim.x / C.cluster, cluster = blockIdx.x / C.cluster;
  auto item_of = [&](int n) {
    return n * clusters + (C.causal && n % 2 == 1 ? clusters - 1 - cluster : cluster);
  };

  for (int i = threadIdx.x; i < L::kRedoWords; i += kThreads) redo[i] = 0;
  if (threadIdx.x == 0) {
    constexpr int kReaders = 4 * (L::kRings == 1 ? kConsumers : 1) * C.cluster;
    for (int i = 0; i < kConsumers; ++i) {
      mbarrier_init(smem + L::kFullQ + 8 * i, 1);
      mbarrier_init(smem + L::kEmptyQ + 8 * i, 4);
    }
    for (int i = 0; i < L::kRings * C.k_stages; ++i) {
      mbarrier_init(smem + L::kFullK + 8 * i, 1);
      mbarrier_init(smem + L::kEmptyK + 8 * i, kReaders);
    }
    for (int i = 0; i < L::kRings * C.v_stages; ++i) {
      mbarrier_init(smem + L::kFullV + 8 * i, 1);
      mbarrier_init(smem + L::kEmptyV + 8 * i, kReaders);
    }
    mbarrier_init(smem + L::kMeeting, kThreads / 32);
    mbarrier_init_fence();
    prefetch_tensor_map(&map_q);
    prefetch_tensor_map(&map_k);
    prefetch_tensor_map(&map_v);
  }
  if constexpr (C.cluster == 1) {
    __syncthreads();
  } else {
    cluster_meet();
  }

  // Both roles walk the same items, and after everyone has finished the marked ones again. The
  // meeting is also what keeps a CTA from leaving while its peer can still write into it.
  if (warpgroup == 0) {
    release_registers<kProducerRegisters>();
    const bool works = warp < L::kRings && lane == 0;
    Producer<C> producer{a, &map_q, &map_k, &map_v, smem, warp, rank};
    if (works) {
      for (int n = 0; item_of(n) < a.items; ++n) producer.feed(item_of(n));
    }
    meet<C>(smem, 0);
    if (redo[0] != 0) {
      if (works) {
        for (int n = 0; item_of(n) < a.items; ++n) {
          if (must_redo(redo, n)) producer.feed(item_of(n));
        }
      }
      meet<C>(smem, 1);
    }
  } else {
    claim_registers<kConsumerRegisters>();
    const int self = warpgroup - 1;
    Consumer<C> consumer{a, smem, self, L::kRings == 1 ? 0 : self, rank, warp, lane};
    for (int n = 0; item_of(n) < a.items; ++n) {
      const WorkItem w = decode_item<C>(a, item_of(n), rank, self);
      // The causal form always tracks: its first tile need not have a key for every row.
      const bool done = consumer.template attend<C.causal>(w);
      if (!done && lane == 0) mark_redo<C>(smem, n);
    }
    meet<C>(smem, 0);
    if constexpr (!C.causal) {
      if (redo[0] != 0) {
        for (int n = 0; item_of(n) < a.items; ++n) {
          if (must_redo(redo, n)) {
            consumer.template attend<true>(decode_item<C>(a, item_of(n), rank, self));
          }
        }
        meet<C>(smem, 1);
      }
    }
  }
}

// ---- Launch -----------------------------------------------------------------------------------

template <class Variant>
const char* launch_attention(const Sm90AttentionParams& p, void* stream) {
  constexpr AttentionConfig C = Variant::kConfig;
  static PerDevice prepared;
  if (const char* error = prepared.allow_shared_memory(
          reinterpret_cast<const void*>(attention_kernel<Variant>), Layout<C>::kBytes)) {
    return error;
  }

  CUtensorMap map_q, map_k, map_v;
  const int box = Producer<C>::kBoxKeys;
  bool mapped = encode_tensor_map(&map_q, p.q, p.sq, p.hq, p.head_dim, p.q_stride, kRows);
  if (p.skv > 0) {
    mapped = mapped && encode_tensor_map(&map_k, p.k, p.skv, p.hkv, p.head_dim, p.k_stride, box) &&
             encode_tensor_map(&map_v, p.v, p.skv, p.hkv, p.head_dim, p.v_stride, box);
  } else {
    map_k = map_v = map_q;  // never read
  }
  if (!mapped) return "the driver refused a tensor map";

  AttentionArgs a{};
  a.out = static_cast<__nv_bfloat16*>(p.out);
  a.lse = p.lse;
  a.indices = p.indices;
  a.counts = p.counts;
  a.out_stride = p.out_stride;
  a.scale_log2 = p.scale * 1.4426950408889634f;
  a.sq = static_cast<int>(p.sq);
  a.skv = static_cast<int>(p.skv);
  a.hq = p.hq;
  a.group = p.hq / p.hkv;
  a.block_q = p.block_q;
  a.list_rows = static_cast<int>((p.sq + p.block_q - 1) / p.block_q);
  a.blocks_per_entry = p.block_k / kListBlock;
  a.capacity = p.capacity;
  a.heads_per_list = p.heads_per_list;
  constexpr int kItemRows = kRows * (C.mapping == RowMapping::kRowPair ? 2 : 1);
  a.row_blocks = static_cast<int>((p.sq + kItemRows - 1) / kItemRows);
  const int64_t head_rows = int64_t{p.hq} * a.row_blocks;
  const int per_item = C.cluster * (C.mapping == RowMapping::kRowPair ? 1 : 2);
  a.items = static_cast<int>((head_rows + per_item - 1) / per_item);

  // One CTA an SM, more only if a CTA's items would not fit its bit set.
  const int sms = multiprocessors();
  const int clusters = std::max(
      {1, std::min(a.items, sms / C.cluster), (a.items + kMaxItemsPerCta - 1) / kMaxItemsPerCta});
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(clusters * C.cluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = Layout<C>::kBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = C.cluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = C.cluster > 1 ? 1 : 0;
  const cudaError_t error =
      cudaLaunchKernelEx(&config, attention_kernel<Variant>, map_q, map_k, map_v, a);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace orrery::cuda::sm90
