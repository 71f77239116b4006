// Attention with 8-bit operands on Hopper, dense, head_dim 128: kernels under test that the engine
// does not use yet. docs/hopper-attention.md, "8 bits", has the arithmetic and what was measured.
//
// Scores are products of s8 rows: q with one scale a row, k with one scale for each 64 keys of a KV
// head. The probabilities of one row over 128 keys become u8 codes of the largest among them, so
// that a tile's share of the output is an exact 32-bit sum over s8 values of one scale a channel;
// or they become bf16 and meet bf16 values.
#pragma once

#include <cstdint>

namespace orrery::cuda {

// Operands as quantise_attention() writes them.
struct Attention8Operands {
  int8_t* q = nullptr;        // [sq, hq, 128]
  float* q_scale = nullptr;   // [hq, sq]: times softmax scale and log2 e
  int8_t* k = nullptr;        // [skv, hkv, 128], the mean over keys taken out
  float* k_scale = nullptr;   // [hkv, ceil(skv / 64)]
  float* k_mean = nullptr;    // [hkv, 128]
  float* partials = nullptr;  // [ceil(skv / 512), hkv, 128], scratch
  int8_t* v = nullptr;        // [hkv, 128, v_stride], keys in groups of 16 permuted
  float* v_scale = nullptr;   // [hkv, 128]
  int64_t v_stride = 0;       // keys padded to a multiple of 128
};

struct Attention8Params {
  const void* q = nullptr;  // bf16 [sq, hq, 128]
  const void* k = nullptr;  // bf16 [skv, hkv, 128]
  const void* v = nullptr;  // bf16 [skv, hkv, 128]
  void* out = nullptr;      // bf16 [sq, hq, 128]
  Attention8Operands operands;
  int64_t sq = 0, skv = 0;
  int hq = 0, hkv = 0;
  float scale = 0;
  bool int8_values = false;  // else bf16 values
};

// Each enqueues on `stream` (a cudaStream_t) and returns nullptr, or a sentence.
const char* quantise_attention(const Attention8Params& params, void* stream);
const char* attention_8bit(const Attention8Params& params, void* stream);

}  // namespace orrery::cuda
