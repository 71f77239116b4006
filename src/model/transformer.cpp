#include "model/transformer.h"

#include <cmath>
#include <string>

#include "base/error.h"
#include "model/layer_stream.h"
#include "model/tower_layer.h"

namespace orrery {

namespace {
constexpr int64_t kTimeFeatures = 256;
}  // namespace

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

void Transformer::set_precision(Tower tower, Precision precision) {
  for (TowerLayer& layer : tower == Tower::und ? weights_->und : weights_->gen)
    layer.precision = precision;
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

void Transformer::embed_time(Arena& arena, MutView out, float timestep) {
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
  MutView embedded = arena.make({1, config_.hidden_size}, DType::f32);
  apply(backend_, embedded, hidden, weights_->time_2);
  backend_.copy(out, embedded.reshape({config_.hidden_size}));
}

}  // namespace orrery
