// What the attention kernels work on: configurations, the items of a call, the tiles of an item.
#pragma once

#include <cstdint>

#include "sm90_pipeline.cuh"

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

using Bf16 = Element<__nv_bfloat16>;
constexpr int kTileKeys = 128;
constexpr int kListBlock = 64;  // keys per list entry as the kernel sees it: two fill a tile

// Items of one CTA whose results need a second pass are marked in a bit set of this size.
constexpr int kMaxItemsPerCta = 2048;

// Where everything is in the CTA's shared memory, in bytes. Q has one buffer a warpgroup.
template <AttentionConfig C>
struct Layout {
  static constexpr int kChunks = C.head_dim / Bf16::kPerRow;
  static constexpr int kRings = C.mapping == RowMapping::kIndependent ? 2 : 1;
  static constexpr int kQBytes = kRows * C.head_dim * 2;
  static constexpr int kQChunkBytes = kRows * kRowBytes;
  static constexpr int kTileBytes = kTileKeys * C.head_dim * 2;
  static constexpr int kTileChunkBytes = kTileKeys * kRowBytes;

  static constexpr int kKAt = kConsumers * kQBytes;
  static constexpr int kVAt = kKAt + kRings * C.k_stages * kTileBytes;
  static constexpr int kBarriers = kVAt + kRings * C.v_stages * kTileBytes;
  static constexpr RingShape kQ{1, kQBytes, 0, kBarriers, kConsumers};
  static constexpr RingShape kK{C.k_stages, kTileBytes, kKAt, kQ.barriers_end(), kRings};
  static constexpr RingShape kV{C.v_stages, kTileBytes, kVAt, kK.barriers_end(), kRings};
  static constexpr int kMeeting = kV.barriers_end();
  static constexpr int kRedo = kMeeting + 8;  // a word: any; then the bit set
  static constexpr int kRedoWords = 1 + kMaxItemsPerCta / 32;
  static constexpr int kBytes = kRedo + 4 * kRedoWords;

  static_assert(C.head_dim == 64 || C.head_dim == 128, "head_dim must be 64 or 128");
  static_assert(kBytes <= kMaxSharedBytes, "the tiles must fit the shared memory of one CTA");
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

}  // namespace orrery::cuda::sm90
