// How a call's queries and keys fall into blocks, and which blocks are protected: keys of text,
// control, sound and action tokens are kept by every query, and query blocks that touch control,
// sound or action rows see every key.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/method.h"

namespace orrery {

struct BlockGrid {
  BlockGrid(const AttentionCall& call, int64_t block_q, int64_t block_k)
      : heads(call.q.dim(1)),
        rows((call.q.dim(0) + block_q - 1) / block_q),
        blocks((call.k.dim(0) + block_k - 1) / block_k) {
    const Sequence& sequence = call.sequence;
    const auto ceil_to = [](int64_t tokens, int64_t block) { return (tokens + block - 1) / block; };
    head_end = std::min(blocks, ceil_to(call.text + sequence.control_tokens, block_k));
    dense_head_end = std::min(rows, ceil_to(sequence.control_tokens, block_q));
    tail_begin = blocks;
    dense_tail_begin = rows;
    if (sequence.tail_tokens() > 0) {
      tail_begin = std::max<int64_t>(0, call.k.dim(0) - sequence.tail_tokens()) / block_k;
      dense_tail_begin = std::max<int64_t>(0, call.q.dim(0) - sequence.tail_tokens()) / block_q;
    }
  }

  bool is_protected(int64_t block) const { return block < head_end || block >= tail_begin; }
  bool is_dense(int64_t row) const { return row < dense_head_end || row >= dense_tail_begin; }
  int64_t candidates() const { return std::max<int64_t>(0, tail_begin - head_end); }
  int64_t dense_rows() const {
    return std::min(rows, dense_head_end + (rows - std::max(dense_head_end, dense_tail_begin)));
  }
  // Block pairs over all heads when every row that is not dense keeps `budget` candidates.
  int64_t kept(int64_t budget) const {
    const int64_t sparse_row = blocks - candidates() + budget;
    return heads * (dense_rows() * blocks + (rows - dense_rows()) * sparse_row);
  }
  int64_t all() const { return heads * rows * blocks; }

  int64_t heads, rows, blocks;               // counts
  int64_t head_end, tail_begin;              // key blocks before and from here on are protected
  int64_t dense_head_end, dense_tail_begin;  // query blocks before and from here on are dense
};

}  // namespace orrery
