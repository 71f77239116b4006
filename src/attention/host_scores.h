// Choosing blocks on the host from a backend's scores, for methods that a backend has no operation
// for.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "attention/block_grid.h"
#include "attention/method.h"

namespace orrery {

// f32 [heads, query blocks, key blocks] in the call's arena: natural logarithms of the softmax mass
// that a block pair is thought to have. The selection's lists serve as scratch. Refuses devices.
MutView score_on_host(const AttentionCall& call, const BlockSparseOptions& options,
                      std::string_view method, const Selection& selection);

// Best first. Equal blocks go to the query block's own neighbourhood, not to the start of the
// video.
void order_by_score(std::span<int32_t> blocks, std::span<const double> scores, int64_t own_block);

// The key block where query block `row` itself lies.
inline int64_t own_block(const AttentionCall& call, const BlockSparseOptions& options,
                         int64_t row) {
  return (call.text + row * options.block_q) / options.block_k;
}

}  // namespace orrery
