#include "model/transformer_config.h"

#include <cmath>
#include <string>

#include "base/config_reader.h"
#include "base/error.h"

namespace orrery {

namespace {

constexpr std::string_view kReader = "this engine's transformer";

// Bounds far above released models, so that sizes and their products stay far from overflow.
constexpr int64_t kMaxLayers = 1024, kMaxHeads = 1024, kMaxHeadDim = 1024, kMaxPatch = 16;
constexpr int64_t kMaxWidth = 1 << 18, kMaxChannels = 1 << 14, kMaxVocabulary = 1 << 24;
constexpr int64_t kMaxMargin = int64_t{1} << 31;

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

Activation activation_named(ConfigReader& config) {
  const Json* value = config.find("hidden_act");
  if (value == nullptr || value->as_string() == "silu") return Activation::silu_gate;
  if (value->as_string() == "relu2") return Activation::relu2;
  fail(ErrorKind::unsupported, config.where(), ": hidden_act \"", value->as_string(),
       "\" is not known; this engine has silu and relu2");
}

void refuse_other_class(ConfigReader& config) {
  const Json* name = config.find("_class_name");
  require(name == nullptr || name->as_string() == "Cosmos3OmniTransformer", ErrorKind::unsupported,
          config.where(), ": _class_name is \"", name ? name->as_string() : "",
          "\"; this engine runs Cosmos3OmniTransformer");
}

// An object that names no method (all null) says that the weights are not quantised.
void refuse_quantised(ConfigReader& config) {
  const Json* quantised = config.find("quantization_config");
  if (quantised == nullptr || !quantised->is_object()) return;
  for (const char* key : {"quant_algo", "quant_method"}) {
    if (const Json* method = quantised->find(key); method && method->is_string()) {
      fail(ErrorKind::unsupported, quantised->where(), ": quantised weights (", method->as_string(),
           ") are not supported; use the bf16 checkpoint");
    }
  }
}

// Frequencies of (T, H, W): rope_axes_dim or rope_scaling.mrope_section, which must agree.
void read_rope(ConfigReader& config, TransformerConfig& c) {
  const Json* axes = config.find("rope_axes_dim");
  if (axes) c.rope_axes_dim = triple(*axes);
  if (const Json* scaling = config.find("rope_scaling")) {
    ConfigReader rope(*scaling);
    for (const char* key : {"rope_type", "type"}) {
      const Json* type = rope.find(key);
      require(!type || type->as_string() == "default" || type->as_string() == "mrope",
              ErrorKind::unsupported, scaling->where(), ": ", key, " is ", type ? type->dump() : "",
              "; this engine knows only \"default\"");
    }
    bool interleaved = true;
    rope.read("mrope_interleaved", interleaved);
    require(interleaved, ErrorKind::unsupported, scaling->where(),
            ": mrope_interleaved is false; this engine interleaves the three axes");
    if (const Json* section = rope.find("mrope_section")) {
      const std::array<int64_t, 3> stated = triple(*section);
      require(!axes || stated == c.rope_axes_dim, ErrorKind::corrupt, section->where(), " is ",
              section->dump(), ", but rope_axes_dim is ", axes ? axes->dump() : "");
      c.rope_axes_dim = stated;
    }
    rope.refuse_rest(kReader);
  }
  const auto& [t, h, w] = c.rope_axes_dim;
  const int64_t all = c.head_dim / 2;
  const bool fit = t >= 0 && h >= 0 && w >= 0 && t <= all && h <= all && w <= all;
  require(fit && t + h + w == all, ErrorKind::corrupt, config.where(), ": the rope axes [", t, ", ",
          h, ", ", w, "] do not add up to half of head_dim ", c.head_dim);
}

void read_sizes(ConfigReader& config, TransformerConfig& c) {
  config.read("head_dim", c.head_dim, 1, kMaxHeadDim);
  config.read("hidden_size", c.hidden_size, 1, kMaxWidth);
  config.read("intermediate_size", c.intermediate_size, 1, kMaxWidth);
  config.read("latent_channel", c.latent_channel, 1, kMaxChannels);
  config.read("unified_3d_mrope_temporal_modality_margin", c.temporal_margin, 0, kMaxMargin);
  config.read("latent_patch_size", c.latent_patch_size, 1, kMaxPatch);
  config.read("num_attention_heads", c.num_attention_heads, 1, kMaxHeads);
  config.read("num_hidden_layers", c.num_hidden_layers, 1, kMaxLayers);
  config.read("num_key_value_heads", c.num_key_value_heads, 1, kMaxHeads);
  config.read("action_dim", c.action_dim, 1, kMaxWidth);
  config.read("num_embodiment_domains", c.num_embodiment_domains, 1, kMaxWidth);
  config.read("sound_dim", c.sound_dim, 1, kMaxWidth);
  config.read("vocab_size", c.vocab_size, 1, kMaxVocabulary);
  c.patch_latent_dim = c.latent_patch_size * c.latent_patch_size * c.latent_channel;
  int64_t stated = c.patch_latent_dim;
  config.read("patch_latent_dim", stated, 1, kMaxPatch * kMaxPatch * kMaxChannels);
  require(stated == c.patch_latent_dim, ErrorKind::corrupt, config.where(),
          ": patch_latent_dim is ", stated, ", but latent_patch_size^2 * latent_channel is ",
          c.patch_latent_dim);
}

void check(const std::string& where, const TransformerConfig& c) {
  require(c.num_attention_heads % c.num_key_value_heads == 0, ErrorKind::corrupt, where, ": ",
          c.num_attention_heads, " attention heads do not divide into ", c.num_key_value_heads,
          " key/value heads");
  require(c.head_dim % 2 == 0, ErrorKind::corrupt, where, ": head_dim ", c.head_dim, " is odd");
  for (const auto& [name, value] : {std::pair{"rms_norm_eps", c.rms_norm_eps},
                                    {"rope_theta", c.rope_theta},
                                    {"base_fps", c.base_fps},
                                    {"sound_latent_fps", c.sound_latent_fps},
                                    {"timestep_scale", c.timestep_scale}}) {
    require(std::isfinite(value) && value > 0, ErrorKind::corrupt, where, ": ", name, " is ", value,
            "; it must be positive");
  }
  require(!c.action_gen || c.action_dim > 0, ErrorKind::corrupt, where,
          ": action_gen without action_dim");
  require(!c.sound_gen || c.sound_dim > 0, ErrorKind::corrupt, where,
          ": sound_gen without sound_dim");
}

}  // namespace

TransformerConfig TransformerConfig::from_json(const Json& json) {
  ConfigReader config(json);
  refuse_other_class(config);
  require_present(json);
  refuse_quantised(config);
  // `runtime` is the attention strategy's, whose parser checks it.
  config.harmless({"attention_dropout", "backbone_type", "temporal_compression_factor", "dtype",
                   "torch_dtype", "transformers_version", "runtime"});
  TransformerConfig c;
  read_sizes(config, c);
  config.read("attention_bias", c.attention_bias);
  config.read("base_fps", c.base_fps);
  config.read("enable_fps_modulation", c.enable_fps_modulation);
  config.read("unified_3d_mrope_reset_spatial_ids", c.reset_spatial_ids);
  config.read("rms_norm_eps", c.rms_norm_eps);
  config.read("rope_theta", c.rope_theta);
  config.read("action_gen", c.action_gen);
  config.read("sound_gen", c.sound_gen);
  config.read("sound_latent_fps", c.sound_latent_fps);
  config.read("timestep_scale", c.timestep_scale);
  config.read("qk_norm_for_text", c.qk_norm_for_text);
  config.read("use_und_k_norm_for_gen", c.use_und_k_norm_for_gen);
  c.hidden_act = activation_named(config);
  check(json.where(), c);
  read_rope(config, c);
  config.refuse_rest(kReader);
  return c;
}

}  // namespace orrery
