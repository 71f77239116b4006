// The weights of the two towers, and what their layers have in common. Of transformer*.cpp only.
#pragma once

#include <cstdint>
#include <vector>

#include "model/transformer.h"

namespace orrery {

// One tower's part of a decoder layer.
struct TowerLayer {
  View input_norm, post_norm;  // [H]
  Linear qkv;                  // q, k, v side by side
  Linear out;                  // [H, heads * head_dim]
  View norm_q, norm_k;         // [head_dim], empty without q/k norm
  View norm_k_for_gen;         // [head_dim], text tower of Edge checkpoints only
  Linear up;                   // gate and up side by side, or up alone (relu2)
  Linear down;
  Precision precision = Precision::native;  // Transformer::set_precision

  // x as one of the layer's projections reads it: in 8 bits where they are, and so computed.
  Operand input(Backend& backend, Arena& arena, View x, const Linear& projection) const {
    return precision == Precision::native ? narrowed(backend, arena, x, projection) : Operand(x);
  }
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

// The column blocks of a fused projection as heads: q, k, v of [rows, (heads + 2 kv) * head_dim].
struct Heads {
  MutView q, k, v;
};
Heads split_heads(MutView fused, const Linear& qkv, const TransformerConfig& config);

// [rows, heads, D] as [rows, heads * D].
View as_rows(const View& heads);

// x += down(act(up(norm(x)))).
void mlp(Backend& backend, Arena& arena, MutView x, const TowerLayer& layer, Activation act,
         const Norm& norm);

}  // namespace orrery
