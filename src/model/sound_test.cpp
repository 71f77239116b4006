#include "model/sound.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>

#include "backend/dry_run.h"
#include "cpu/cpu_backend.h"
#include "expect_error.h"
#include "model/weights.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

using Values = std::vector<float>;

Json released_json() {
  return Json::parse(R"({
    "_class_name": "Cosmos3AVAEAudioTokenizer", "model_type": "autoencoder_v2",
    "sampling_rate": 48000, "vocoder_input_dim": 64, "dec_dim": 320, "dec_c_mults": [1, 2, 4, 8, 16],
    "dec_strides": [2, 4, 5, 6, 8], "dec_out_channels": 2, "hop_size": null,
    "dec_type": "oobleck",
    "dec_use_snake": true, "dec_final_tanh": false, "activation": "snakebeta", "snake_logscale": true,
    "padding_mode": "zeros", "bottleneck": {"type": "vae"}, "latent_mean": null, "latent_std": null,
    "enc_dim": 192, "use_cuda_kernel": true})",
                     "sound_tokenizer/config.json");
}

SoundConfig tiny_config() {
  SoundConfig config;
  config.sampling_rate = 480;
  config.latent_dim = 6;
  config.dec_dim = 4;
  config.dec_c_mults = {1, 2, 4};
  config.dec_strides = {2, 3, 5};
  config.hop_size = 30;
  return config;
}

struct Stored {
  Shape shape;
  Values values;
};
using Tensors = std::map<std::string, Stored>;

Tensors random_tensors(const SoundConfig& config) {
  Tensors tensors;
  std::mt19937 engine(7);
  std::normal_distribution<float> normal;
  const auto add = [&](const std::string& name, Shape shape, float mean, float deviation) {
    Stored& stored = tensors[name];
    stored.shape = shape;
    for (int64_t i = 0; i < shape.numel(); ++i)
      stored.values.push_back(mean + deviation * normal(engine));
  };
  const auto snake = [&](const std::string& name, int64_t c) {
    add(name + ".alpha", {1, c, 1}, 0, 0.2f);
    add(name + ".beta", {1, c, 1}, 0, 0.2f);
  };
  const auto conv = [&](const std::string& name, Shape shape, int64_t biases) {
    add(name + ".weight_g", {shape[0], 1, 1}, 0.8f, 0.1f);
    add(name + ".weight_v", shape, 0, 1);
    if (biases > 0) add(name + ".bias", {biases}, 0, 0.1f);
  };
  const size_t levels = config.dec_strides.size();
  const auto width = [&](size_t i) {
    return config.dec_dim * (i == 0 ? 1 : config.dec_c_mults[i - 1]);
  };
  conv("decoder.conv1", {width(levels), config.latent_dim, 7}, width(levels));
  for (size_t j = 0; j < levels; ++j) {
    const std::string block = "decoder.block." + std::to_string(j);
    const int64_t in = width(levels - j), out = width(levels - 1 - j);
    snake(block + ".snake1", in);
    conv(block + ".conv_t1", {in, out, 2 * config.dec_strides[levels - 1 - j]}, out);
    for (int u = 1; u <= 3; ++u) {
      const std::string unit = block + ".res_unit" + std::to_string(u);
      snake(unit + ".snake1", out);
      conv(unit + ".conv1", {out, out, 7}, out);
      snake(unit + ".snake2", out);
      conv(unit + ".conv2", {out, out, 1}, out);
    }
  }
  snake("decoder.snake1", width(0));
  conv("decoder.conv2", {config.out_channels, width(0), 7}, 0);
  return tensors;
}

Safetensors file_of(const ScratchFolder& scratch, const Tensors& tensors) {
  std::vector<NamedTensor> named;
  for (const auto& [name, stored] : tensors) {
    named.push_back({name, make_view(stored.values.data(), stored.shape, DType::f32)});
  }
  const auto file = scratch.path() / "sound.safetensors";
  write_safetensors(file, named);
  return Safetensors::open_file(file);
}

WeightStore load(SoundDecoder& decoder, Backend& backend, const Safetensors& files) {
  return load_weights(
      backend, files, [&](WeightVisitor& v) { decoder.visit(v); },
      sound_loading(decoder.config(), files));
}

Values decode(const SoundConfig& config, const Tensors& tensors, Values latents) {
  const ScratchFolder scratch;
  const auto backend = cpu::make_cpu_backend();
  const int64_t frames = static_cast<int64_t>(latents.size()) / config.latent_dim;
  const View z = make_view(latents.data(), {config.latent_dim, frames}, DType::f32);
  Values wave(static_cast<size_t>(config.out_channels * config.hop_size * frames), NAN);
  const MutView out =
      make_mut_view(wave.data(), {config.out_channels, config.hop_size * frames}, DType::f32);
  const Safetensors files = file_of(scratch, tensors);

  DryRunBackend dry(DeviceKind::cpu);
  Arena measuring = Arena::measuring(DeviceKind::cpu);
  SoundDecoder sketch(dry, config);
  place_weights(
      dry, [&](WeightVisitor& v) { sketch.visit(v); }, SoundDecoder::kWeightType);
  sketch.decode(measuring, out, z);
  SoundDecoder decoder(*backend, config);
  const WeightStore store = load(decoder, *backend, files);
  Arena arena(backend->allocate(measuring.peak()));
  decoder.decode(arena, out, z);
  EXPECT_EQ(arena.peak(), measuring.peak());
  return wave;
}

Values noise(int64_t count, float scale) {
  std::mt19937 engine(11);
  std::normal_distribution<float> normal(0, scale);
  Values values(static_cast<size_t>(count));
  for (float& value : values) value = normal(engine);
  return values;
}

// --- the decoder once more, in double precision and by definition --------------------------------

struct Signal {
  int64_t channels, length;
  std::vector<double> values;
  double& at(int64_t c, int64_t t) { return values[static_cast<size_t>(c * length + t)]; }
  double get(int64_t c, int64_t t) const {
    return t < 0 || t >= length ? 0 : values[static_cast<size_t>(c * length + t)];
  }
};

class Definition {
 public:
  Definition(const SoundConfig& config, const Tensors& tensors)
      : config_(config), tensors_(tensors) {}

  Signal decode(const Values& latents) const {
    const int64_t frames = static_cast<int64_t>(latents.size()) / config_.latent_dim;
    Signal x{config_.latent_dim, frames, {latents.begin(), latents.end()}};
    x = conv(x, "decoder.conv1", 1);
    const size_t levels = config_.dec_strides.size();
    for (size_t j = 0; j < levels; ++j) {
      const std::string block = "decoder.block." + std::to_string(j);
      x = transposed(snake(x, block + ".snake1"), block + ".conv_t1",
                     config_.dec_strides[levels - 1 - j]);
      const int64_t dilations[] = {1, 3, 9};
      for (int u = 0; u < 3; ++u) {
        const std::string unit = block + ".res_unit" + std::to_string(u + 1);
        const Signal h = conv(snake(conv(snake(x, unit + ".snake1"), unit + ".conv1", dilations[u]),
                                    unit + ".snake2"),
                              unit + ".conv2", 1);
        for (size_t i = 0; i < x.values.size(); ++i) x.values[i] += h.values[i];
      }
    }
    x = conv(snake(x, "decoder.snake1"), "decoder.conv2", 1);
    for (double& value : x.values) value = std::clamp(value, -1.0, 1.0);
    return x;
  }

 private:
  const Stored& stored(const std::string& name) const { return tensors_.at(name); }

  double weight(const std::string& name, int64_t row, int64_t i) const {
    const Stored& v = stored(name + ".weight_v");
    const int64_t size = v.shape[1] * v.shape[2];
    double squares = 0;
    for (int64_t k = 0; k < size; ++k)
      squares += std::pow(v.values[static_cast<size_t>(row * size + k)], 2);
    const double g = stored(name + ".weight_g").values[static_cast<size_t>(row)];
    return g * v.values[static_cast<size_t>(row * size + i)] / std::sqrt(squares);
  }
  double bias(const std::string& name, int64_t channel) const {
    const auto found = tensors_.find(name + ".bias");
    return found == tensors_.end() ? 0 : found->second.values[static_cast<size_t>(channel)];
  }

  Signal snake(Signal x, const std::string& name) const {
    for (int64_t c = 0; c < x.channels; ++c) {
      const double a = std::exp(double(stored(name + ".alpha").values[static_cast<size_t>(c)]));
      const double b = std::exp(double(stored(name + ".beta").values[static_cast<size_t>(c)]));
      for (int64_t t = 0; t < x.length; ++t)
        x.at(c, t) += std::pow(std::sin(a * x.at(c, t)), 2) / (b + 1e-9);
    }
    return x;
  }

  Signal conv(const Signal& x, const std::string& name, int64_t dilation) const {
    const Shape shape = stored(name + ".weight_v").shape;
    Signal out{shape[0], x.length, std::vector<double>(static_cast<size_t>(shape[0] * x.length))};
    const int64_t side = dilation * (shape[2] - 1) / 2;
    for (int64_t o = 0; o < shape[0]; ++o) {
      for (int64_t t = 0; t < x.length; ++t) out.at(o, t) = bias(name, o);
      for (int64_t i = 0; i < shape[1] * shape[2]; ++i) {
        const double w = weight(name, o, i);
        for (int64_t t = 0; t < x.length; ++t) {
          out.at(o, t) += w * x.get(i / shape[2], t + i % shape[2] * dilation - side);
        }
      }
    }
    return out;
  }

  Signal transposed(const Signal& x, const std::string& name, int64_t stride) const {
    const Shape shape = stored(name + ".weight_v").shape;
    const int64_t length = stride * x.length, padding = (stride + 1) / 2;
    Signal out{shape[1], length, std::vector<double>(static_cast<size_t>(shape[1] * length))};
    for (int64_t o = 0; o < shape[1]; ++o) {
      for (int64_t n = 0; n < length; ++n) out.at(o, n) = bias(name, o);
      for (int64_t c = 0; c < shape[0]; ++c) {
        for (int64_t k = 0; k < shape[2]; ++k) {
          const double w = weight(name, c, o * shape[2] + k);
          for (int64_t t = 0; t < x.length; ++t) {
            const int64_t n = t * stride + k - padding;
            if (n >= 0 && n < length) out.at(o, n) += w * x.get(c, t);
          }
        }
      }
    }
    return out;
  }

  const SoundConfig& config_;
  const Tensors& tensors_;
};

TEST(SoundConfig, ReadsReleasedFile) {
  const SoundConfig config = SoundConfig::from_json(released_json());
  EXPECT_EQ(config.hop_size, 1920);
  EXPECT_EQ(config.latent_dim, 64);
  EXPECT_EQ(config.dec_strides, (std::vector<int64_t>{2, 4, 5, 6, 8}));
}

TEST(SoundConfig, RefusesByName) {
  const std::vector<std::tuple<std::string, Json, ErrorKind>> cases{
      {"_class_name", "Oobleck", ErrorKind::unsupported},
      {"model_type", "autoencoder_v3", ErrorKind::unsupported},
      {"use_wav_as_input", false, ErrorKind::unsupported},
      {"dec_type", "hifigan", ErrorKind::unsupported},
      {"dec_use_snake", false, ErrorKind::unsupported},
      {"dec_final_tanh", true, ErrorKind::unsupported},
      {"dec_use_nearest_upsample", true, ErrorKind::unsupported},
      {"activation", "snake", ErrorKind::unsupported},
      {"snake_logscale", false, ErrorKind::unsupported},
      {"causal", true, ErrorKind::unsupported},
      {"padding_mode", "reflect", ErrorKind::unsupported},
      {"latent_mean", Json::array({Json(0.5)}), ErrorKind::unsupported},
      {"hop_size", 1000, ErrorKind::unsupported},
      {"dec_c_mults", Json::array({1, 2}), ErrorKind::corrupt},
      {"dec_dim", 0, ErrorKind::corrupt},
  };
  for (const auto& [key, value, kind] : cases) {
    Json json = released_json();
    json.set(key, value);
    const Json parsed = Json::parse(json.dump(), "sound_tokenizer/config.json");
    expect_error(kind, {"sound_tokenizer/config.json", key},
                 [&] { SoundConfig::from_json(parsed); });
  }
}

TEST(SoundConfig, CountsLatentFrames) {
  const SoundConfig config;
  EXPECT_EQ(config.latent_frames(189, 24), 197);
  EXPECT_EQ(config.latent_frames(1, 24), 2);
  EXPECT_EQ(config.latent_frames(24, 24), 25);
  EXPECT_EQ(config.latent_frames(1, 1000), 1);
  // 73 / 30 * 48000 falls short of 116800 by a rounding error; the count is 61 either way.
  EXPECT_EQ(config.latent_frames(73, 30), 61);
  EXPECT_EQ(config.latent_frames(121, 29.97), 101);
  for (const double fps : {0.0, -24.0, double(NAN)}) {
    expect_error(ErrorKind::invalid_argument, {"fps"}, [&] { config.latent_frames(24, fps); });
  }
}

// B76: f32 against double precision. 80 dB is asked for; bf16 would give about 50.
TEST(SoundDecoder, AgreesWithTheDefinition) {
  const SoundConfig config = tiny_config();
  const Tensors tensors = random_tensors(config);
  const Values latents = noise(config.latent_dim * 9, 0.3f);
  const Values wave = decode(config, tensors, latents);
  const Signal want = Definition(config, tensors).decode(latents);
  double signal = 0, error = 0;
  for (size_t i = 0; i < wave.size(); ++i) {
    signal += want.values[i] * want.values[i];
    error += std::pow(double(wave[i]) - want.values[i], 2);
  }
  EXPECT_GT(10 * std::log10(signal / error), 80);
  EXPECT_GT(signal, 1);
}

// B76: silence stays finite, full scale is clamped.
TEST(SoundDecoder, SilenceAndFullScale) {
  const SoundConfig config = tiny_config();
  const Tensors tensors = random_tensors(config);
  for (const float sample :
       decode(config, tensors, Values(static_cast<size_t>(config.latent_dim * 2)))) {
    EXPECT_TRUE(std::isfinite(sample));
  }
  float largest = 0;
  for (const float sample : decode(config, tensors, noise(config.latent_dim * 3, 100))) {
    ASSERT_LE(std::abs(sample), 1.0f);
    largest = std::max(largest, std::abs(sample));
  }
  EXPECT_EQ(largest, 1.0f);
}

TEST(SoundDecoder, AcceptsEveryLayout) {
  const SoundConfig config = tiny_config();
  const Tensors tensors = random_tensors(config);
  const Values latents = noise(config.latent_dim * 4, 0.3f);
  const Values want = decode(config, tensors, latents);

  Tensors wrapped;
  for (const auto& [name, stored] : tensors) wrapped["generator." + name] = stored;
  wrapped["generator.encoder.layers.0.weight_g"] = {{2, 1, 1}, {1, 1}};
  wrapped["bottleneck.scale"] = {{1}, {1}};
  EXPECT_EQ(decode(config, wrapped, latents), want);

  Tensors flat;
  const std::string units[] = {"snake1", "conv1", "snake2", "conv2"};
  for (const auto& [name, stored] : tensors) {
    std::string renamed = name;
    const auto replace = [&](const std::string& from, const std::string& to) {
      if (const size_t at = renamed.find(from); at != std::string::npos)
        renamed.replace(at, from.size(), to);
    };
    for (size_t u = 0; u < 3; ++u) {
      for (size_t p = 0; p < 4; ++p) {
        replace(".res_unit" + std::to_string(u + 1) + "." + units[p],
                ".layers." + std::to_string(u + 2) + ".layers." + std::to_string(p));
      }
    }
    if (renamed.find(".block.") != std::string::npos) {
      replace(".snake1", ".layers.0");
      replace(".conv_t1", ".layers.1");
    }
    for (size_t j = 0; j < 3; ++j) {
      replace(".block." + std::to_string(j), ".layers." + std::to_string(j + 1));
    }
    replace("decoder.conv1", "decoder.layers.0");
    replace("decoder.snake1", "decoder.layers.4");
    replace("decoder.conv2", "decoder.layers.5");
    flat[renamed] = stored;
    if (renamed.ends_with(".alpha") || renamed.ends_with(".beta")) {
      flat[renamed].shape = {stored.shape[1]};
    }
  }
  EXPECT_EQ(decode(config, flat, latents), want);

  Tensors folded;
  for (const auto& [name, stored] : tensors) {
    if (name.ends_with(".weight_g")) continue;
    Stored copy = stored;
    std::string renamed = name;
    if (name.ends_with(".weight_v")) {
      renamed = name.substr(0, name.size() - 2);
      const Values& g = tensors.at(renamed + "_g").values;
      const size_t size = stored.values.size() / g.size();
      for (size_t k = 0; k < g.size(); ++k) {
        double squares = 0;
        for (size_t i = 0; i < size; ++i)
          squares += std::pow(double(stored.values[k * size + i]), 2);
        for (size_t i = 0; i < size; ++i) {
          copy.values[k * size + i] =
              float(g[k] / std::sqrt(squares) * stored.values[k * size + i]);
        }
      }
    }
    folded[renamed] = copy;
  }
  const Values got = decode(config, folded, latents);
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-4) << i;
}

TEST(SoundDecoder, NamesWhatIsWrong) {
  const SoundConfig config = tiny_config();
  const auto loading = [&](const Tensors& tensors) {
    return [&config, tensors] {
      const ScratchFolder scratch;
      const auto backend = cpu::make_cpu_backend();
      SoundDecoder decoder(*backend, config);
      load(decoder, *backend, file_of(scratch, tensors));
    };
  };
  Tensors tensors = random_tensors(config);
  tensors.erase("decoder.snake1.beta");
  tensors["decoder.block.1.conv_t1.bias"] = {{3}, {1, 1, 1}};
  tensors["decoder.block.7.conv_t1.bias"] = {{1}, {1}};
  expect_error(
      ErrorKind::corrupt,
      {"decoder.snake1.beta", "decoder.block.1.conv_t1.bias", "decoder.block.7.conv_t1.bias"},
      loading(tensors));

  tensors = random_tensors(config);
  tensors["decoder.block.2.conv_t1.weight_v"].values[5] = NAN;
  expect_error(ErrorKind::numeric, {"decoder.block.2.conv_t1.weight_v"}, loading(tensors));

  tensors = random_tensors(config);
  Stored& v = tensors["decoder.conv1.weight_v"];
  std::fill_n(v.values.begin() + 2 * 6 * 7, 6 * 7, 0.0f);
  expect_error(ErrorKind::corrupt, {"decoder.conv1.weight_v[2]", "all zeros"}, loading(tensors));

  expect_error(ErrorKind::corrupt, {"no sound decoder"},
               loading({{"encoder.layers.0.weight_g", {{1}, {1}}}}));

  Values latents = noise(config.latent_dim * 2, 1);
  latents[3] = NAN;
  expect_error(ErrorKind::numeric, {"sound decode", "sample"},
               [&] { decode(config, random_tensors(config), latents); });
}

TEST(SoundDecoder, RefusesWrongShapes) {
  const SoundConfig config = tiny_config();
  const ScratchFolder scratch;
  const auto backend = cpu::make_cpu_backend();
  SoundDecoder decoder(*backend, config);
  const WeightStore store = load(decoder, *backend, file_of(scratch, random_tensors(config)));
  Arena arena(backend->allocate(1 << 20));
  Tensor latents = allocate_host_tensor({6, 2}, DType::f32),
         wave = allocate_host_tensor({2, 61}, DType::f32);
  expect_error(ErrorKind::invalid_argument, {"[2, 61]", "[2, 60]"},
               [&] { decoder.decode(arena, wave.view, latents.view); });
  expect_error(ErrorKind::invalid_argument, {"[3, 4]", "[6, frames]"}, [&] {
    decoder.decode(arena, wave.view, latents.view.reshape({3, 4}));
  });
}

}  // namespace
}  // namespace orrery
