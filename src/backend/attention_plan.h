// What one attention call must compute, as plain data. Methods (attention/) build plans, backends
// run them.
#pragma once

#include <cstdint>
#include <string>

#include "tensor/view.h"

namespace orrery {

// Key blocks each query block sees. Per row the first `count` indices are sorted, unique and in
// range, and there is at least one. The last block of either side is as long as the tail.
struct BlockMask {
  int64_t block_q = 0;
  int64_t block_k = 0;
  // i32 [lists, ceil(Sq / block_q), capacity]. The query heads are dealt out evenly among the
  // lists, in order: a list each, one for those that read a key/value head (or some of these), or
  // one for all.
  View indices;
  View counts;  // i32 [lists, ceil(Sq / block_q)]

  // Heads that use one list, of `heads`.
  int64_t heads_per_list(int64_t heads) const { return heads / indices.dim(0); }
};

struct AttentionPlan {
  bool causal = false;              // row i of q sees keys 0 .. i + (Skv - Sq)
  float scale = 0;                  // multiplies q . k; finite
  const BlockMask* mask = nullptr;  // null: every key
  // Name of one implementation ("native", "reference", "cudnn"), or empty: the best that accepts.
  std::string implementation;
  MutView lse;  // optional f32 [heads, Sq]: natural log of the sum of exponentials
};

// How a call's queries and keys fall into blocks, and what is given rather than chosen: key blocks
// outside [head_end, tail_begin) are kept by every row of blocks, and rows outside [dense_head_end,
// dense_tail_begin) keep every key block.
struct BlockGrid {
  int64_t rows = 0;    // blocks of queries
  int64_t blocks = 0;  // blocks of keys
  int64_t head_end = 0, tail_begin = 0;
  int64_t dense_head_end = 0, dense_tail_begin = 0;

  bool is_protected(int64_t block) const { return block < head_end || block >= tail_begin; }
  bool is_dense(int64_t row) const { return row < dense_head_end || row >= dense_tail_begin; }
  int64_t candidates() const { return tail_begin - head_end; }
  int64_t dense_rows() const { return rows - (dense_tail_begin - dense_head_end); }
};

// How select_blocks() chooses (attention-strategy contract).
//
// Scores: cells of 16 tokens are mean-pooled; a block pair scores the log-sum-exp over its cell
// pairs, the natural logarithm of the softmax weight it is thought to have. A head's *share* of a
// block is exp(score) over the sum of that over all key blocks of the row, protected ones included.
//
// Ranks: a list ranks blocks by the sum of its heads' shares, so that a head counts by where it
// looks and not by how large its scores are. With one head and a budget that is the order of the
// scores, and the rank is the score itself.
//
// Choice: the protected blocks and the best of the others: `budget` of them, or, when `mass` is
// set, the fewest with which the kept blocks hold `mass` of the shares (at least one block in all).
// Equal ranks go by id * 2654435769 modulo 2^32, smallest first, which spreads them over the video.
// A row with a candidate whose rank is not finite keeps the first `budget` candidates, or all of
// them when `mass` is set.
struct BlockSelection {
  int64_t block_q = 64;
  int64_t block_k = 64;
  int64_t heads_per_list = 1;       // consecutive query heads of one key/value head choose together
  double target_sparsity = 0.75;    // unless mass is set
  double mass = 0;                  // 0: not set; else in (0, 1)
  int64_t protected_keys = 0;       // leading keys (text prefix): every block they touch is kept
  int64_t protected_tail_keys = 0;  // trailing keys (sound, action rows): likewise
  int64_t protected_head_queries = 0;  // leading query rows (controls) whose blocks stay dense
  int64_t protected_tail_queries = 0;  // trailing query rows whose blocks stay dense
  float scale = 0;

  int64_t cells() const { return 16; }
  // Blocks kept of the unprotected ones: min(N, 8 ceil(max(1, ceil((1 - s) N)) / 8)); 0 when N is
  // 0.
  int64_t budget(int64_t unprotected_blocks) const;
  BlockGrid grid(int64_t queries, int64_t keys) const;
  bool ranks_by_share() const { return heads_per_list > 1 || mass > 0; }
  // True when there is nothing to choose: every row keeps every block, whatever the scores.
  bool keeps_all(const BlockGrid& grid) const;
};

}  // namespace orrery
