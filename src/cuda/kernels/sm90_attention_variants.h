// The attention kernels that are built, one launcher each. sm90_attention() picks.
#pragma once

#include "sm90_attention.h"

namespace orrery::cuda::sm90 {

using Launcher = const char*(const Sm90AttentionParams& params, void* stream);

// sm90_attention_dense.cu: every key, or the causal part.
Launcher dense_128, dense_128_multicast, dense_64, causal_128, causal_64;

// sm90_attention_sparse.cu: block lists. row_pair: lists of 128-row blocks; head_pair: lists that
// pairs of heads share; independent: any list. multicast: and pairs of those share.
Launcher row_pair_128, row_pair_128_multicast, row_pair_64;
Launcher head_pair_128, head_pair_128_multicast, head_pair_64;
Launcher independent_128, independent_64;

}  // namespace orrery::cuda::sm90
