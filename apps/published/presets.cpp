#include "published/presets.h"

#include <array>

#include "base/error.h"

namespace orrery {

namespace {

struct Size {
  std::string_view name;
  int64_t hidden, intermediate, layers, heads, kv_heads, vocabulary;
  double eps, theta;
  bool edge;
};

// As in transformer/config.json of the published checkpoints.
constexpr std::array<Size, 3> kSizes{{
    {"nano", 4096, 12288, 36, 32, 8, 151936, 1e-6, 5e6, false},
    {"super", 5120, 25600, 64, 64, 8, 151936, 1e-6, 5e6, false},
    {"edge", 2048, 9216, 28, 16, 8, 131072, 1e-5, 1e8, true},
}};

// As in vae/config.json of the published checkpoints.
constexpr std::array<double, 48> kMean{
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174,  0.1838,  0.1557,  -0.1382, 0.0542,
    0.2813,  0.0891,  0.1570,  -0.0098, 0.0375,  -0.1825, -0.2246, -0.1207, -0.0698, 0.5109,
    0.2665,  -0.2108, -0.2158, 0.2502,  -0.2055, -0.0322, 0.1109,  0.1567,  -0.0729, 0.0899,
    -0.2799, -0.1230, -0.0313, -0.1649, 0.0117,  0.0723,  -0.2839, -0.2083, -0.0520, 0.3748,
    0.0152,  0.1957,  0.1433,  -0.2944, 0.3573,  -0.0548, -0.1681, -0.0667};
constexpr std::array<double, 48> kDeviation{
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744};

template <typename Values>
Json list(const Values& values) {
  Json out = Json::array();
  for (auto value : values) out.push(value);
  return out;
}

Json transformer_config(const Size& size) {
  const std::array<int64_t, 3> axes{24, 20, 20};
  return Json::object()
      .set("_class_name", "Cosmos3OmniTransformer")
      .set("hidden_size", size.hidden)
      .set("intermediate_size", size.intermediate)
      .set("num_hidden_layers", size.layers)
      .set("num_attention_heads", size.heads)
      .set("num_key_value_heads", size.kv_heads)
      .set("head_dim", 128)
      .set("vocab_size", size.vocabulary)
      .set("rms_norm_eps", size.eps)
      .set("rope_theta", size.theta)
      .set("rope_scaling", Json::object().set("mrope_section", list(axes)))
      .set("hidden_act", size.edge ? "relu2" : "silu")
      .set("qk_norm_for_text", !size.edge)
      .set("action_gen", true)
      .set("action_dim", 64)
      .set("num_embodiment_domains", 32)
      .set("sound_gen", !size.edge)
      .set("sound_dim", size.edge ? Json() : Json(64))
      .set("sound_latent_fps", 25.0)
      .set("use_und_k_norm_for_gen", size.edge)
      .set("latent_channel", 48)
      .set("latent_patch_size", 2)
      .set("patch_latent_dim", 192);
}

Json vae_config() {
  const std::array<int64_t, 4> multipliers{1, 2, 4, 4};
  const std::array<bool, 3> temporal{false, true, true};
  return Json::object()
      .set("_class_name", "AutoencoderKLWan")
      .set("base_dim", 160)
      .set("decoder_base_dim", 256)
      .set("z_dim", 48)
      .set("dim_mult", list(multipliers))
      .set("num_res_blocks", 2)
      .set("temperal_downsample", list(temporal))
      .set("is_residual", true)
      .set("in_channels", 12)
      .set("out_channels", 12)
      .set("patch_size", 2)
      .set("scale_factor_temporal", 4)
      .set("scale_factor_spatial", 16)
      .set("latents_mean", list(kMean))
      .set("latents_std", list(kDeviation));
}

// The decoder of the released sound tokenizer. Nothing is conditioned on sound, so the encoder is
// left out.
Json sound_config() {
  const std::array<int64_t, 5> multipliers{1, 2, 4, 8, 16}, strides{2, 4, 5, 6, 8};
  return Json::object()
      .set("_class_name", "Cosmos3AVAEAudioTokenizer")
      .set("model_type", "autoencoder_v2")
      .set("sampling_rate", 48000)
      .set("hop_size", 1920)
      .set("stereo", true)
      .set("use_wav_as_input", true)
      .set("vocoder_input_dim", 64)
      .set("dec_type", "oobleck")
      .set("dec_dim", 320)
      .set("dec_c_mults", list(multipliers))
      .set("dec_strides", list(strides))
      .set("dec_out_channels", 2)
      .set("dec_use_snake", true)
      .set("activation", "snakebeta")
      .set("snake_logscale", true)
      .set("padding_mode", "zeros")
      .set("bottleneck_type", "vae")
      .set("encoder_enabled", false);
}

}  // namespace

ModelPreset model_preset(std::string_view name) {
  for (const Size& size : kSizes) {
    if (size.name != name) continue;
    return {transformer_config(size), vae_config(), size.edge ? Json() : sound_config()};
  }
  fail(ErrorKind::invalid_argument, "model size \"", name,
       "\" is not known; it is nano, super or edge");
}

}  // namespace orrery
