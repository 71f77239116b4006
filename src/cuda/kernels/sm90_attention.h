// Attention on Hopper: dense and block-sparse, bf16 in and out, fp32 accumulation.
//
// Tensors are [rows, heads, head_dim]; heads are contiguous inside a row and rows may be any
// multiple of 8 elements apart, so q, k and v can be slices of one fused projection. Query head h
// reads KV head h / (hq / hkv). A query row without keys gives zeros and an LSE of -inf.
#pragma once

#include <cstdint>

namespace orrery::cuda {

struct Sm90AttentionParams {
  const void* q = nullptr;  // bf16 [sq, hq, head_dim]
  const void* k = nullptr;  // bf16 [skv, hkv, head_dim]
  const void* v = nullptr;  // bf16 [skv, hkv, head_dim]
  void* out = nullptr;      // bf16 [sq, hq, head_dim]
  float* lse = nullptr;     // optional f32 [hq, sq]: natural log of the sum of exponentials

  int64_t sq = 0;
  int64_t skv = 0;
  int hq = 0;
  int hkv = 0;
  int head_dim = 0;

  int64_t q_stride = 0;  // elements between rows
  int64_t k_stride = 0;
  int64_t v_stride = 0;
  int64_t out_stride = 0;

  float scale = 0;      // of q k^T, before the softmax
  bool causal = false;  // row i sees keys 0 .. i + (skv - sq)

  // Block lists; indices == nullptr means dense. A list names the key blocks that one block of
  // query rows attends to: its first `count` entries are sorted, unique and in range.
  // `heads_per_list` consecutive query heads of one KV head, or all hq, use the same list, so that
  // list_heads = hq / heads_per_list.
  const int32_t* indices = nullptr;  // [list_heads, ceil(sq / block_q), capacity]
  const int32_t* counts = nullptr;   // [list_heads, ceil(sq / block_q)]
  int block_q = 64;
  int block_k = 64;
  int capacity = 0;
  int heads_per_list = 1;
};

// nullptr when the kernels can run these parameters, else a sentence that says why not. Reads no
// device memory.
const char* sm90_attention_supports(const Sm90AttentionParams& params);

// Enqueues the call on `stream` (a cudaStream_t). Neither allocates nor synchronises, so it can be
// captured into a graph. Returns nullptr, or a sentence when it could not be enqueued.
const char* sm90_attention(const Sm90AttentionParams& params, void* stream);

}  // namespace orrery::cuda
