#include "attention/attention.h"

#include <cmath>
#include <utility>

#include "base/error.h"
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

void Attention::replay(const std::string& key, const std::function<void()>& work) {
  bool can_be_recorded = !is_shared() && !probe_;
  for (int preset = 0; preset < strategy_.num_presets(); ++preset) {
    const AttentionMethod& method = strategy_.preset_method(preset);
    if (method.reuse_steps() > 1 || (recording_ && method.keeps_by_data())) can_be_recorded = false;
  }
  if (!can_be_recorded) return work();
  const AttentionMoment now = moment();
  const std::string whole = concat(key, " layout ", now.layout);
  const auto begin = static_cast<std::ptrdiff_t>(records_.size());
  if (backend_.replay(whole, work)) {
    replay_records_[whole].assign(records_.begin() + begin, records_.end());
    return;
  }
  if (!recording_) return;
  for (DispatchRecord record : replay_records_[whole]) {
    record.step = now.step;
    records_.push_back(std::move(record));
  }
}

AttentionMoment Attention::moment() const {
  require(moment_.has_value(),
          "attention: the strategy has a schedule, but no denoising step has begun");
  return *moment_;
}

bool Attention::is_shared() const { return cp_ != nullptr && cp_->size() > 1; }

AttentionInputs Attention::inputs(Arena& arena, int64_t heads, View und_k, View und_v) {
  require(und_k.rank() == 3 && und_v.shape == und_k.shape && und_v.dtype == und_k.dtype,
          "attention: text keys are ", und_k.shape, " and values ", und_v.shape,
          ", expected equal [text, KV heads, head_dim]");
  if (is_shared()) return shared_inputs(arena, heads, und_k, und_v);
  AttentionInputs in;
  const int64_t rows = sequence_.size(), kv_heads = und_k.dim(1), d = und_k.dim(2);
  in.text = und_k.dim(0);
  in.whole_q = arena.make({rows, heads, d}, und_k.dtype);
  in.whole_k = arena.make({in.text + rows, kv_heads, d}, und_k.dtype);
  in.whole_v = arena.make({in.text + rows, kv_heads, d}, und_k.dtype);
  in.whole_out = in.out = arena.make(in.whole_q.shape, und_k.dtype);
  if (in.text > 0) {
    backend_.copy(in.whole_k.slice(0, 0, in.text), und_k);
    backend_.copy(in.whole_v.slice(0, 0, in.text), und_v);
  }
  in.q = {{0, in.whole_q}};
  in.k = {{0, in.whole_k.slice(0, in.text, rows)}};
  in.v = {{0, in.whole_v.slice(0, in.text, rows)}};
  in.parts = {{0, rows}};
  return in;
}

// Ulysses: this rank's rows of all heads become all rows of this rank's heads, and back.
AttentionInputs Attention::shared_inputs(Arena& arena, int64_t heads, View und_k, View und_v) {
  const int ranks = cp_->size(), me = cp_->rank();
  const HeadExchange exchange(heads, und_k.dim(1), ranks);
  const int64_t q_heads = exchange.q_count(), kv_heads = exchange.kv_count(), d = und_k.dim(2);
  const int64_t rows = share().padded_rows, all = ranks * rows;
  AttentionInputs in;
  in.text = und_k.dim(0);
  in.parts = row_parts(rows, cp_);

  // A rank's own heads are made where they are attended, those of others where they are sent from.
  // Rows of rank 0 come first, so real rows are contiguous and all padding lies at the end.
  const auto place = [&](int64_t count, int64_t lead, const auto& head_of, bool in_order,
                         std::vector<AttentionInputs::Slot>& slots) {
    const MutView whole = arena.make({lead + all, count, d}, und_k.dtype);
    const MutView arrives = whole.slice(0, lead, all).reshape({ranks, rows, count, d});
    const MutView sent = arena.make(arrives.shape, und_k.dtype);
    for (int rank = 0; rank < ranks; ++rank) {
      const MutView block = (rank == me ? arrives : sent).select(0, rank);
      if (in_order) {
        slots.push_back({head_of(rank, 0), block});
        continue;
      }
      for (int64_t j = 0; j < count; ++j) {
        slots.push_back({head_of(rank, j), block.slice(1, j, 1)});
      }
    }
    in.trades.push_back({arrives, sent});
    return whole;
  };
  const auto q_head = [&](int rank, int64_t j) { return rank * q_heads + j; };
  const auto kv_head = [&](int rank, int64_t j) { return exchange.kv_head(rank, j); };
  in.splits_kv = exchange.splits_kv();
  const MutView whole_q = place(q_heads, 0, q_head, true, in.q);
  const MutView whole_k = place(kv_heads, in.text, kv_head, in.splits_kv, in.k);
  const MutView whole_v = place(kv_heads, in.text, kv_head, in.splits_kv, in.v);
  for (int64_t j = 0; in.text > 0 && j < kv_heads; ++j) {
    const int64_t head = exchange.kv_head(me, j);
    backend_.copy(whole_k.slice(0, 0, in.text).select(1, j), und_k.select(1, head));
    backend_.copy(whole_v.slice(0, 0, in.text).select(1, j), und_v.select(1, head));
  }
  // Padding is cut off here: it lies behind all real rows.
  in.whole_q = whole_q.slice(0, 0, sequence_.size());
  in.whole_k = whole_k.slice(0, 0, in.text + sequence_.size());
  in.whole_v = whole_v.slice(0, 0, in.text + sequence_.size());
  const MutView whole_out = arena.make(whole_q.shape, und_k.dtype);
  in.whole_out = whole_out.slice(0, 0, sequence_.size());
  in.sent_out = whole_out.reshape({ranks, rows, q_heads, d});
  // The queries that were sent are gone by then.
  in.arrived_out = MutView::cast(in.trades.front().x);
  in.out = arena.make({rows, heads, d}, und_k.dtype);
  return in;
}

void Attention::send(AttentionInputs& in, const RowRange& part) {
  // A dry run moves nothing, and other ranks may not be there.
  if (!is_shared() || backend_.is_dry() || part.count == 0) return;
  std::vector<Trade> trades;
  for (const Trade& trade : in.trades) {
    trades.push_back(
        {trade.out.slice(1, part.begin, part.count), trade.x.slice(1, part.begin, part.count)});
  }
  in.tickets.push_back(cp_->start_exchange(trades));
}

void Attention::run(Arena& arena, AttentionInputs& in, const AttentionSite& site) {
  if (is_shared()) {
    const AttentionMethod& method = strategy_.method(moment().layout, site.layer, site.role);
    require(in.splits_kv || !method.needs_whole_groups(), ErrorKind::unsupported,
            "attention: ", method.description(),
            " needs all query heads of a key/value head on one rank, but the ", cp_->size(),
            " ranks that share the sequence do not divide the key/value heads");
    if (!in.tickets.empty()) cp_->finish(in.tickets.back());
    in.tickets.clear();
  }
  attend(arena, {in.whole_out, in.whole_q, in.whole_k, in.whole_v, in.text}, site);
  if (!is_shared() || backend_.is_dry()) return;
  for (const RowRange& part : in.parts) {
    if (part.count == 0) continue;
    const Trade back{in.arrived_out.slice(1, part.begin, part.count),
                     in.sent_out.slice(1, part.begin, part.count)};
    in.tickets.push_back(cp_->start_exchange({&back, 1}));
  }
}

View Attention::output(AttentionInputs& in, const RowRange& part) {
  const MutView out = in.out.slice(0, part.begin, part.count);
  if (!is_shared()) return out;
  if (!in.tickets.empty()) {
    cp_->finish(in.tickets.front());
    in.tickets.erase(in.tickets.begin());
  }
  const int64_t heads = in.sent_out.dim(2);
  for (int rank = 0; rank < cp_->size(); ++rank) {
    const MutView& from = rank == cp_->rank() ? in.sent_out : in.arrived_out;
    backend_.copy(out.slice(1, rank * heads, heads),
                  from.select(0, rank).slice(0, part.begin, part.count));
  }
  return out;
}

void Attention::run_text(Arena& arena, const Operands& operands, int layer, int branch) {
  attend(arena, operands, {layer, AttentionRole::und, 0, branch});
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

void Attention::attend(Arena& arena, const Operands& operands, const AttentionSite& site) {
  const int64_t queries = operands.q.dim(0);
  require(is_invariant(site.role) || queries == sequence_.size(), "attention: ", queries,
          " queries for a sequence of ", sequence_.size());
  const bool weighs = site.role == AttentionRole::gen_multi_control && control_weights_.size() > 1;
  if (weighs)
    attend_controls(arena, operands, site);
  else
    attend_once(arena, operands, site, sequence_, 0);
}

void Attention::attend_controls(Arena& arena, const Operands& all, const AttentionSite& site) {
  const Arena::Scope scope(arena);
  const View &q = all.q, &k = all.k;
  const auto streams = static_cast<int64_t>(control_weights_.size());
  const int64_t controls = sequence_.control_tokens, each = controls / streams;
  const int64_t rest = sequence_.size() - controls, text = all.text;
  Sequence part = sequence_;
  part.control_tokens = each;

  // Rows [skip, skip + each) of the controls and whatever follows all of them, behind `lead` rows.
  const auto gather = [&](MutView to, View from, int64_t lead, int64_t stream) {
    if (lead > 0) backend_.copy(to.slice(0, 0, lead), from.slice(0, 0, lead));
    backend_.copy(to.slice(0, lead, each), from.slice(0, lead + stream * each, each));
    backend_.copy(to.slice(0, lead + each, rest), from.slice(0, lead + controls, rest));
  };
  const MutView found = arena.make({streams, rest, q.dim(1), q.dim(2)}, all.out.dtype);
  const MutView part_q = arena.make({each + rest, q.dim(1), q.dim(2)}, q.dtype);
  const MutView part_k = arena.make({text + each + rest, k.dim(1), k.dim(2)}, k.dtype);
  const MutView part_v = arena.make(part_k.shape, all.v.dtype);
  const MutView part_out = arena.make(part_q.shape, all.out.dtype);
  std::vector<Term> terms;
  for (int64_t i = 0; i < streams; ++i) {
    gather(part_q, q, 0, i);
    gather(part_k, k, text, i);
    gather(part_v, all.v, text, i);
    attend_once(arena, {part_out, part_q, part_k, part_v, text}, site, part, static_cast<int>(i));
    backend_.copy(all.out.slice(0, i * each, each), part_out.slice(0, 0, each));
    backend_.copy(found.select(0, i), part_out.slice(0, each, rest));
    terms.push_back({control_weights_[static_cast<size_t>(i)], found.select(0, i)});
  }
  backend_.lincomb(all.out.slice(0, controls, rest), terms);
}

void Attention::attend_once(Arena& arena, const Operands& of, const AttentionSite& site,
                            const Sequence& sequence, int pass) {
  const Arena::Scope scope(arena);
  // The text tower runs before the first step: it is the same in every layout.
  const bool any_layout_does = is_invariant(site.role) && !moment_;
  const AttentionMoment now = any_layout_does ? AttentionMoment{} : moment();
  const AttentionMethod& method = strategy_.method(now.layout, site.layer, site.role);
  const AttentionCall call{site,     now,      of.text, scale_,      of.q, of.k,
                           sequence, backend_, arena,   selections_, pass};
  if (probe_) probe_(call);
  PlannedAttention planned = method.plan(call);
  if (planned.mask) planned.plan.mask = &*planned.mask;
  const Ran ran = backend_.attention(of.out, of.q, of.k, of.v, planned.plan);
  if (!recording_) return;
  DispatchRecord record;
  record.step = is_invariant(site.role) ? -1 : now.step;
  record.layer = site.layer;
  record.evaluation = site.evaluation;
  record.branch = site.branch;
  record.role = site.role;
  record.method = strategy_.preset_name(now.layout, site.layer, site.role);
  record.implementation = ran.name;
  record.kept_blocks = kept_blocks_of(planned, of.q.dim(1), backend_);
  record.all_blocks = planned.all_blocks;
  record.seconds = planned.seconds + ran.seconds;
  records_.push_back(std::move(record));
}

}  // namespace orrery
