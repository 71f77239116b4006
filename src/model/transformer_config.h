// transformer/config.json, field by field, named as diffusers names them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "backend/backend.h"
#include "base/json.h"
#include "model/quantisation.h"

namespace orrery {

struct TransformerConfig {
  bool attention_bias = false;
  int64_t head_dim = 128;
  int64_t hidden_size = 4096;
  int64_t intermediate_size = 12288;
  double base_fps = 24;
  bool enable_fps_modulation = true;
  int64_t latent_channel = 48;
  bool reset_spatial_ids = true;    // unified_3d_mrope_reset_spatial_ids
  int64_t temporal_margin = 15000;  // unified_3d_mrope_temporal_modality_margin
  int64_t latent_patch_size = 2;
  int64_t num_attention_heads = 32;
  int64_t num_hidden_layers = 36;
  int64_t num_key_value_heads = 8;
  int64_t patch_latent_dim = 192;
  double rms_norm_eps = 1e-6;
  double rope_theta = 5e6;
  std::array<int64_t, 3> rope_axes_dim{24, 20, 20};  // frequencies of (T, H, W)
  bool action_gen = false;
  int64_t action_dim = 0;
  int64_t num_embodiment_domains = 32;
  bool sound_gen = false;
  int64_t sound_dim = 0;
  double sound_latent_fps = 25;
  double timestep_scale = 0.001;
  int64_t vocab_size = 151936;
  Activation hidden_act = Activation::silu_gate;  // or relu2 (Edge)
  bool qk_norm_for_text = true;
  bool use_und_k_norm_for_gen = false;
  Quantisation quantisation;

  // Absent fields keep the defaults above, unknown ones are tolerated; a value this engine does not
  // know is refused by name, and so are sizes that contradict each other.
  static TransformerConfig from_json(const Json& config);

  NormKind norm_kind() const {
    return hidden_act == Activation::relu2 ? NormKind::nemotron : NormKind::qwen;
  }
  // The extra key norm exists only in checkpoints whose text tower has no q/k norm of its own.
  bool has_und_k_norm_for_gen() const { return use_und_k_norm_for_gen && !qk_norm_for_text; }
};

}  // namespace orrery
