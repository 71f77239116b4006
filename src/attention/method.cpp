#include "attention/method.h"

#include <numeric>

#include "base/error.h"

namespace orrery {

std::string BlockSparseOptions::describe(const std::string& method,
                                         const std::string& detail) const {
  std::string text = concat(method, " ", block_q, "x", block_k, ", ", detail);
  if (share_kv_group) text += ", one list per key/value head";
  if (reuse_steps > 1) text += concat(", selection reused for ", reuse_steps, " steps");
  return text + " (" + kernel.provider + ")";
}

int64_t kept_blocks_of(const PlannedAttention& planned, int64_t heads, Backend& backend) {
  if (planned.kept_blocks) return *planned.kept_blocks;
  if (backend.is_dry()) return 0;
  const View& lengths = planned.mask->counts;
  const Tensor counts = allocate_host_tensor(lengths.shape, DType::i32);
  backend.download(counts.view, lengths);
  const int32_t* first = counts.view.as<int32_t>();
  return planned.mask->heads_per_list(heads) *
         std::accumulate(first, first + counts.view.numel(), int64_t{0});
}

}  // namespace orrery
