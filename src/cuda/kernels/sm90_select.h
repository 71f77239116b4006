// The selector on Hopper: block lists for sm90_attention from bf16 q and k, by the rule of
// BlockSelection (backend/attention_plan.h): ranks from pooled cells, then the protected blocks and
// the `budget` best of the others, or the fewest that reach a mass.
#pragma once

#include <cstddef>
#include <cstdint>

namespace orrery::cuda {

struct Sm90SelectParams {
  const void* q = nullptr;  // bf16 [sq, hq, head_dim]
  const void* k = nullptr;  // bf16 [skv, hkv, head_dim]
  int64_t sq = 0;
  int64_t skv = 0;
  int hq = 0;
  int hkv = 0;
  int head_dim = 0;
  int64_t q_stride = 0;  // elements between rows
  int64_t k_stride = 0;
  float scale = 0;

  int block_q = 64;
  int block_k = 64;
  int heads_per_list = 1;  // consecutive query heads of one KV head that choose together

  int head_end = 0;          // key blocks before this one are kept
  int tail_begin = 0;        // and from this one on
  int budget = 0;            // how many of the others are kept, when mass is 0
  float mass = 0;            // what the kept blocks' shares of all heads of the list must sum to
  int dense_head_end = 0;    // query blocks before this one keep every key block
  int dense_tail_begin = 0;  // and from this one on

  int32_t* indices = nullptr;  // [hq / heads_per_list, ceil(sq / block_q), capacity]
  int32_t* counts = nullptr;   // [hq / heads_per_list, ceil(sq / block_q)]
  int capacity = 0;            // of indices; at least the longest list

  float* scores = nullptr;  // optional f32 [lists, rows, key blocks]: the ranks

  void* workspace = nullptr;  // sm90_select_workspace(params) bytes, 256-byte aligned
};

// nullptr when the kernels can run these parameters, else a sentence that says why not.
const char* sm90_select_supports(const Sm90SelectParams& params);

// Device bytes for the pooled cells.
size_t sm90_select_workspace(const Sm90SelectParams& params);

// Enqueues the selection on `stream` (a cudaStream_t). Neither allocates nor synchronises. Returns
// nullptr, or a sentence when it could not be enqueued.
const char* sm90_select(const Sm90SelectParams& params, void* stream);

}  // namespace orrery::cuda
