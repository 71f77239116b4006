// The generation tower: runs at every step, for each evaluation of the guidance.
#include <algorithm>

#include "base/error.h"
#include "model/tower_layer.h"

namespace orrery {

namespace {

// Rows that fill a device: beyond, stacking evaluations only takes memory.
constexpr int64_t kMaxStackedRows = 8192;

}  // namespace

struct Transformer::GenPass::State {
  Transformer& model;
  Arena& arena;
  Arena::Scope scope;
  std::vector<Evaluation> evaluations;
  MutView x;     // their states, one below the other
  int next = 0;  // layer

  int64_t count() const { return std::ssize(evaluations); }
  int64_t rows() const { return x.dim(0) / count(); }
  MutView rows_of(size_t n) const { return x.slice(0, static_cast<int64_t>(n) * rows(), rows()); }
  void layer(int i);
  void make_part(const TowerLayer& weights, std::vector<AttentionInputs>& inputs,
                 const RowRange& part);
};

bool Transformer::stacks(std::span<const Evaluation> evaluations) const {
  // On the CPU products of more rows gain nothing, and round differently.
  if (evaluations.size() < 2 || backend_.device() == DeviceKind::cpu) return false;
  const Attention& attention = *evaluations.front().attention;
  const int64_t rows = attention.sequence().size();
  const auto same = [&](const Evaluation& e) { return e.attention == &attention; };
  return std::all_of(evaluations.begin(), evaluations.end(), same) &&
         attention.share().rows == rows && std::ssize(evaluations) * rows <= kMaxStackedRows;
}

Transformer::GenPass::GenPass(Transformer& transformer, Arena& arena,
                              std::span<const Evaluation> evaluations, View time)
    : state_(new State{
          transformer, arena, Arena::Scope(arena), {evaluations.begin(), evaluations.end()}, {}}) {
  State& s = *state_;
  require(s.count() == 1 || transformer.stacks(evaluations),
          "transformer: a pass takes one evaluation or several that stack, got ", s.count());
  const int64_t rows = s.evaluations.front().attention->share().padded_rows;
  s.x = arena.make({s.count() * rows, transformer.config_.hidden_size}, transformer.dtype_);
  for (size_t n = 0; n < s.evaluations.size(); ++n) {
    const Evaluation& e = s.evaluations[n];
    transformer.embed_share(arena, s.rows_of(n), e.in, time, *e.attention);
  }
}
Transformer::GenPass::~GenPass() = default;

void Transformer::GenPass::advance_to(int layer) {
  for (int& next = state_->next; next <= layer; ++next) state_->layer(next);
}

MutView Transformer::GenPass::hidden(size_t evaluation) const {
  return state_->rows_of(evaluation);
}

void Transformer::GenPass::finish() {
  State& s = *state_;
  for (size_t n = 0; n < s.evaluations.size(); ++n) {
    const Evaluation& e = s.evaluations[n];
    s.model.read_heads(s.arena, e.out, e.in, s.rows_of(n), *e.attention);
  }
}

// Queries, keys and values of a part of the rows of every evaluation, written where attention reads
// them and sent where other ranks do.
void Transformer::GenPass::State::make_part(const TowerLayer& weights,
                                            std::vector<AttentionInputs>& inputs,
                                            const RowRange& part) {
  Backend& backend = model.backend_;
  const Norm norm = model.norm();
  const auto rows_of = [&](const View& all) {
    return MutView::cast(all.slice(0, part.begin, part.count));
  };
  Arena::Scope part_scope(arena);
  MutView fused = arena.make({count() * part.count, weights.qkv.out_features()}, x.dtype);
  MutView normed = arena.make({count() * part.count, x.dim(1)}, x.dtype);
  backend.rms_norm(normed, x.slice(0, part.begin, count() * part.count), weights.input_norm, norm);
  apply(backend, fused, weights.input(backend, arena, normed, weights.qkv), weights.qkv);
  for (int64_t n = 0; n < count(); ++n) {
    const Evaluation& e = evaluations[static_cast<size_t>(n)];
    AttentionInputs& to = inputs[static_cast<size_t>(n)];
    const Heads made =
        split_heads(fused.slice(0, n * part.count, part.count), weights.qkv, model.config_);
    const auto rotate = [&](const AttentionInputs::Slot& slot, const View& from,
                            const View& weight) {
      backend.qk_norm_rope(rows_of(slot.rows), from.slice(1, slot.head, slot.rows.dim(1)), weight,
                           rows_of(e.rope->cos.view), rows_of(e.rope->sin.view), norm);
    };
    for (const auto& slot : to.q) rotate(slot, made.q, weights.norm_q);
    for (const auto& slot : to.k) rotate(slot, made.k, weights.norm_k);
    for (const auto& slot : to.v) {
      backend.copy(rows_of(slot.rows), made.v.slice(1, slot.head, slot.rows.dim(1)));
    }
    e.attention->send(to, part);
  }
}

void Transformer::GenPass::State::layer(int index) {
  const auto i = static_cast<size_t>(index);
  Backend& backend = model.backend_;
  const TransformerConfig& config = model.config_;
  const TowerLayer& weights = model.layer_of(Tower::gen, index);
  {
    Arena::Scope attention_scope(arena);
    std::vector<AttentionInputs> inputs;
    for (const Evaluation& e : evaluations) {
      const View und_k = e.und->k[i].view;
      const int64_t heads =
          und_k.dim(1) * (config.num_attention_heads / config.num_key_value_heads);
      inputs.push_back(e.attention->inputs(arena, heads, und_k, e.und->v[i].view));
    }
    // Rows that are exchanged come in parts; stacked ones are whole.
    const std::vector<RowRange> parts = inputs.front().parts;
    for (const RowRange& part : parts) make_part(weights, inputs, part);
    for (size_t n = 0; n < evaluations.size(); ++n) {
      const Evaluation& e = evaluations[n];
      e.attention->run(arena, inputs[n], {index, e.attention->generation_role(), e.index});
      const MutView mine = rows_of(n);
      for (const RowRange& part : parts) {
        MutView rows = mine.slice(0, part.begin, part.count);
        Arena::Scope part_scope(arena);
        const View attended = as_rows(e.attention->output(inputs[n], part));
        apply(backend, rows, weights.input(backend, arena, attended, weights.out), weights.out,
              rows);
      }
    }
  }
  mlp(backend, arena, x, weights, config.hidden_act, model.norm());
}

}  // namespace orrery
