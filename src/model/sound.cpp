#include "model/sound.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "base/config_reader.h"
#include "base/error.h"
#include "model/sound_weights.h"

namespace orrery {

namespace {

constexpr int64_t kMaxSize = 1 << 20;
constexpr int64_t kKernel = 7;
constexpr int64_t kUnitDilations[] = {1, 3, 9};

void read_sizes(ConfigReader& config, const char* key, std::vector<int64_t>& field) {
  const Json* list = config.find(key);
  if (!list) return;
  field.clear();
  for (const Json& item : list->items()) {
    field.push_back(item.as_int());
    require(field.back() > 0 && field.back() <= kMaxSize, ErrorKind::corrupt, config.where(), ": ",
            key, " holds ", field.back(), ", expected 1 to ", kMaxSize);
  }
}

void require_value(ConfigReader& config, const char* key, const Json& only) {
  const Json* value = config.find(key);
  require(!value || value->dump() == only.dump(), ErrorKind::unsupported, config.where(), ": ", key,
          " is ", value ? value->dump() : "", "; this engine knows only ", only.dump());
}

void require_known(ConfigReader& config) {
  if (const Json* name = config.find("_class_name")) {
    require(name->as_string() == "Cosmos3AVAEAudioTokenizer", ErrorKind::unsupported,
            config.where(), ": _class_name is \"", name->as_string(),
            "\"; this engine runs Cosmos3AVAEAudioTokenizer");
  }
  require_value(config, "model_type", "autoencoder_v2");
  require_value(config, "use_wav_as_input", true);
  require_value(config, "dec_type", "oobleck");
  require_value(config, "dec_use_snake", true);
  for (const char* key : {"dec_final_tanh", "dec_anti_aliasing", "dec_use_nearest_upsample",
                          "dec_use_tanh_at_final", "anti_aliasing", "causal"}) {
    require_value(config, key, false);
  }
  require_value(config, "activation", "snakebeta");
  require_value(config, "snake_logscale", true);
  require_value(config, "padding_mode", "zeros");
  require_value(config, "bottleneck_type", "vae");
  if (const Json* bottleneck = config.find("bottleneck")) {
    ConfigReader reader(*bottleneck);
    require_value(reader, "type", "vae");
  }
  for (const char* key : {"latent_mean", "latent_std"}) {
    require(!config.find(key), ErrorKind::unsupported, config.where(), ": ", key,
            " is set; normalised sound latents are not supported");
  }
}

}  // namespace

SoundConfig SoundConfig::from_json(const Json& json) {
  ConfigReader config(json);
  require_known(config);
  // The encoder is not used: nothing is conditioned on sound.
  config.harmless({"encoder_enabled", "enc_c_mults", "enc_dim", "enc_hop_length",
                   "enc_identity_init", "enc_intermediate_dim", "enc_latent_dim", "enc_n_fft",
                   "enc_num_blocks", "enc_num_layers", "enc_strides", "enc_type", "enc_use_snake",
                   "input_channels", "normalize_volume", "stereo", "use_cuda_kernel"});
  SoundConfig c;
  config.read("sampling_rate", c.sampling_rate, 1, kMaxSize);
  config.read("vocoder_input_dim", c.latent_dim, 1, kMaxSize);
  config.read("dec_dim", c.dec_dim, 1, kMaxSize);
  read_sizes(config, "dec_c_mults", c.dec_c_mults);
  read_sizes(config, "dec_strides", c.dec_strides);
  config.read("dec_out_channels", c.out_channels, 1, kMaxSize);
  require(!c.dec_strides.empty() && c.dec_c_mults.size() == c.dec_strides.size(),
          ErrorKind::corrupt, json.where(), ": dec_c_mults has ", c.dec_c_mults.size(),
          " entries and dec_strides ", c.dec_strides.size(), ", expected equally many");
  c.hop_size = 1;
  for (int64_t stride : c.dec_strides) {
    c.hop_size *= stride;
    require(c.hop_size <= kMaxSize, ErrorKind::corrupt, json.where(),
            ": dec_strides multiply to more than ", kMaxSize);
  }
  int64_t stated = c.hop_size;
  config.read("hop_size", stated, 1, kMaxSize);
  require(stated == c.hop_size, ErrorKind::unsupported, json.where(), ": hop_size is ", stated,
          ", but dec_strides multiply to ", c.hop_size);
  config.refuse_rest("this engine's sound decoder");
  return c;
}

int64_t SoundConfig::latent_frames(int64_t num_frames, double fps) const {
  require(num_frames > 0, "sound: ", num_frames, " frames, expected at least 1");
  require(std::isfinite(fps) && fps > 0, "sound: fps is ", fps, ", expected a positive number");
  const double samples = std::trunc(double(num_frames) / fps * double(sampling_rate));
  require(samples < 9e15, "sound: a clip of ", num_frames, " frames at ", fps, " fps is too long");
  return std::max<int64_t>(1, (static_cast<int64_t>(samples) + hop_size - 1) / hop_size);
}

SoundDecoder::SoundDecoder(Backend& backend, SoundConfig config)
    : backend_(backend),
      config_(std::move(config)),
      weights_(std::make_unique<SoundWeights>(sound_structure(config_))) {}

SoundDecoder::~SoundDecoder() = default;

void SoundDecoder::visit(WeightVisitor& visitor) { orrery::visit(*weights_, config_, visitor); }

void SoundDecoder::decode(Arena& arena, MutView wave, View latents) {
  constexpr const char* kOp = "sound decode";
  require(latents.rank() == 2 && latents.dim(0) == config_.latent_dim && latents.dim(1) > 0 &&
              latents.dtype == DType::f32,
          kOp, ": latents are ", latents.shape, " ", name_of(latents.dtype), ", expected [",
          config_.latent_dim, ", frames] f32");
  const Shape expected{config_.out_channels, config_.hop_size * latents.dim(1)};
  require(wave.shape == expected && wave.dtype == DType::f32 && wave.contiguous() &&
              wave.device == DeviceKind::cpu,
          kOp, ": wave is ", wave.shape, " ", name_of(wave.dtype), ", expected contiguous ",
          expected, " f32 in host memory");

  // The longest stage decides; every stage works in the same three buffers.
  int64_t length = latents.dim(1);
  int64_t most = length * std::max(config_.latent_dim, weights_->blocks.front().in);
  for (const SoundBlockWeights& block : weights_->blocks) {
    length *= block.stride;
    most = std::max(most, length * std::max(block.out, config_.out_channels));
  }
  Arena::Scope scope(arena);
  MutView stream = arena.make({most}, DType::f32), left = arena.make({most}, DType::f32),
          right = arena.make({most}, DType::f32);
  const auto shaped = [](const MutView& buffer, int64_t rows, int64_t width) {
    return buffer.slice(0, 0, rows * width).reshape({rows, width});
  };
  const auto snake = [&](MutView out, View x, const SnakeWeights& weights) {
    backend_.snake(out, x, weights.alpha, weights.beta);
  };
  const auto convolve = [&](MutView out, View x, const SoundConvWeights& weights,
                            int64_t dilation) {
    const auto line = [](const View& v) { return v.reshape({1, 1, v.dim(0), v.dim(1)}); };
    const View& w = weights.weight;
    const int64_t side = dilation * (kKernel - 1) / 2;
    backend_.conv3d(
        MutView::cast(line(out)), line(x), w.reshape({w.dim(0), w.dim(1), 1, 1, kKernel}),
        weights.bias,
        {.dilation = {1, 1, dilation}, .pad_before = {0, 0, side}, .pad_after = {0, 0, side}});
  };

  length = latents.dim(1);
  MutView input = shaped(left, length, config_.latent_dim);
  backend_.copy(input, latents.permute({1, 0}));
  MutView x = shaped(stream, length, weights_->blocks.front().in);
  convolve(x, input, weights_->conv1, 1);
  for (const SoundBlockWeights& block : weights_->blocks) {
    MutView bent = shaped(left, length, block.in);
    snake(bent, x, block.snake1);
    length *= block.stride;
    x = shaped(stream, length, block.out);
    backend_.conv_transpose1d(x, bent, block.conv_t1.weight, block.conv_t1.bias, block.stride,
                              (block.stride + 1) / 2);
    MutView a = shaped(left, length, block.out), b = shaped(right, length, block.out);
    for (size_t u = 0; u < block.units.size(); ++u) {
      const SoundUnitWeights& unit = block.units[u];
      snake(a, x, unit.snake1);
      convolve(b, a, unit.conv1, kUnitDilations[u]);
      snake(a, b, unit.snake2);
      backend_.linear(x, a, unit.conv2.weight.reshape({block.out, block.out}),
                      {.bias = unit.conv2.bias, .residual = x});
    }
  }
  MutView bent = shaped(left, length, x.dim(1));
  snake(bent, x, weights_->snake1);
  MutView samples = shaped(right, length, config_.out_channels);
  convolve(samples, bent, weights_->conv2, 1);
  MutView channels = shaped(left, config_.out_channels, length);
  backend_.copy(channels, samples.permute({1, 0}));
  if (backend_.is_dry()) return;
  backend_.download(wave, channels);
  float* values = wave.as<float>();
  for (int64_t i = 0; i < wave.numel(); ++i) {
    require(std::isfinite(values[i]), ErrorKind::numeric, kOp, ": sample ", i % length,
            " of channel ", i / length, " is ", values[i],
            "; the latents or the weights are not usable");
    values[i] = std::clamp(values[i], -1.0f, 1.0f);
  }
}

}  // namespace orrery
