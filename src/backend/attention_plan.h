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
  View indices;  // i32 [lists, ceil(Sq / block_q), capacity]; lists = heads, or 1 when all heads share
  View counts;   // i32 [lists, ceil(Sq / block_q)]
};

struct AttentionPlan {
  bool causal = false;    // row i of q sees keys 0 .. i + (Skv - Sq)
  float scale = 0;        // multiplies q . k; finite
  const BlockMask* mask = nullptr;  // null: every key
  // Name of one implementation ("native", "reference", "cudnn"), or empty: the best that accepts.
  std::string implementation;
  MutView lse;            // optional f32 [heads, Sq]: natural log of the sum of exponentials
};

// How the block_topk selector chooses (attention-strategy contract): 16-token cells are mean-pooled,
// a block pair scores log-sum-exp over its cell pairs, the top `budget` unprotected key blocks stay.
struct BlockSelection {
  int64_t block_q = 64;
  int64_t block_k = 64;
  double target_sparsity = 0.75;
  int64_t protected_keys = 0;     // leading keys (text prefix): every block they touch is kept
  int64_t protected_tail_keys = 0;   // trailing keys (sound, action rows): likewise
  int64_t protected_head_queries = 0;  // leading query rows (controls) whose blocks stay dense
  int64_t protected_tail_queries = 0;  // trailing query rows whose blocks stay dense
  float scale = 0;

  int64_t cells() const { return 16; }
  // Blocks kept of the unprotected ones: min(N, 8 ceil(max(1, ceil((1 - s) N)) / 8)); 0 when N is 0.
  int64_t budget(int64_t unprotected_blocks) const;
};

}  // namespace orrery
