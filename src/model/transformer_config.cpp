#include "model/transformer_config.h"

#include <string>

#include "base/error.h"

namespace orrery {

namespace {

void read(const Json& config, const char* key, bool& field) {
  if (const Json* value = config.find(key); value && !value->is_null()) field = value->as_bool();
}
void read(const Json& config, const char* key, double& field) {
  if (const Json* value = config.find(key); value && !value->is_null()) field = value->as_double();
}
void read(const Json& config, const char* key, int64_t& field) {
  const Json* value = config.find(key);
  if (value == nullptr || value->is_null()) return;
  field = value->as_int();
  require(field > 0 && field <= int64_t{1} << 31, ErrorKind::corrupt, config.where(), ": ", key,
          " is ", field, ", expected a positive size");
}

// The sizes without which a model would silently be another one.
void require_present(const Json& config) {
  std::string missing;
  for (const char* key :
       {"hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "intermediate_size", "latent_channel", "vocab_size"}) {
    if (!config.has(key)) missing += (missing.empty() ? "" : ", ") + std::string(key);
  }
  require(missing.empty(), ErrorKind::corrupt, config.where(), ": missing ", missing,
          "; this is not the config of a Cosmos 3 transformer");
}

std::array<int64_t, 3> triple(const Json& list) {
  require(list.items().size() == 3, ErrorKind::corrupt, list.where(),
          ": expected three numbers, found ", list.items().size());
  return {list.at(size_t{0}).as_int(), list.at(1).as_int(), list.at(2).as_int()};
}

Activation activation_named(const Json& config) {
  const Json* value = config.find("hidden_act");
  if (value == nullptr || value->is_null() || value->as_string() == "silu")
    return Activation::silu_gate;
  if (value->as_string() == "relu2") return Activation::relu2;
  fail(ErrorKind::unsupported, config.where(), ": hidden_act \"", value->as_string(),
       "\" is not known; this engine has silu and relu2");
}

}  // namespace

TransformerConfig TransformerConfig::from_json(const Json& json) {
  if (const Json* name = json.find("_class_name");
      name && name->as_string() != "Cosmos3OmniTransformer") {
    fail(ErrorKind::unsupported, json.where(), ": _class_name is \"", name->as_string(),
         "\"; this engine runs Cosmos3OmniTransformer");
  }
  require_present(json);
  TransformerConfig c;
  c.quantisation = Quantisation::from_json(json);
  read(json, "attention_bias", c.attention_bias);
  read(json, "head_dim", c.head_dim);
  read(json, "hidden_size", c.hidden_size);
  read(json, "intermediate_size", c.intermediate_size);
  read(json, "base_fps", c.base_fps);
  read(json, "enable_fps_modulation", c.enable_fps_modulation);
  read(json, "latent_channel", c.latent_channel);
  read(json, "unified_3d_mrope_reset_spatial_ids", c.reset_spatial_ids);
  read(json, "unified_3d_mrope_temporal_modality_margin", c.temporal_margin);
  read(json, "latent_patch_size", c.latent_patch_size);
  read(json, "num_attention_heads", c.num_attention_heads);
  read(json, "num_hidden_layers", c.num_hidden_layers);
  read(json, "num_key_value_heads", c.num_key_value_heads);
  c.patch_latent_dim = c.latent_patch_size * c.latent_patch_size * c.latent_channel;
  int64_t stated_patch = c.patch_latent_dim;
  read(json, "patch_latent_dim", stated_patch);
  read(json, "rms_norm_eps", c.rms_norm_eps);
  read(json, "rope_theta", c.rope_theta);
  read(json, "action_gen", c.action_gen);
  read(json, "action_dim", c.action_dim);
  read(json, "num_embodiment_domains", c.num_embodiment_domains);
  read(json, "sound_gen", c.sound_gen);
  read(json, "sound_dim", c.sound_dim);
  read(json, "sound_latent_fps", c.sound_latent_fps);
  read(json, "timestep_scale", c.timestep_scale);
  read(json, "vocab_size", c.vocab_size);
  read(json, "qk_norm_for_text", c.qk_norm_for_text);
  read(json, "use_und_k_norm_for_gen", c.use_und_k_norm_for_gen);
  c.hidden_act = activation_named(json);
  const Json* axes = json.find("rope_axes_dim");
  if (axes == nullptr || axes->is_null()) {
    axes = nullptr;
    if (const Json* scaling = json.find("rope_scaling"); scaling && scaling->is_object()) {
      axes = scaling->find("mrope_section");
    }
  }
  if (axes && !axes->is_null()) c.rope_axes_dim = triple(*axes);

  const std::string where = json.where();
  require(stated_patch == c.patch_latent_dim, ErrorKind::corrupt, where, ": patch_latent_dim is ",
          stated_patch, ", but latent_patch_size^2 * latent_channel is ", c.patch_latent_dim);
  require(c.num_attention_heads % c.num_key_value_heads == 0, ErrorKind::corrupt, where, ": ",
          c.num_attention_heads, " attention heads do not divide into ", c.num_key_value_heads,
          " key/value heads");
  require(c.head_dim % 2 == 0, ErrorKind::corrupt, where, ": head_dim ", c.head_dim, " is odd");
  for (int64_t axis : c.rope_axes_dim) {
    require(axis >= 0 && axis <= c.head_dim / 2, ErrorKind::corrupt, where, ": rope axes [",
            c.rope_axes_dim[0], ", ", c.rope_axes_dim[1], ", ", c.rope_axes_dim[2],
            "] do not fit head_dim ", c.head_dim);
  }
  require(c.rms_norm_eps > 0 && c.rope_theta > 0 && c.base_fps > 0 && c.sound_latent_fps > 0,
          ErrorKind::corrupt, where,
          ": rms_norm_eps, rope_theta, base_fps and sound_latent_fps must be positive");
  require(!c.action_gen || c.action_dim > 0, ErrorKind::corrupt, where,
          ": action_gen without action_dim");
  require(!c.sound_gen || c.sound_dim > 0, ErrorKind::corrupt, where,
          ": sound_gen without sound_dim");
  return c;
}

}  // namespace orrery
