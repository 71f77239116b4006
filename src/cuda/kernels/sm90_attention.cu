// Chooses the attention kernel of a call; the kernels are instantiated in sm90_attention_*.cu.
#include <algorithm>
#include <cmath>

#include "sm90_attention.h"
#include "sm90_attention_variants.h"
#include "sm90_host.h"

namespace orrery::cuda {
const char* sm90_attention_supports(const Sm90AttentionParams& p) {
  using namespace sm90;
  if (const char* reason = device_reason()) return reason;
  if (p.head_dim != 64 && p.head_dim != 128) return "head_dim must be 64 or 128";
  if (p.hq <= 0 || p.hkv <= 0 || p.hq % p.hkv != 0) {
    return "the query heads must be a multiple of the KV heads";
  }
  if (p.sq < 0 || p.skv < 0 || p.sq > kMaxRows || p.skv > kMaxRows || p.sq * p.hq > kMaxRows) {
    return "sq * hq and skv must be at most 2^30";
  }
  if (!std::isfinite(p.scale) || p.scale <= 0) return "the scale must be positive and finite";
  if (!aligned_rows(p.q, p.q_stride) || !aligned_rows(p.out, p.out_stride) ||
      (p.skv > 0 && (!aligned_rows(p.k, p.k_stride) || !aligned_rows(p.v, p.v_stride)))) {
    return "tensors must be 16-byte aligned with row strides of a multiple of 8 elements";
  }
  if (p.indices == nullptr) return nullptr;
  if (p.causal) return "block lists are for calls that are not causal";
  if (p.counts == nullptr) return "block lists need counts";
  if (p.block_q < 64 || p.block_q % 64 != 0 || p.block_k < 64 || p.block_k % 64 != 0 ||
      (p.block_q > 64 && p.block_q % 128 != 0)) {
    return "block_q must be 64 or a multiple of 128, block_k a multiple of 64";
  }
  if (p.capacity < 0) return "the capacity of the lists must not be negative";
  if (p.heads_per_list <= 0 ||
      (p.heads_per_list != p.hq && (p.hq / p.hkv) % p.heads_per_list != 0)) {
    return "heads_per_list must divide the query heads of one KV head, or be all query heads";
  }
  return nullptr;
}

const char* sm90_attention(const Sm90AttentionParams& p, void* stream) {
  if (const char* reason = sm90_attention_supports(p)) return reason;
  if (p.sq == 0) return nullptr;
  const bool wide = p.head_dim == 128;
  const int group = p.hq / p.hkv;
  if (p.indices == nullptr) {
    if (p.causal) return wide ? sm90::causal_128(p, stream) : sm90::causal_64(p, stream);
    if (!wide) return sm90::dense_64(p, stream);
    return group % 2 == 0 ? sm90::dense_128_multicast(p, stream) : sm90::dense_128(p, stream);
  }
  // Rows that share a list share its tiles: 128 rows in a CTA, 256 in two.
  const int sharing = std::min(p.heads_per_list, group);
  if (p.block_q >= 128) {
    if (!wide) return sm90::row_pair_64(p, stream);
    return sharing % 2 == 0 ? sm90::row_pair_128_multicast(p, stream)
                            : sm90::row_pair_128(p, stream);
  }
  if (sharing % 2 == 0) {
    if (!wide) return sm90::head_pair_64(p, stream);
    return sharing % 4 == 0 ? sm90::head_pair_128_multicast(p, stream)
                            : sm90::head_pair_128(p, stream);
  }
  return wide ? sm90::independent_128(p, stream) : sm90::independent_64(p, stream);
}

}  // namespace orrery::cuda
