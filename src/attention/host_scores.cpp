#include "attention/host_scores.h"

#include <algorithm>
#include <cstdlib>

#include "base/error.h"

namespace orrery {

MutView score_on_host(const AttentionCall& call, const BlockSparseOptions& options,
                      std::string_view method, const Selection& selection) {
  require(
      call.backend.device() == DeviceKind::cpu, ErrorKind::unsupported, "attention: ", method,
      " runs on the CPU backend only, because it chooses blocks on the host; use block_topk here");
  const MutView scores = call.arena.make(selection.indices.shape, DType::f32);
  BlockSelection rule;
  rule.block_q = options.block_q;
  rule.block_k = options.block_k;
  rule.scale = call.scale;
  call.backend.select_blocks(selection.indices, selection.counts, call.q, call.k, rule, scores);
  return scores;
}

void order_by_score(std::span<int32_t> blocks, std::span<const double> scores, int64_t own_block) {
  std::sort(blocks.begin(), blocks.end(), [&](int32_t a, int32_t b) {
    const double sa = scores[static_cast<size_t>(a)], sb = scores[static_cast<size_t>(b)];
    if (sa != sb) return sa > sb;
    const int64_t da = std::abs(a - own_block), db = std::abs(b - own_block);
    return da != db ? da < db : a < b;
  });
}

}  // namespace orrery
