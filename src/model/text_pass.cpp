// The text tower: runs once per prompt and leaves its keys and values behind.
#include "model/tower_layer.h"

namespace orrery {

struct Transformer::TextPass::State {
  // One prompt on its way.
  struct Text {
    Prompt prompt;
    MutView cos, sin, x;
  };

  Transformer& model;
  Arena& arena;
  Attention& attention;
  LastTextLayer last;
  Arena::Scope scope;
  std::vector<Text> texts;
  int next = 0;  // layer

  void start(const Prompt& prompt);
  void layer(int i, Text& text);
};

Transformer::TextPass::TextPass(Transformer& transformer, Arena& arena,
                                std::span<const Prompt> prompts, Attention& attention,
                                LastTextLayer last)
    : state_(new State{transformer, arena, attention, last, Arena::Scope(arena), {}}) {
  for (const Prompt& prompt : prompts) state_->start(prompt);
}
Transformer::TextPass::~TextPass() = default;

void Transformer::TextPass::advance_to(int layer) {
  for (int& next = state_->next; next <= layer; ++next) {
    for (State::Text& text : state_->texts) state_->layer(next, text);
  }
}

View Transformer::TextPass::hidden(size_t prompt) const { return state_->texts.at(prompt).x; }

void Transformer::TextPass::State::start(const Prompt& prompt) {
  Backend& backend = model.backend_;
  const auto rows = static_cast<int64_t>(prompt.ids.size());
  *prompt.cache = {};
  prompt.cache->text = rows;
  Text text{prompt, {}, {}, {}};
  const RopeTable table = rope_table(model.config_, text_positions(rows));
  text.cos = arena.make({rows, model.config_.head_dim / 2}, DType::f32);
  text.sin = arena.make({rows, model.config_.head_dim / 2}, DType::f32);
  backend.upload(text.cos, make_view(table.cos.data(), text.cos.shape, DType::f32));
  backend.upload(text.sin, make_view(table.sin.data(), text.sin.shape, DType::f32));
  text.x = arena.make({rows, model.config_.hidden_size}, model.dtype_);
  backend.gather_rows(text.x, model.weights_->embed_tokens, prompt.ids);
  texts.push_back(text);
}

void Transformer::TextPass::State::layer(int i, Text& text) {
  Arena::Scope layer_scope(arena);
  Backend& backend = model.backend_;
  const TransformerConfig& config = model.config_;
  const TowerLayer& weights = model.layer_of(Tower::und, i);
  const Norm norm = model.norm();
  const MutView x = text.x;
  UndCache& cache = *text.prompt.cache;
  MutView normed = arena.make(x.shape, x.dtype);
  backend.rms_norm(normed, x, weights.input_norm, norm);
  MutView fused = arena.make({cache.text, weights.qkv.out_features()}, x.dtype);
  apply(backend, fused, weights.input(backend, arena, normed, weights.qkv), weights.qkv);
  Heads heads = split_heads(fused, weights.qkv, config);

  cache.k.push_back(backend.allocate_tensor(heads.k.shape, x.dtype));
  cache.v.push_back(backend.allocate_tensor(heads.v.shape, x.dtype));
  MutView cached_k = cache.k.back().view;
  backend.copy(cache.v.back().view, heads.v);
  MutView causal_k = cached_k;
  if (weights.norm_k_for_gen) {
    // The causal pass reads un-normed keys, generation the normed ones.
    backend.qk_norm_rope(cached_k, heads.k, weights.norm_k_for_gen, text.cos, text.sin, norm);
    backend.qk_norm_rope(heads.k, heads.k, {}, text.cos, text.sin, norm);
    causal_k = heads.k;
  } else {
    backend.qk_norm_rope(cached_k, heads.k, weights.norm_k, text.cos, text.sin, norm);
  }
  if (i == model.last_layer() && last == LastTextLayer::keys_and_values) return;

  backend.qk_norm_rope(heads.q, heads.q, weights.norm_q, text.cos, text.sin, norm);
  MutView attended = arena.make(heads.q.shape, x.dtype);
  attention.run_text(arena, {attended, heads.q, causal_k, cache.v.back().view}, i,
                     text.prompt.branch);
  apply(backend, x, weights.input(backend, arena, as_rows(attended), weights.out), weights.out, x);
  mlp(backend, arena, x, weights, config.hidden_act, norm);
}

}  // namespace orrery
