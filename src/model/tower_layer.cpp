#include "model/tower_layer.h"

namespace orrery {

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

void mlp(Backend& backend, Arena& arena, MutView x, const TowerLayer& layer, Activation act,
         const Norm& norm) {
  Arena::Scope scope(arena);
  const int64_t rows = x.dim(0), wide = layer.down.in_features();
  MutView normed = arena.make(x.shape, x.dtype);
  backend.rms_norm(normed, x, layer.post_norm, norm);
  MutView inner = arena.make({rows, wide}, x.dtype);
  const Operand read = layer.input(backend, arena, normed, layer.up);
  // A gate and its factor that lie in one matrix are one call.
  if (act == Activation::silu_gate && layer.up.weights.size() == 1) {
    backend.gated_linear(inner, read, layer.up.weights.front());
  } else if (act == Activation::silu_gate) {
    MutView gate_up = arena.make({rows, 2 * wide}, x.dtype);
    apply(backend, gate_up, read, layer.up);
    backend.activation(inner, gate_up, act);
  } else {
    apply(backend, inner, read, layer.up, {}, act);
  }
  apply(backend, x, layer.input(backend, arena, inner, layer.down), layer.down, x);
}

}  // namespace orrery
