#include "model/transformer.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/error.h"
#include "model/layer_stream.h"

namespace orrery {

namespace {
constexpr int64_t kTimeFeatures = 256;
}  // namespace

// One tower's part of a decoder layer.
struct TowerLayer {
  View input_norm, post_norm;  // [H]
  Linear qkv;                  // q, k, v side by side
  Linear out;                  // [H, heads * head_dim]
  View norm_q, norm_k;         // [head_dim], empty without q/k norm
  View norm_k_for_gen;         // [head_dim], text tower of Edge checkpoints only
  Linear up;                   // gate and up side by side, or up alone (relu2)
  Linear down;
};

struct TransformerWeights {
  View embed_tokens;  // [V, H]
  std::vector<TowerLayer> und, gen;
  View norm_gen;  // [H]
  Linear time_1, time_2;
  Linear proj_in, proj_out;
  View action_in, action_in_bias;    // [D, A * H], [D, H]
  View action_out, action_out_bias;  // [D, H * A], [D, A]
  View action_modality;              // [H]
  Linear sound_in, sound_out;
  View sound_modality;  // [H]
};

Transformer::Transformer(Backend& backend, TransformerConfig config, DType dtype)
    : backend_(backend),
      config_(config),
      dtype_(dtype),
      weights_(std::make_unique<TransformerWeights>()) {
  require(dtype == DType::f32 || dtype == DType::bf16, "transformer: activations are ",
          name_of(dtype), ", expected f32 or bf16");
  weights_->und.resize(static_cast<size_t>(config.num_hidden_layers));
  weights_->gen.resize(static_cast<size_t>(config.num_hidden_layers));
}

Transformer::~Transformer() = default;

bool Transformer::is_unused(std::string_view name) {
  if (name.starts_with("model.")) name.remove_prefix(6);
  return name == "lm_head.weight" || name == "norm.weight" || name.starts_with("visual.") ||
         name.starts_with("action_pos_embed.") || name.ends_with("rotary_emb.inv_freq");
}

namespace {

// Tensor names of the two towers differ; their structure does not.
struct TowerNames {
  const char* suffix;  // of the norms and the MLP
  const char *q, *k, *v, *out, *norm_q, *norm_k;
};
constexpr TowerNames kUndNames{"", "to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k"};
constexpr TowerNames kGenNames{"_moe_gen",   "add_q_proj",   "add_k_proj",  "add_v_proj",
                               "to_add_out", "norm_added_q", "norm_added_k"};

void visit_layer(WeightVisitor& v, TowerLayer& layer, const TransformerConfig& c,
                 const std::string& at, const TowerNames& names, bool qk_norm) {
  const int64_t h = c.hidden_size, hd = c.head_dim;
  const int64_t q = c.num_attention_heads * hd, kv = c.num_key_value_heads * hd;
  const std::string attn = at + "self_attn.", mlp = at + "mlp" + names.suffix + ".";
  v.tensor(layer.input_norm, at + "input_layernorm" + names.suffix + ".weight", {h});
  v.tensor(layer.post_norm, at + "post_attention_layernorm" + names.suffix + ".weight", {h});
  v.linear(layer.qkv, {attn + names.q, attn + names.k, attn + names.v}, {q, kv, kv}, h, Split::rows,
           c.attention_bias);
  v.linear(layer.out, {attn + names.out}, {h}, q, Split::columns, c.attention_bias);
  if (qk_norm) {
    v.tensor(layer.norm_q, attn + names.norm_q + ".weight", {hd});
    v.tensor(layer.norm_k, attn + names.norm_k + ".weight", {hd});
  }
  const int64_t wide = c.intermediate_size;
  if (c.hidden_act == Activation::silu_gate) {
    v.linear(layer.up, {mlp + "gate_proj", mlp + "up_proj"}, {wide, wide}, h, Split::rows, false);
  } else {
    v.linear(layer.up, {mlp + "up_proj"}, {wide}, h, Split::rows, false);
  }
  v.linear(layer.down, {mlp + "down_proj"}, {h}, wide, Split::columns, false);
}

}  // namespace

void Transformer::visit_und(WeightVisitor& v) {
  visit_ends(Tower::und, v);
  for (int i = 0; i < static_cast<int>(config_.num_hidden_layers); ++i)
    visit_layer(Tower::und, i, v);
}

void Transformer::visit_gen(WeightVisitor& v) {
  for (int i = 0; i < static_cast<int>(config_.num_hidden_layers); ++i)
    visit_layer(Tower::gen, i, v);
  visit_ends(Tower::gen, v);
}

void Transformer::visit_layer(Tower tower, int layer, WeightVisitor& v) {
  const auto i = static_cast<size_t>(layer);
  const std::string at = concat("layers.", i, ".");
  if (tower == Tower::gen)
    return orrery::visit_layer(v, weights_->gen[i], config_, at, kGenNames, true);
  TowerLayer& und = weights_->und[i];
  orrery::visit_layer(v, und, config_, at, kUndNames, config_.qk_norm_for_text);
  if (config_.has_und_k_norm_for_gen()) {
    v.tensor(und.norm_k_for_gen, at + "self_attn.k_norm_und_for_gen.weight", {config_.head_dim});
  }
}

void Transformer::visit_ends(Tower tower, WeightVisitor& v) {
  TransformerWeights& w = *weights_;
  const int64_t h = config_.hidden_size, patch = config_.patch_latent_dim;
  if (tower == Tower::und)
    return v.table(w.embed_tokens, "embed_tokens.weight", {config_.vocab_size, h});
  v.tensor(w.norm_gen, "norm_moe_gen.weight", {h});
  v.linear(w.time_1, {"time_embedder.linear_1"}, {h}, kTimeFeatures, Split::none, true);
  v.linear(w.time_2, {"time_embedder.linear_2"}, {h}, h, Split::none, true);
  v.linear(w.proj_in, {"proj_in"}, {h}, patch, Split::none, true);
  v.linear(w.proj_out, {"proj_out"}, {patch}, h, Split::none, true);
  if (config_.action_gen) {
    const int64_t domains = config_.num_embodiment_domains, a = config_.action_dim;
    v.tensor(w.action_in, "action_proj_in.fc.weight", {domains, a * h});
    v.tensor(w.action_in_bias, "action_proj_in.bias.weight", {domains, h});
    v.tensor(w.action_out, "action_proj_out.fc.weight", {domains, h * a});
    v.tensor(w.action_out_bias, "action_proj_out.bias.weight", {domains, a});
    v.tensor(w.action_modality, "action_modality_embed", {h});
  }
  if (config_.sound_gen) {
    v.linear(w.sound_in, {"audio_proj_in"}, {h}, config_.sound_dim, Split::none, true);
    v.linear(w.sound_out, {"audio_proj_out"}, {config_.sound_dim}, h, Split::none, true);
    v.tensor(w.sound_modality, "audio_modality_embed", {h});
  }
}

void Transformer::set_stream(Tower tower, LayerStream* stream) {
  streams_[static_cast<size_t>(tower)] = stream;
}

const TowerLayer& Transformer::layer_of(Tower tower, int layer) {
  if (LayerStream* stream = streams_[static_cast<size_t>(tower)]) stream->acquire(layer);
  return (tower == Tower::und ? weights_->und : weights_->gen)[static_cast<size_t>(layer)];
}

Norm Transformer::norm() const {
  return {config_.norm_kind(), static_cast<float>(config_.rms_norm_eps), false};
}

namespace {

// Rows that fill a device: beyond, stacking evaluations only takes memory.
constexpr int64_t kMaxStackedRows = 8192;

// The column blocks of a fused projection as heads: q, k, v of [rows, (heads + 2 kv) * head_dim].
struct Heads {
  MutView q, k, v;
};

Heads split_heads(MutView fused, const Linear& qkv, const TransformerConfig& config) {
  const int64_t d = config.head_dim, width = qkv.out_features();
  // Local counts under tensor parallelism follow from the width that this rank's weights have.
  const int64_t groups = config.num_attention_heads / config.num_key_value_heads;
  const int64_t kv = width / d / (groups + 2);
  const int64_t q = kv * groups, rows = fused.dim(0);
  return {fused.slice(1, 0, q * d).reshape({rows, q, d}),
          fused.slice(1, q * d, kv * d).reshape({rows, kv, d}),
          fused.slice(1, (q + kv) * d, kv * d).reshape({rows, kv, d})};
}

View as_rows(const View& heads) {
  return heads.reshape({heads.dim(0), heads.dim(1) * heads.dim(2)});
}

// x += down(act(up(norm(x)))). A gate and its factor that lie in one matrix are one call.
void mlp(Backend& backend, Arena& arena, MutView x, const TowerLayer& layer, Activation act,
         const Norm& norm) {
  Arena::Scope scope(arena);
  const int64_t rows = x.dim(0), wide = layer.down.in_features();
  MutView normed = arena.make(x.shape, x.dtype);
  backend.rms_norm(normed, x, layer.post_norm, norm);
  MutView inner = arena.make({rows, wide}, x.dtype);
  if (act == Activation::silu_gate && layer.up.weights.size() == 1) {
    backend.gated_linear(inner, normed, layer.up.weights.front());
  } else if (act == Activation::silu_gate) {
    MutView gate_up = arena.make({rows, 2 * wide}, x.dtype);
    apply(backend, gate_up, normed, layer.up);
    backend.activation(inner, gate_up, act);
  } else {
    apply(backend, inner, normed, layer.up, {}, act);
  }
  apply(backend, x, inner, layer.down, x);
}

}  // namespace

// One prompt on its way through the text tower.
struct Transformer::Text {
  UndCache& cache;
  MutView cos, sin, x;
};

struct Transformer::TextPass::State {
  Transformer& transformer;
  Arena& arena;
  Attention& attention;
  Arena::Scope scope;
  std::vector<Prompt> prompts;
  std::vector<Text> texts;
  int next = 0;  // layer
};

Transformer::TextPass::TextPass(Transformer& transformer, Arena& arena,
                                std::span<const Prompt> prompts, Attention& attention)
    : state_(new State{transformer,
                       arena,
                       attention,
                       Arena::Scope(arena),
                       {prompts.begin(), prompts.end()},
                       {}}) {
  for (const Prompt& prompt : prompts)
    state_->texts.push_back(transformer.start_text(arena, prompt));
}
Transformer::TextPass::~TextPass() = default;

void Transformer::TextPass::advance_to(int layer) {
  State& s = *state_;
  for (; s.next <= layer; ++s.next) {
    for (size_t t = 0; t < s.texts.size(); ++t) {
      s.attention.begin_branch(s.prompts[t].branch);
      s.transformer.und_layer(s.arena, s.next, s.texts[t], s.attention);
    }
  }
}

void Transformer::prefill(Arena& arena, std::span<const Prompt> prompts, Attention& attention) {
  TextPass(*this, arena, prompts, attention).advance_to(static_cast<int>(weights_->und.size()) - 1);
}

UndCache Transformer::prefill(Arena& arena, std::span<const int64_t> ids, Attention& attention) {
  UndCache cache;
  const Prompt prompt{0, ids, &cache};
  prefill(arena, {&prompt, 1}, attention);
  return cache;
}

Transformer::Text Transformer::start_text(Arena& arena, const Prompt& prompt) {
  const auto rows = static_cast<int64_t>(prompt.ids.size());
  Text text{*prompt.cache, {}, {}, {}};
  text.cache = {};
  text.cache.text = rows;
  const RopeTable table = rope_table(config_, text_positions(rows));
  text.cos = arena.make({rows, config_.head_dim / 2}, DType::f32);
  text.sin = arena.make({rows, config_.head_dim / 2}, DType::f32);
  backend_.upload(text.cos, make_view(table.cos.data(), text.cos.shape, DType::f32));
  backend_.upload(text.sin, make_view(table.sin.data(), text.sin.shape, DType::f32));
  text.x = arena.make({rows, config_.hidden_size}, dtype_);
  backend_.gather_rows(text.x, weights_->embed_tokens, prompt.ids);
  return text;
}

void Transformer::und_layer(Arena& arena, int i, Text& text, Attention& attention) {
  Arena::Scope scope(arena);
  const TowerLayer& layer = layer_of(Tower::und, i);
  const Norm qk = norm();
  const MutView x = text.x;
  UndCache& cache = text.cache;
  MutView normed = arena.make(x.shape, dtype_);
  backend_.rms_norm(normed, x, layer.input_norm, norm());
  MutView fused = arena.make({cache.text, layer.qkv.out_features()}, dtype_);
  apply(backend_, fused, normed, layer.qkv);
  Heads heads = split_heads(fused, layer.qkv, config_);

  cache.k.push_back(backend_.allocate_tensor(heads.k.shape, dtype_));
  cache.v.push_back(backend_.allocate_tensor(heads.v.shape, dtype_));
  MutView cached_k = cache.k.back().view;
  backend_.copy(cache.v.back().view, heads.v);
  MutView causal_k = cached_k;
  if (layer.norm_k_for_gen) {
    // The causal pass reads un-normed keys, generation the normed ones.
    backend_.qk_norm_rope(cached_k, heads.k, layer.norm_k_for_gen, text.cos, text.sin, qk);
    backend_.qk_norm_rope(heads.k, heads.k, {}, text.cos, text.sin, qk);
    causal_k = heads.k;
  } else {
    backend_.qk_norm_rope(cached_k, heads.k, layer.norm_k, text.cos, text.sin, qk);
  }
  // Nothing reads the last layer's text beyond its keys and values; a probe may.
  if (i + 1 == static_cast<int>(weights_->und.size()) && !probe_) return;

  backend_.qk_norm_rope(heads.q, heads.q, layer.norm_q, text.cos, text.sin, qk);
  MutView attended = arena.make(heads.q.shape, dtype_);
  const MutView causal_v = cache.v.back().view;
  attention.run_text(arena, attended, heads.q, causal_k, causal_v, i);
  apply(backend_, x, as_rows(attended), layer.out, x);
  mlp(backend_, arena, x, layer, config_.hidden_act, norm());
  if (probe_) probe_(Tower::und, i, x);
}

std::array<int64_t, 3> Transformer::token_grid(int64_t frames, int64_t h, int64_t w) const {
  const int64_t p = config_.latent_patch_size;
  return {frames, (h + p - 1) / p, (w + p - 1) / p};
}

GenRope Transformer::make_rope(const Positions& positions, const Attention& attention) {
  const Sequence& sequence = attention.sequence();
  Positions stored = positions;
  if (!sequence.order.raster()) {
    const std::vector<int64_t> permutation = sequence.permutation();
    for (size_t i = 0; i < permutation.size(); ++i) {
      const auto base = static_cast<size_t>(sequence.control_tokens);
      stored[base + i] = positions[base + static_cast<size_t>(permutation[i])];
    }
  }
  const SequenceShare share = attention.share();
  const auto first = stored.begin() + share.begin;
  stored = Positions(first, first + share.rows);
  stored.resize(static_cast<size_t>(share.padded_rows));  // rows of padding: any position does
  const RopeTable table = rope_table(config_, stored);
  const Shape shape{share.padded_rows, config_.head_dim / 2};
  GenRope rope{backend_.allocate_tensor(shape, DType::f32),
               backend_.allocate_tensor(shape, DType::f32)};
  backend_.upload(rope.cos.view, make_view(table.cos.data(), shape, DType::f32));
  backend_.upload(rope.sin.view, make_view(table.sin.data(), shape, DType::f32));
  return rope;
}

void Transformer::embed_timestep(Arena& arena, MutView out, float timestep) {
  Arena::Scope scope(arena);
  const float scaled = timestep * static_cast<float>(config_.timestep_scale);
  float features[kTimeFeatures];
  constexpr int64_t kHalf = kTimeFeatures / 2;
  for (int64_t k = 0; k < kHalf; ++k) {
    const auto exponent = -std::log(10000.0f) * static_cast<float>(k) / static_cast<float>(kHalf);
    const float angle = scaled * std::exp(exponent);
    features[k] = std::cos(angle);
    features[kHalf + k] = std::sin(angle);
  }
  MutView wave = arena.make({1, kTimeFeatures}, DType::f32);
  backend_.upload(wave, make_view(features, wave.shape, DType::f32));
  MutView hidden = arena.make({1, config_.hidden_size}, DType::f32);
  apply(backend_, hidden, wave, weights_->time_1, {}, Activation::silu);
  apply(backend_, out, hidden, weights_->time_2);
}

namespace {

// Calls fn(begin, count) for each run of equal `wanted` flags.
template <typename Fn>
void for_runs(const std::vector<bool>& flags, bool wanted, const Fn& fn) {
  for (size_t i = 0; i < flags.size();) {
    size_t end = i;
    while (end < flags.size() && flags[end] == flags[i]) ++end;
    if (flags[i] == wanted) fn(static_cast<int64_t>(i), static_cast<int64_t>(end - i));
    i = end;
  }
}

bool any(const std::vector<bool>& flags) {
  return std::find(flags.begin(), flags.end(), true) != flags.end();
}

// A latent [C, T, h, w] whose spatial sizes are multiples of p, as patches [T, Hp, Wp, p, p, C]:
// channel fastest, then column and row within the patch.
View patches_of(const View& latent, int64_t p) {
  const int64_t c = latent.dim(0), t = latent.dim(1), rows = latent.dim(2) / p,
                columns = latent.dim(3) / p;
  return latent.reshape({c, t, rows, p, columns, p}).permute({1, 2, 4, 3, 5, 0});
}

}  // namespace

// Writes the item's tokens, raster order, to x [T Hp Wp, H].
void Transformer::embed_vision(Arena& arena, MutView x, const VisionItem& item, View time) {
  Arena::Scope scope(arena);
  const View& latent = item.latent;
  const auto [frames, rows, columns] = token_grid(latent.dim(1), latent.dim(2), latent.dim(3));
  const int64_t p = config_.latent_patch_size, c = config_.latent_channel;
  require(latent.dim(0) == c, "transformer: the latent has ", latent.dim(0),
          " channels, the model ", c);
  require(static_cast<int64_t>(item.noisy.size()) == frames, "transformer: ", item.noisy.size(),
          " noise flags for ", frames, " latent frames");
  View padded = latent;
  if (rows * p != latent.dim(2) || columns * p != latent.dim(3)) {
    MutView whole = arena.make({c, frames, rows * p, columns * p}, DType::f32);
    backend_.fill(whole, 0);
    backend_.copy(whole.slice(2, 0, latent.dim(2)).slice(3, 0, latent.dim(3)), latent);
    padded = whole;
  }
  MutView patches = arena.make({frames * rows * columns, p * p * c}, dtype_);
  backend_.copy(patches.reshape({frames, rows, columns, p, p, c}), patches_of(padded, p));
  apply(backend_, x, patches, weights_->proj_in);
  const int64_t per_frame = rows * columns;
  for_runs(item.noisy, true, [&](int64_t begin, int64_t count) {
    backend_.add_row(x.slice(0, begin * per_frame, count * per_frame), time);
  });
}

void Transformer::embed(Arena& arena, MutView x, const GenInput& in, View time,
                        const Sequence& sequence) {
  Arena::Scope scope(arena);
  const int64_t h = config_.hidden_size;
  int64_t row = 0;
  for (const VisionItem& control : in.controls) {
    const auto [t, rows, columns] =
        token_grid(control.latent.dim(1), control.latent.dim(2), control.latent.dim(3));
    embed_vision(arena, x.slice(0, row, t * rows * columns), control, time);
    row += t * rows * columns;
  }
  MutView video = x.slice(0, row, sequence.video_tokens());
  if (sequence.order.raster()) {
    embed_vision(arena, video, in.target, time);
  } else {
    MutView raster = arena.make(video.shape, dtype_);
    embed_vision(arena, raster, in.target, time);
    backend_.gather_rows(video, raster, sequence.permutation());
  }
  row += sequence.video_tokens();

  if (in.sound) {
    const int64_t tokens = in.sound.dim(1);
    MutView part = x.slice(0, row, tokens);
    MutView features = arena.make({tokens, config_.sound_dim}, dtype_);
    backend_.copy(features, in.sound.permute({1, 0}));
    apply(backend_, part, features, weights_->sound_in);
    backend_.add_row(part, weights_->sound_modality);
    backend_.add_row(part, time);
    row += tokens;
  }
  if (in.action) {
    const int64_t tokens = in.action.dim(0), a = config_.action_dim;
    require(in.action_domain >= 0 && in.action_domain < config_.num_embodiment_domains,
            "transformer: action domain ", in.action_domain, " is outside [0, ",
            config_.num_embodiment_domains, ")");
    MutView part = x.slice(0, row, tokens);
    MutView features = arena.make({tokens, a}, dtype_);
    backend_.copy(features, in.action);
    // The stored matrix of a domain is [in, out]: the transpose of other projections.
    LinearOptions options;
    options.bias = weights_->action_in_bias.select(0, in.action_domain);
    backend_.linear(part, features,
                    weights_->action_in.select(0, in.action_domain).reshape({a, h}).permute({1, 0}),
                    options);
    backend_.add_row(part, weights_->action_modality);
    for_runs(in.action_noisy, true, [&](int64_t begin, int64_t count) {
      backend_.add_row(part.slice(0, begin, count), time);
    });
  }
}

// x: this rank's rows of the embedding, padding 0. All of it is computed: it costs little beside a
// layer.
void Transformer::embed_share(Arena& arena, MutView x, const GenInput& in, View time,
                              const Attention& attention) {
  const SequenceShare share = attention.share();
  const int64_t all = attention.sequence().size();
  if (share.rows == all) return embed(arena, x, in, time, attention.sequence());
  Arena::Scope scope(arena);
  MutView whole = arena.make({all, config_.hidden_size}, dtype_);
  embed(arena, whole, in, time, attention.sequence());
  backend_.copy(x.slice(0, 0, share.rows), whole.slice(0, share.begin, share.rows));
  backend_.fill(x.slice(0, share.rows, share.padded_rows - share.rows), 0);
}

// x: the states of the evaluations, one below the other.
void Transformer::gen_layer(Arena& arena, int index, MutView x,
                            std::span<const Evaluation> evaluations) {
  const auto i = static_cast<size_t>(index);
  const TowerLayer& layer = layer_of(Tower::gen, index);
  const auto count = static_cast<int64_t>(evaluations.size());
  {
    Arena::Scope scope(arena);
    std::vector<AttentionInputs> inputs;
    for (const Evaluation& e : evaluations) {
      const View und_k = e.und->k[i].view;
      const int64_t heads =
          und_k.dim(1) * (config_.num_attention_heads / config_.num_key_value_heads);
      inputs.push_back(e.attention->inputs(arena, heads, und_k, e.und->v[i].view));
    }
    // Rows that are exchanged come in parts; stacked ones are whole.
    const std::vector<RowRange> parts = inputs.front().parts;
    for (const RowRange& part : parts) {
      const auto rows_of = [&](const View& all) {
        return MutView::cast(all.slice(0, part.begin, part.count));
      };
      Arena::Scope part_scope(arena);
      MutView fused = arena.make({count * part.count, layer.qkv.out_features()}, dtype_);
      MutView normed = arena.make({count * part.count, config_.hidden_size}, dtype_);
      backend_.rms_norm(normed, x.slice(0, part.begin, count * part.count), layer.input_norm,
                        norm());
      apply(backend_, fused, normed, layer.qkv);
      for (int64_t n = 0; n < count; ++n) {
        const Evaluation& e = evaluations[static_cast<size_t>(n)];
        AttentionInputs& to = inputs[static_cast<size_t>(n)];
        const Heads made =
            split_heads(fused.slice(0, n * part.count, part.count), layer.qkv, config_);
        const auto rotate = [&](const AttentionInputs::Slot& slot, const View& from,
                                const View& weight) {
          backend_.qk_norm_rope(rows_of(slot.rows), from.slice(1, slot.head, slot.rows.dim(1)),
                                weight, rows_of(e.rope->cos.view), rows_of(e.rope->sin.view),
                                norm());
        };
        for (const auto& slot : to.q) rotate(slot, made.q, layer.norm_q);
        for (const auto& slot : to.k) rotate(slot, made.k, layer.norm_k);
        for (const auto& slot : to.v) {
          backend_.copy(rows_of(slot.rows), made.v.slice(1, slot.head, slot.rows.dim(1)));
        }
        e.attention->send(to, part);
      }
    }
    for (size_t n = 0; n < evaluations.size(); ++n) {
      Attention& attention = *evaluations[n].attention;
      attention.begin_branch(evaluations[n].branch);
      attention.run(arena, inputs[n], {index, attention.generation_role()});
      const int64_t first = static_cast<int64_t>(n) * (x.dim(0) / count);
      for (const RowRange& part : parts) {
        MutView rows = x.slice(0, first + part.begin, part.count);
        apply(backend_, rows, as_rows(attention.output(inputs[n], part)), layer.out, rows);
      }
    }
  }
  mlp(backend_, arena, x, layer, config_.hidden_act, norm());
}

// The output heads applied to this rank's rows, then gathered: [sequence, width of the widest
// head]. Each row has its modality's velocity in its first columns. Every modality ends in this one
// gather (B70).
View Transformer::head_rows(Arena& arena, const GenOutput& out, const GenInput& in, View x,
                            const Attention& attention) {
  const Sequence& sequence = attention.sequence();
  const SequenceShare share = attention.share();
  const int64_t h = config_.hidden_size, p = config_.latent_patch_size;
  const int64_t patch = p * p * config_.latent_channel, a = config_.action_dim;
  int64_t width = patch;
  if (in.sound) width = std::max(width, config_.sound_dim);
  if (in.action) width = std::max(width, a);
  MutView mine = arena.make({share.padded_rows, width}, dtype_);
  {
    Arena::Scope scope(arena);
    MutView normed = arena.make(x.shape, dtype_);
    backend_.rms_norm(normed, x, weights_->norm_gen, norm());
    // Calls head(out, x) for this rank's part of the next `tokens` rows of the sequence.
    int64_t row = sequence.control_tokens;
    const auto each = [&](int64_t tokens, int64_t columns, const auto& head) {
      const int64_t begin = std::max(row, share.begin);
      const int64_t end = std::min(row + tokens, share.begin + share.rows);
      row += tokens;
      if (begin >= end) return;
      head(mine.slice(0, begin - share.begin, end - begin).slice(1, 0, columns),
           normed.slice(0, begin - share.begin, end - begin));
    };
    const auto projection = [&](const Linear& linear) {
      return [&](MutView to, View from) { apply(backend_, to, from, linear); };
    };
    const bool moves = out.vision && any(in.target.noisy);
    each(sequence.video_tokens(), patch, [&](MutView to, View from) {
      if (moves) apply(backend_, to, from, weights_->proj_out);
    });
    if (in.sound) each(in.sound.dim(1), config_.sound_dim, projection(weights_->sound_out));
    if (in.action) {
      LinearOptions options;
      options.bias = weights_->action_out_bias.select(0, in.action_domain);
      const View matrix =
          weights_->action_out.select(0, in.action_domain).reshape({h, a}).permute({1, 0});
      each(in.action.dim(0), a,
           [&](MutView to, View from) { backend_.linear(to, from, matrix, options); });
    }
  }
  return attention.whole(arena, mine);
}

void Transformer::read_heads(Arena& arena, const GenOutput& out, const GenInput& in, View x,
                             const Attention& attention) {
  Arena::Scope scope(arena);
  const Sequence& sequence = attention.sequence();
  const int64_t p = config_.latent_patch_size, c = config_.latent_channel;
  const View velocities = head_rows(arena, out, in, x, attention);
  int64_t row = sequence.control_tokens;

  if (out.vision && any(in.target.noisy)) {
    const auto [frames, rows, columns] = sequence.grid;
    View patches = velocities.slice(0, row, sequence.video_tokens()).slice(1, 0, p * p * c);
    if (!sequence.order.raster()) {
      MutView raster = arena.make(patches.shape, dtype_);
      backend_.gather_rows(raster, patches, sequence.inverse_permutation());
      patches = raster;
    }
    MutView whole = out.vision;
    const bool cropped = rows * p != out.vision.dim(2) || columns * p != out.vision.dim(3);
    if (cropped) whole = arena.make({c, frames, rows * p, columns * p}, DType::f32);
    const View latent =
        patches.reshape({frames, rows, columns, p, p, c}).permute({5, 0, 1, 3, 2, 4});
    backend_.copy(whole.reshape({c, frames, rows, p, columns, p}), latent);
    if (cropped) {
      backend_.copy(out.vision,
                    whole.slice(2, 0, out.vision.dim(2)).slice(3, 0, out.vision.dim(3)));
    }
    for_runs(in.target.noisy, false, [&](int64_t begin, int64_t count) {
      backend_.fill(out.vision.slice(1, begin, count), 0);
    });
  } else if (out.vision) {
    backend_.fill(out.vision, 0);
  }
  row += sequence.video_tokens();

  if (in.sound) {
    const int64_t tokens = in.sound.dim(1);
    const View velocity = velocities.slice(0, row, tokens).slice(1, 0, config_.sound_dim);
    backend_.copy(out.sound, velocity.permute({1, 0}));
    row += tokens;
  }
  if (in.action) {
    backend_.copy(out.action,
                  velocities.slice(0, row, in.action.dim(0)).slice(1, 0, config_.action_dim));
    for_runs(in.action_noisy, false, [&](int64_t begin, int64_t count) {
      backend_.fill(out.action.slice(0, begin, count), 0);
    });
  }
}

void Transformer::embed_time(Arena& arena, MutView out, float timestep) {
  Arena::Scope scope(arena);
  MutView exact = arena.make({1, config_.hidden_size}, DType::f32);
  embed_timestep(arena, exact, timestep);
  backend_.copy(out, exact.reshape({config_.hidden_size}));
}

void Transformer::velocity(Arena& arena, const GenOutput& out, const GenInput& in,
                           const UndCache& und, const GenRope& rope, Attention& attention) {
  Arena::Scope scope(arena);
  MutView time = arena.make({config_.hidden_size}, dtype_);
  embed_time(arena, time, in.timestep);
  const Evaluation evaluation{attention.branch(), out, in, &und, &rope, &attention};
  velocities(arena, {&evaluation, 1}, time, {});
}

bool Transformer::stacks(std::span<const Evaluation> evaluations) const {
  // On the CPU products of more rows gain nothing, and round differently.
  if (evaluations.size() < 2 || backend_.device() == DeviceKind::cpu) return false;
  const Attention& attention = *evaluations.front().attention;
  const int64_t rows = attention.sequence().size();
  const auto same = [&](const Evaluation& e) { return e.attention == &attention; };
  return std::all_of(evaluations.begin(), evaluations.end(), same) &&
         attention.share().rows == rows && std::ssize(evaluations) * rows <= kMaxStackedRows;
}

void Transformer::velocities(Arena& arena, std::span<const Evaluation> evaluations, View time,
                             const std::function<void(int layer)>& before_layer) {
  Arena::Scope scope(arena);
  struct State {
    MutView x;
    std::span<const Evaluation> evaluations;  // stacked in x
    MutView rows_of(size_t n) const {
      const int64_t rows = x.dim(0) / std::ssize(evaluations);
      return x.slice(0, static_cast<int64_t>(n) * rows, rows);
    }
  };
  const size_t at_once = stacks(evaluations) ? evaluations.size() : 1;
  std::vector<State> states;
  for (size_t begin = 0; begin < evaluations.size(); begin += at_once) {
    State state{{}, evaluations.subspan(begin, at_once)};
    const int64_t rows = evaluations[begin].attention->share().padded_rows;
    state.x = arena.make({static_cast<int64_t>(at_once) * rows, config_.hidden_size}, dtype_);
    for (size_t n = 0; n < at_once; ++n) {
      const Evaluation& e = state.evaluations[n];
      embed_share(arena, state.rows_of(n), e.in, time, *e.attention);
    }
    states.push_back(state);
  }
  for (int i = 0; i < static_cast<int>(weights_->gen.size()); ++i) {
    if (before_layer) before_layer(i);
    for (const State& state : states) {
      gen_layer(arena, i, state.x, state.evaluations);
      for (size_t n = 0; probe_ && n < at_once; ++n) probe_(Tower::gen, i, state.rows_of(n));
    }
  }
  for (const State& state : states) {
    for (size_t n = 0; n < at_once; ++n) {
      const Evaluation& e = state.evaluations[n];
      read_heads(arena, e.out, e.in, state.rows_of(n), *e.attention);
    }
  }
}

}  // namespace orrery
