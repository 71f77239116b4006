#include "attention/attention.h"

#include <cmath>
#include <utility>

#include "base/error.h"
#include "dist/communicator.h"
#include "dist/mesh.h"

namespace orrery {

Attention::Attention(Backend& backend, const AttentionStrategy& strategy, Sequence sequence,
                     int64_t head_dim, Communicator* cp)
    : backend_(backend),
      strategy_(strategy),
      sequence_(std::move(sequence)),
      scale_(static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)))),
      cp_(cp) {
  require(head_dim > 0, "attention: head_dim is ", head_dim);
  if (!strategy.has_schedule()) moment_ = AttentionMoment{};
}

void Attention::begin_step(int step, int num_steps) {
  AttentionMoment now;
  now.layout = strategy_.layout_at(step, num_steps);
  now.step = step;
  now.step_in_phase = strategy_.step_in_phase(step, num_steps);
  // Selections look forward only: neither warm-up's nor those of a later step hold for this one.
  if (warming_up_ || (moment_ && step < moment_->step)) selections_.forget();
  warming_up_ = false;
  moment_ = now;
}

void Attention::begin_layout(int layout) {
  strategy_.layout_name(layout);  // refuses one that does not exist
  selections_.forget();
  warming_up_ = true;
  moment_ = AttentionMoment{};
  moment_->layout = layout;
}

std::string Attention::replay_key() const {
  const AttentionMoment now = moment();
  std::string key = concat("layout ", now.layout, " branch ", now.branch);
  for (int preset = 0; preset < strategy_.num_presets(); ++preset) {
    const int reuse = strategy_.preset_method(preset).reuse_steps();
    if (reuse > 1) key += now.step_in_phase % reuse == 0 ? " selects" : " reuses";
  }
  return key;
}

void Attention::replay(const std::string& key, const std::function<void()>& evaluation) {
  bool can_be_recorded = !is_shared() && !probe_;
  for (int preset = 0; preset < strategy_.num_presets(); ++preset) {
    const AttentionMethod& method = strategy_.preset_method(preset);
    if (method.reuse_steps() > 1 || (recording_ && method.keeps_by_data())) can_be_recorded = false;
  }
  if (!can_be_recorded) return evaluation();
  const std::string whole = concat(key, " ", replay_key());
  const auto begin = static_cast<std::ptrdiff_t>(records_.size());
  if (backend_.replay(whole, evaluation)) {
    replay_records_[whole].assign(records_.begin() + begin, records_.end());
    return;
  }
  if (!recording_) return;
  for (DispatchRecord record : replay_records_[whole]) {
    record.step = moment().step;
    records_.push_back(std::move(record));
  }
}

AttentionMoment Attention::moment() const {
  require(moment_.has_value(),
          "attention: the strategy has a schedule, but no denoising step has begun");
  AttentionMoment now = *moment_;
  now.branch = branch_;
  return now;
}

bool Attention::is_shared() const { return cp_ != nullptr && cp_->size() > 1; }

KvRows Attention::keys_values(Arena& arena, View und_k, View und_v, int64_t rows) {
  require(und_k.rank() == 3 && und_v.shape == und_k.shape && und_v.dtype == und_k.dtype,
          "attention: text keys are ", und_k.shape, " and values ", und_v.shape,
          ", expected equal [text, KV heads, head_dim]");
  // In a group the text joins after the exchange, once the heads of this rank are known.
  const int64_t text = is_shared() ? 0 : und_k.dim(0);
  const Shape shape{text + rows, und_k.dim(1), und_k.dim(2)};
  KvRows kv;
  kv.full_k = arena.make(shape, und_k.dtype);
  kv.full_v = arena.make(shape, und_k.dtype);
  if (text > 0) {
    backend_.copy(kv.full_k.slice(0, 0, text), und_k);
    backend_.copy(kv.full_v.slice(0, 0, text), und_v);
  }
  kv.k = kv.full_k.slice(0, text, rows);
  kv.v = kv.full_v.slice(0, text, rows);
  return kv;
}

void Attention::run(Arena& arena, MutView out, View q, View und_k, View und_v, const KvRows& kv,
                    const AttentionSite& site) {
  const Arena::Scope scope(arena);
  if (is_shared() && !is_invariant(site.role)) {
    return exchange(arena, out, q, und_k, und_v, kv, site);
  }
  attend(arena, out, q, kv.full_k, kv.full_v, und_k.dim(0), site);
}

namespace {

// out [ranks, padded, heads per rank, D] from x [rows, KV or H, D]: the heads of each rank in its
// block. Rows past `rows` keep what they hold: they are cut off at the other end.
void scatter_heads(Backend& backend, MutView out, View x, const HeadExchange& heads, bool is_kv) {
  const int64_t ranks = out.dim(0), per_rank = out.dim(2), d = x.dim(2), rows = x.dim(0);
  const MutView real = out.slice(1, 0, rows);
  if (!is_kv || heads.splits_kv()) {
    backend.copy(real.permute({1, 0, 2, 3}), x.reshape({rows, ranks, per_rank, d}));
    return;
  }
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (int64_t j = 0; j < per_rank; ++j) {
      backend.copy(real.select(0, rank).select(1, j),
                   x.select(1, heads.kv_head(static_cast<int>(rank), j)));
    }
  }
}

}  // namespace

// Ulysses: this rank's rows of all heads become all rows of this rank's heads, and back.
void Attention::exchange(Arena& arena, MutView out, View q, View und_k, View und_v,
                         const KvRows& kv, const AttentionSite& site) {
  const int ranks = cp_->size();
  const SequenceShare share = sequence_.share(cp_->rank(), ranks);
  const int64_t rows = q.dim(0), text = und_k.dim(0), d = q.dim(2);
  require((rows == share.rows || rows == share.padded_rows) && kv.k.dim(0) == rows,
          "attention: rank ", cp_->rank(), " of ", ranks, " brings ", rows, " queries and ",
          kv.k.dim(0), " keys; its share is ", share.rows, ", or ", share.padded_rows,
          " with padding");
  const HeadExchange heads(q.dim(1), kv.k.dim(1), ranks);
  const AttentionMethod& method = strategy_.method(moment().layout, site.layer, site.role);
  require(heads.splits_kv() || !method.needs_whole_groups(), ErrorKind::unsupported,
          "attention: ", method.description(),
          " needs all query heads of a key/value head on one rank, but ", ranks, " ranks share ",
          kv.k.dim(1), " key/value heads");
  const int64_t q_heads = heads.q_count(), kv_heads = heads.kv_count();
  const int64_t padded = share.padded_rows, all = ranks * padded;

  // A dry run moves nothing, and other ranks may not be there.
  const auto trade = [&](MutView to, View from) {
    if (!backend_.is_dry()) cp_->all_to_all(to, from);
  };
  const auto gather = [&](View x, MutView whole, bool is_kv) {
    const Arena::Scope scope(arena);
    const int64_t count = whole.dim(1);
    const MutView parts = arena.make({ranks, padded, count, d}, x.dtype);
    scatter_heads(backend_, parts, x, heads, is_kv);
    trade(whole.reshape({ranks, padded, count, d}), parts);
  };
  // Rows of rank 0 come first, so real rows are contiguous and all padding lies at the end.
  const MutView whole_q = arena.make({all, q_heads, d}, q.dtype);
  gather(q, whole_q, false);
  const auto join = [&](View und, View x) {
    const MutView whole = arena.make({text + all, kv_heads, d}, x.dtype);
    for (int64_t j = 0; text > 0 && j < kv_heads; ++j) {
      backend_.copy(whole.slice(0, 0, text).select(1, j),
                    und.select(1, heads.kv_head(cp_->rank(), j)));
    }
    gather(x, whole.slice(0, text, all), true);
    return whole.slice(0, 0, text + sequence_.size());
  };
  const View whole_k = join(und_k, kv.k), whole_v = join(und_v, kv.v);

  const MutView whole_out = arena.make({all, q_heads, d}, out.dtype);
  attend(arena, whole_out.slice(0, 0, sequence_.size()), whole_q.slice(0, 0, sequence_.size()),
         whole_k, whole_v, text, site);

  const MutView parts = arena.make({ranks, padded, q_heads, d}, out.dtype);
  trade(parts, whole_out.reshape({ranks, padded, q_heads, d}));
  backend_.copy(out.reshape({rows, ranks, q_heads, d}),
                parts.slice(1, 0, rows).permute({1, 0, 2, 3}));
}

SequenceShare Attention::share() const {
  return is_shared() ? sequence_.share(cp_->rank(), cp_->size()) : sequence_.share(0, 1);
}

View Attention::whole(Arena& arena, View mine) const {
  if (!is_shared()) return mine;
  const int64_t padded = mine.dim(0), width = mine.dim(1), ranks = cp_->size();
  require(padded == share().padded_rows, "attention: a rank brings ", padded,
          " rows to be gathered, its share has room for ", share().padded_rows);
  const MutView rows = arena.make({ranks, padded, width}, mine.dtype);
  if (!backend_.is_dry()) cp_->all_gather(rows, mine);
  return rows.reshape({ranks * padded, width}).slice(0, 0, sequence_.size());
}

double Attention::seconds_so_far() const {
  double seconds = 0;
  for (const char* op : {"attention", "attention_sparse", "select_blocks"}) {
    const auto it = backend_.stats().find(op);
    if (it != backend_.stats().end()) seconds += it->second.seconds;
  }
  return seconds;
}

void Attention::set_control_weights(std::vector<float> weights) {
  const auto streams = static_cast<int64_t>(weights.size());
  require(streams > 0 && sequence_.control_tokens % streams == 0,
          "attention: ", sequence_.control_tokens, " control tokens for ", streams,
          " weighted streams");
  float sum = 0;
  for (float weight : weights) {
    require(weight >= 0, "attention: a control weight is ", weight);
    sum += weight;
  }
  require(std::abs(sum - 1.0f) < 1e-5f, "attention: the control weights sum to ", sum,
          ", expected 1");
  control_weights_ = std::move(weights);
}

void Attention::attend(Arena& arena, MutView out, View q, View k, View v, int64_t text,
                       const AttentionSite& site) {
  require(is_invariant(site.role) || q.dim(0) == sequence_.size(), "attention: ", q.dim(0),
          " queries for a sequence of ", sequence_.size());
  const bool weighs = site.role == AttentionRole::gen_multi_control && control_weights_.size() > 1;
  if (weighs)
    attend_controls(arena, out, q, k, v, text, site);
  else
    attend_once(arena, out, q, k, v, text, site, sequence_, 0, 1);
}

void Attention::attend_controls(Arena& arena, MutView out, View q, View k, View v, int64_t text,
                                const AttentionSite& site) {
  const Arena::Scope scope(arena);
  const auto streams = static_cast<int64_t>(control_weights_.size());
  const int64_t controls = sequence_.control_tokens, each = controls / streams;
  const int64_t rest = sequence_.size() - controls;
  Sequence part = sequence_;
  part.control_tokens = each;

  // Rows [skip, skip + each) of the controls and whatever follows all of them, behind `lead` rows.
  const auto gather = [&](MutView to, View from, int64_t lead, int64_t stream) {
    if (lead > 0) backend_.copy(to.slice(0, 0, lead), from.slice(0, 0, lead));
    backend_.copy(to.slice(0, lead, each), from.slice(0, lead + stream * each, each));
    backend_.copy(to.slice(0, lead + each, rest), from.slice(0, lead + controls, rest));
  };
  const MutView found = arena.make({streams, rest, q.dim(1), q.dim(2)}, out.dtype);
  const MutView part_q = arena.make({each + rest, q.dim(1), q.dim(2)}, q.dtype);
  const MutView part_k = arena.make({text + each + rest, k.dim(1), k.dim(2)}, k.dtype);
  const MutView part_v = arena.make(part_k.shape, v.dtype);
  const MutView part_out = arena.make(part_q.shape, out.dtype);
  std::vector<Term> terms;
  for (int64_t i = 0; i < streams; ++i) {
    gather(part_q, q, 0, i);
    gather(part_k, k, text, i);
    gather(part_v, v, text, i);
    attend_once(arena, part_out, part_q, part_k, part_v, text, site, part, static_cast<int>(i),
                static_cast<int>(streams));
    backend_.copy(out.slice(0, i * each, each), part_out.slice(0, 0, each));
    backend_.copy(found.select(0, i), part_out.slice(0, each, rest));
    terms.push_back({control_weights_[static_cast<size_t>(i)], found.select(0, i)});
  }
  backend_.lincomb(out.slice(0, controls, rest), terms);
}

void Attention::attend_once(Arena& arena, MutView out, View q, View k, View v, int64_t text,
                            const AttentionSite& site, const Sequence& sequence, int pass,
                            int passes) {
  const Arena::Scope scope(arena);
  // The text tower runs before the first step: it is the same in every layout.
  const bool any_layout_does = is_invariant(site.role) && !moment_;
  AttentionMoment now = any_layout_does ? AttentionMoment{} : moment();
  // What is remembered of a selection belongs to one pass of one branch.
  now.branch = branch_ * passes + pass;
  const AttentionMethod& method = strategy_.method(now.layout, site.layer, site.role);
  const double start = recording_ ? seconds_so_far() : 0;
  const AttentionCall call{site, now, text, scale_, q, k, sequence, backend_, arena, selections_};
  if (probe_) probe_(call);
  PlannedAttention planned = method.plan(call);
  if (planned.mask) planned.plan.mask = &*planned.mask;
  backend_.attention(out, q, k, v, planned.plan);
  if (!recording_) return;
  DispatchRecord record;
  record.step = is_invariant(site.role) ? -1 : now.step;
  record.branch = branch_;
  record.layer = site.layer;
  record.role = site.role;
  record.method = strategy_.preset_name(now.layout, site.layer, site.role);
  record.implementation = backend_.last_attention();
  record.kept_blocks = kept_blocks_of(planned, q.dim(1), backend_);
  record.all_blocks = planned.all_blocks;
  record.seconds = seconds_so_far() - start;
  records_.push_back(std::move(record));
}

}  // namespace orrery
