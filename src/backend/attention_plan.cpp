#include "backend/attention_plan.h"

#include <algorithm>
#include <cmath>

namespace orrery {

int64_t BlockSelection::budget(int64_t unprotected_blocks) const {
  if (unprotected_blocks == 0) return 0;
  const double exact = (1.0 - target_sparsity) * double(unprotected_blocks);
  const auto wanted = std::max<int64_t>(1, int64_t(std::ceil(exact)));
  return std::min(unprotected_blocks, (wanted + 7) / 8 * 8);
}

BlockGrid BlockSelection::grid(int64_t queries, int64_t keys) const {
  const auto ceil_div = [](int64_t tokens, int64_t block) { return (tokens + block - 1) / block; };
  BlockGrid g;
  g.rows = ceil_div(queries, block_q);
  g.blocks = ceil_div(keys, block_k);
  g.head_end = std::min(g.blocks, ceil_div(protected_keys, block_k));
  g.dense_head_end = std::min(g.rows, ceil_div(protected_head_queries, block_q));
  g.tail_begin = g.blocks;
  g.dense_tail_begin = g.rows;
  if (protected_tail_keys > 0) {
    g.tail_begin = std::max<int64_t>(0, keys - protected_tail_keys) / block_k;
  }
  if (protected_tail_queries > 0) {
    g.dense_tail_begin = std::max<int64_t>(0, queries - protected_tail_queries) / block_q;
  }
  g.tail_begin = std::max(g.tail_begin, g.head_end);
  g.dense_tail_begin = std::max(g.dense_tail_begin, g.dense_head_end);
  return g;
}

bool BlockSelection::keeps_all(const BlockGrid& grid) const {
  const int64_t candidates = grid.candidates();
  return candidates == 0 || grid.dense_rows() == grid.rows ||
         (mass == 0 && budget(candidates) == candidates);
}

}  // namespace orrery
