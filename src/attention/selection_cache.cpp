#include "attention/selection_cache.h"

#include "attention/method.h"

namespace orrery {

namespace {
constexpr int kAllLayers = -1;
}  // namespace

BlockMask Selection::mask(int64_t block_q, int64_t block_k) const {
  return {block_q, block_k, indices, counts};
}

SelectionCache::Entry& SelectionCache::open(const AttentionCall& call,
                                            const AttentionMethod& method, int layer,
                                            const Shape& shape) {
  Entry& entry = entries_[{&method, layer, call.site.evaluation, call.pass}];
  const bool fits = entry.indices && entry.selection.indices.shape == shape &&
                    entry.queries == call.q.dim(0) && entry.keys == call.k.dim(0) &&
                    entry.text == call.text;
  if (fits) return entry;
  entry = {};
  entry.indices = call.backend.allocate_tensor(shape, DType::i32);
  entry.counts = call.backend.allocate_tensor({shape[0], shape[1]}, DType::i32);
  entry.queries = call.q.dim(0);
  entry.keys = call.k.dim(0);
  entry.text = call.text;
  entry.selection.indices = entry.indices.view;
  entry.selection.counts = entry.counts.view;
  return entry;
}

Selection& SelectionCache::for_steps(const AttentionCall& call, const AttentionMethod& method,
                                     const Shape& shape, int reuse_steps) {
  if (reuse_steps == 1) {
    for_call_ = {};
    for_call_.indices = call.arena.make(shape, DType::i32);
    for_call_.counts = call.arena.make({shape[0], shape[1]}, DType::i32);
    return for_call_;
  }
  Entry& entry = open(call, method, call.site.layer, shape);
  const AttentionMoment& now = call.moment;
  const int window_begin = now.step - now.step_in_phase % reuse_steps;
  if (entry.layout != now.layout || entry.window_begin != window_begin) {
    entry.selection.stale = true;
  }
  entry.layout = now.layout;
  entry.window_begin = window_begin;
  return entry.selection;
}

void SelectionCache::forget() {
  for (auto& [key, entry] : entries_) {
    if (std::get<1>(key) != kAllLayers) entry.selection.stale = true;
  }
}

Selection& SelectionCache::for_request(const AttentionCall& call, const AttentionMethod& method,
                                       const Shape& shape) {
  return open(call, method, kAllLayers, shape).selection;
}

}  // namespace orrery
