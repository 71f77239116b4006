// The attention a model calls. It hides which method runs (strategy), that ranks share the sequence
// (context parallelism) and where keys and values of the text lie.
//
// Life of one generation call, the same lines on every mesh:
//   1. keys_values() hands out the rows for this rank's keys and values, behind the text's.
//   2. The model writes them (the projection and qk_norm_rope write straight into place).
//   3. run() exchanges sequence for heads (nothing to do in a group of one), asks the strategy for
//   the
//      plan of (step, layer, role), runs it, and exchanges back.
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

namespace orrery {

class Communicator;

// Rows of one layer's keys and values. Writable part: this rank's generation rows.
struct KvRows {
  MutView k, v;  // [rows of this rank, KV, D]: write here
  MutView full_k,
      full_v;  // [text + rows, KV, D]; without the text when a group shares the sequence
};

// What ran, for the report.
struct DispatchRecord {
  int step = 0;    // -1: the text tower, before the first
  int branch = 0;  // guidance branch: 0 conditional, 1 unconditional, ...
  int layer = 0;
  AttentionRole role = AttentionRole::gen;
  std::string method;          // preset name
  std::string implementation;  // what the backend ran
  int64_t kept_blocks = 0;     // 0 of 0: dense
  int64_t all_blocks = 0;
  double seconds = 0;  // 0 unless the backend profiles
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
  void begin_branch(int branch) { branch_ = branch; }

  // For warm-up: this layout, whatever the step. What it selected is forgotten at the next step.
  void begin_layout(int layout);
  // What the evaluations of this step and branch will do beside arithmetic: equal keys mean equal
  // sequences of operations on equal addresses, so that a recorded evaluation may be replayed.
  std::string replay_key() const;
  // Runs `evaluation` or, where the backend has one, a recording of an equal one: of the same `key` and
  // replay_key(). The dispatch records are the same. Whatever the key stands for must stay where it is
  // until Backend::forget_replays(). Runs it plainly where ranks share the sequence, and under strategies
  // that choose on the host when to select or whose records are read back from the device.
  void replay(const std::string& key, const std::function<void()>& evaluation);

  // Control streams of equal length at the front of the sequence that are attended one by one: at
  // sites of role gen_multi_control stream i and everything behind the streams read [text, stream
  // i, what is behind], and what is behind gets the sum over i of weights[i] times what it found.
  // Weights are not negative and sum to 1. With fewer than two streams there is nothing to weigh.
  void set_control_weights(std::vector<float> weights);
  // The role of a generation site under these weights.
  AttentionRole generation_role() const {
    return control_weights_.size() > 1 ? AttentionRole::gen_multi_control : AttentionRole::gen;
  }

  // Memory comes from `arena` and lives until the caller's scope ends. und_k, und_v [text, KV, D];
  // text may be 0 (B58), KV, D and dtype are read all the same.
  KvRows keys_values(Arena& arena, View und_k, View und_v, int64_t rows);
  // out, q [rows, H, D] of this rank: all of sequence() without a group, else its share of the
  // rows, with or without padding (Sequence::share). For the text tower, causal and whole on each
  // rank, und_k and und_v have no rows and kv holds the text.
  void run(Arena& arena, MutView out, View q, View und_k, View und_v, const KvRows& kv,
           const AttentionSite& site);

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
  void attend(Arena& arena, MutView out, View q, View k, View v, int64_t text,
              const AttentionSite& site);
  void attend_controls(Arena& arena, MutView out, View q, View k, View v, int64_t text,
                       const AttentionSite& site);
  // One call of the method: `pass` of `passes` over parts of the sequence, laid out as `sequence`.
  void attend_once(Arena& arena, MutView out, View q, View k, View v, int64_t text,
                   const AttentionSite& site, const Sequence& sequence, int pass, int passes);
  void exchange(Arena& arena, MutView out, View q, View und_k, View und_v, const KvRows& kv,
                const AttentionSite& site);
  bool is_shared() const;
  AttentionMoment moment() const;
  double seconds_so_far() const;

  Backend& backend_;
  const AttentionStrategy& strategy_;
  Sequence sequence_;
  float scale_;
  Communicator* cp_;
  std::optional<AttentionMoment> moment_;  // none before the first step of a schedule
  int branch_ = 0;
  bool warming_up_ = false;
  std::vector<float> control_weights_;
  SelectionCache selections_;
  std::function<void(const AttentionCall&)> probe_;
  bool recording_ = false;
  std::vector<DispatchRecord> records_;
  std::map<std::string, std::vector<DispatchRecord>> replay_records_;  // of one evaluation, by key
};

}  // namespace orrery
