// The attention a model calls. It hides which method runs (strategy), that ranks share the sequence
// (context parallelism) and where keys and values of the text lie.
//
// Life of one generation call, the same lines on every mesh:
//
//   1. inputs() hands out the rows for this rank's queries, keys and values, and says in which
//      parts to make them.
//
//   2. For each part the model writes its rows (qk_norm_rope writes straight into place) and calls
//      send(): in a group, heads of other ranks travel while the next part is made.
//
//   3. run() asks the strategy for the plan of (step, layer, role), runs it, and starts the way
//      back.
//
//   4. For each part, output() hands out the finished rows: while later parts still travel, the
//      model goes on with this one.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/method.h"
#include "attention/selection_cache.h"
#include "attention/sequence.h"
#include "attention/strategy.h"
#include "backend/backend.h"
#include "dist/communicator.h"

namespace orrery {

// Memory of one generation call, from inputs() on; valid until the caller's arena scope ends.
struct AttentionInputs {
  // Heads [head, head + rows.dim(1)) of the model's numbering belong into rows [rows, heads, D].
  struct Slot {
    int64_t head = 0;
    MutView rows;
  };
  std::vector<Slot> q, k, v;    // write all of them; in a group a head may have several
  std::vector<RowRange> parts;  // of this rank's rows, to be made and sent in this order

  // What this rank attends once all has arrived: [text + sequence, its heads, D].
  MutView whole_q, whole_k, whole_v;
  MutView whole_out;
  // In a group [ranks, rows, heads, D]: what goes to each rank, and where it arrives.
  std::vector<Trade> trades;
  MutView sent_out, arrived_out;
  MutView out;  // [rows of this rank, H, D]
  int64_t text = 0;
  bool splits_kv = true;                      // no key/value head goes to two ranks
  std::vector<Communicator::Ticket> tickets;  // of the parts that travel
};

// What ran, for the report.
struct DispatchRecord {
  int step = 0;  // -1: the text tower, before the first
  int layer = 0;
  int evaluation = 0;  // generation tower: index of the guidance evaluation
  int branch = 0;      // text tower: index of the prompt
  AttentionRole role = AttentionRole::gen;
  std::string method;          // preset name
  std::string implementation;  // what the backend ran
  int64_t kept_blocks = 0;     // 0 of 0: dense
  int64_t all_blocks = 0;
  double seconds = 0;  // with the selection of blocks; 0 unless the backend profiles
};

// One per request. Not thread-safe.
class Attention {
 public:
  // `cp`: group that shares the sequence, or null for one rank. The strategy must outlive this.
  Attention(Backend& backend, const AttentionStrategy& strategy, Sequence sequence,
            int64_t head_dim, Communicator* cp = nullptr);

  // Selects the layout of a logical step; every evaluation of the step uses it. A strategy without
  // a schedule needs no step.
  void begin_step(int step, int num_steps);

  // For warm-up: this layout, whatever the step. What it selected is forgotten at the next step.
  void begin_layout(int layout);
  // Runs `work` or, where the backend has one, a recording of equal work: of the same `key` and
  // layout. The dispatch records are the same. Whatever the key stands for must stay where it is
  // until Backend::forget_replays(). Runs it plainly where ranks share the sequence, and under
  // strategies that choose on the host when to select or whose records are read back from the
  // device.
  void replay(const std::string& key, const std::function<void()>& work);

  // Control streams of equal length at the front of the sequence that are attended one by one: at
  // sites of role gen_multi_control stream i and everything behind the streams read [text, stream
  // i, what is behind], and what is behind gets the sum over i of weights[i] times what it found.
  // Weights are not negative and sum to 1. With fewer than two streams there is nothing to weigh.
  void set_control_weights(std::vector<float> weights);
  // The role of a generation site under these weights.
  AttentionRole generation_role() const {
    return control_weights_.size() > 1 ? AttentionRole::gen_multi_control : AttentionRole::gen;
  }

  // Memory comes from `arena`. und_k, und_v [text, KV, D]: keys and values of the text on this
  // rank; text may be 0 (B58), KV, D and dtype are read all the same. The call is for the rows of
  // share(), padding included, and `heads` query heads.
  AttentionInputs inputs(Arena& arena, int64_t heads, View und_k, View und_v);
  void send(AttentionInputs& inputs, const RowRange& part);
  void run(Arena& arena, AttentionInputs& inputs, const AttentionSite& site);
  // [part.count, H, D]. Parts in order.
  View output(AttentionInputs& inputs, const RowRange& part);

  // What one call reads and writes: out, q [Sq, H, D]; k, v [Skv, KV, D], of which the first `text`
  // rows belong to the text.
  struct Operands {
    MutView out;
    View q, k, v;
    int64_t text = 0;
  };
  // The text tower, causal and whole on each rank; `branch` is the prompt's index.
  void run_text(Arena& arena, const Operands& operands, int layer, int branch);

  Backend& backend() const { return backend_; }
  const Sequence& sequence() const { return sequence_; }
  // This rank's rows of sequence(): all of them without a group.
  SequenceShare share() const;
  // sequence() whole, [size(), N], on every rank, from `mine` [padded_rows, N] of share(),
  // contiguous. Without a group that is `mine` itself, else memory of `arena`.
  View whole(Arena& arena, View mine) const;
  // Shown every call before it is planned, for measurements of queries and keys.
  void set_probe(std::function<void(const AttentionCall&)> probe) { probe_ = std::move(probe); }

  // Recording reads back what a method kept where only the device knows (threshold): such a call
  // cannot be part of a replayed evaluation.
  void set_recording(bool on) { recording_ = on; }
  const std::vector<DispatchRecord>& records() const { return records_; }

 private:
  void attend(Arena& arena, const Operands& operands, const AttentionSite& site);
  void attend_controls(Arena& arena, const Operands& operands, const AttentionSite& site);
  // One call of the method: `pass` over a part of the sequence, laid out as `sequence`.
  void attend_once(Arena& arena, const Operands& operands, const AttentionSite& site,
                   const Sequence& sequence, int pass);
  AttentionInputs shared_inputs(Arena& arena, int64_t heads, View und_k, View und_v);
  bool is_shared() const;
  AttentionMoment moment() const;

  Backend& backend_;
  const AttentionStrategy& strategy_;
  Sequence sequence_;
  float scale_;
  Communicator* cp_;
  std::optional<AttentionMoment> moment_;  // none before the first step of a schedule
  bool warming_up_ = false;
  std::vector<float> control_weights_;
  SelectionCache selections_;
  std::function<void(const AttentionCall&)> probe_;
  bool recording_ = false;
  std::vector<DispatchRecord> records_;
  std::map<std::string, std::vector<DispatchRecord>> replay_records_;  // of one evaluation, by key
};

}  // namespace orrery
