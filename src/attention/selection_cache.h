// Memory for block lists. Most live as long as one call and lie in its arena; lists that several
// steps share, or that do not depend on the data at all, are kept for the request.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>

#include "backend/backend.h"

namespace orrery {

struct AttentionCall;
class AttentionMethod;

// When a call happens, in the terms that decide whether an earlier selection still holds.
struct AttentionMoment {
  int layout = 0;
  int step = 0;           // logical step
  int step_in_phase = 0;  // steps since the schedule last changed the layout
};

struct Selection {
  MutView indices;    // i32 [lists, query blocks, capacity]
  MutView counts;     // i32 [lists, query blocks]
  int64_t kept = 0;   // block pairs over all heads
  bool stale = true;  // whoever opened it must fill all of the above

  BlockMask mask(int64_t block_q, int64_t block_k) const;
};

// One per request: lists kept longer are keyed by method, layer, evaluation and pass. Reuse counts
// from the start of a phase, so all layers select at the same steps. Lists keep their addresses,
// which recorded steps name, until the lengths change.
class SelectionCache {
 public:
  // Lists of shape [lists, query blocks, capacity] that hold for `reuse_steps` steps of one phase;
  // for 1 they lie in the call's arena and are always stale.
  Selection& for_steps(const AttentionCall& call, const AttentionMethod& method, const Shape& shape,
                       int reuse_steps);
  // Lists that hold for all layers and steps of the evaluation.
  Selection& for_request(const AttentionCall& call, const AttentionMethod& method,
                         const Shape& shape);
  // What depended on the data must be selected anew.
  void forget();

 private:
  struct Entry {
    Tensor indices, counts;
    int64_t queries = 0, keys = 0, text = 0;
    int layout = 0;
    int window_begin = 0;  // step
    Selection selection;
  };
  Entry& open(const AttentionCall& call, const AttentionMethod& method, int layer,
              const Shape& shape);

  Selection for_call_;
  std::map<std::tuple<const AttentionMethod*, int, int, int>, Entry> entries_;
};

}  // namespace orrery
