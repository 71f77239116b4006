#include "model/vae.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>

#include "backend/dry_run.h"
#include "cpu/cpu_backend.h"
#include "dist/thread_comm.h"
#include "expect_error.h"
#include "model/vae_network.h"
#include "model/vae_tiling.h"
#include "model/weights.h"
#include "scratch_folder.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

using Values = std::vector<float>;

// The shipped file of the released checkpoints, statistics shortened to one value each.
Json released_json() {
  Json json = Json::parse(R"({
    "_class_name": "AutoencoderKLWan", "_diffusers_version": "0.35", "attn_scales": [],
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2, "temperal_downsample": [false, true, true], "dropout": 0.0,
    "is_residual": true, "in_channels": 12, "out_channels": 12, "patch_size": 2,
    "scale_factor_temporal": 4, "scale_factor_spatial": 16, "clip_output": false})",
                          "vae/config.json");
  json.set("latents_mean", Json::array(std::vector<Json>(48, Json(0.1))));
  json.set("latents_std", Json::array(std::vector<Json>(48, Json(0.5))));
  return json;
}

VaeConfig tiny_config() {
  VaeConfig config;
  config.base_dim = config.decoder_base_dim = 4;
  config.z_dim = 4;
  config.num_res_blocks = 1;
  config.in_channels = config.out_channels = 12;
  config.patch_size = 2;
  config.scale_factor_spatial = 16;
  config.latents_mean = {0.1f, -0.2f, 0.3f, 0.05f};
  config.latents_std = {1.1f, 0.7f, 1.4f, 0.9f};
  return config;
}

Values noise(int64_t count, uint32_t seed, float scale = 1) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0, scale);
  Values values(static_cast<size_t>(count));
  for (float& value : values) value = normal(engine);
  return values;
}

// Fills the slots with weights that keep activations near one.
class RandomWeights final : public WeightVisitor {
 public:
  void tensor(View& slot, const std::string& name, Shape shape, Split) override {
    const bool norm = name.ends_with(".gamma"), bias = name.ends_with(".bias");
    const int64_t fan_in = norm || bias ? 1 : shape.numel() / shape[0];
    Values values = noise(shape.numel(), static_cast<uint32_t>(tensors_.size()),
                          norm || bias ? 0.1f : 1 / std::sqrt(static_cast<float>(fan_in)));
    if (norm) {
      for (float& value : values) value += 1;
    }
    const auto [at, added] = tensors_.emplace(name, std::move(values));
    shapes_.emplace(name, shape);
    slot = make_view(at->second.data(), shape, DType::f32);
  }
  void linear(Linear&, const std::vector<std::string>&, const std::vector<int64_t>&, int64_t, Split,
              bool) override {
    FAIL() << "the VAE lists tensors only";
  }
  Values& at(const std::string& name) { return tensors_.at(name); }
  std::vector<NamedTensor> named() const {
    std::vector<NamedTensor> list;
    for (const auto& [name, values] : tensors_) {
      list.push_back({name, make_view(values.data(), shapes_.at(name), DType::f32)});
    }
    return list;
  }

 private:
  std::map<std::string, Values> tensors_;
  std::map<std::string, Shape> shapes_;
};

size_t dry_peak(const VaeConfig& config, const VaeOptions& options,
                const std::function<void(Vae&, Arena&)>& call) {
  DryRunBackend dry(DeviceKind::cpu);
  Vae vae(dry, config, options);
  place_weights(
      dry, [&](WeightVisitor& visitor) { vae.visit(visitor); }, DType::f32);
  Arena measuring = Arena::measuring(DeviceKind::cpu);
  call(vae, measuring);
  return measuring.peak();
}

struct Clip {
  Shape shape;  // [C, T, H, W]
  Values values;
  View view() const { return make_view(values.data(), shape, DType::f32); }
  Clip frames(int64_t begin, int64_t count) const {
    Clip part{shape, {}};
    part.shape[1] = count;
    const int64_t area = shape[2] * shape[3];
    for (int64_t c = 0; c < shape[0]; ++c) {
      const auto from = values.begin() + (c * shape[1] + begin) * area;
      part.values.insert(part.values.end(), from, from + count * area);
    }
    return part;
  }
};

Clip random_clip(Shape shape, uint32_t seed) { return {shape, noise(shape.numel(), seed, 0.5f)}; }

double relative_error(const Values& got, const Values& want) {
  EXPECT_EQ(got.size(), want.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    difference += std::pow(double(got[i]) - double(want[i]), 2);
    norm += std::pow(double(want[i]), 2);
  }
  return std::sqrt(difference / norm);
}

// Peak 2, the range of pixels.
double psnr(const Values& got, const Values& want) {
  double squares = 0;
  for (size_t i = 0; i < got.size(); ++i) squares += std::pow(double(got[i]) - double(want[i]), 2);
  return 10 * std::log10(4 * double(got.size()) / squares);
}

// A VAE on the CPU; every call runs in an arena of exactly the size its dry run asks for.
class Bench {
 public:
  explicit Bench(VaeConfig config, VaeOptions options = {})
      : config_(std::move(config)), options_(options), vae_(*backend_, config_, options) {
    vae_.visit(weights);
  }
  Bench(const std::filesystem::path& folder, VaeOptions options)
      : config_(VaeConfig::from_json(Json::load(folder / "config.json"))),
        options_(options),
        vae_(*backend_, config_, options) {
    store_ = load_weights(*backend_, Safetensors::open_folder(folder),
                          [&](WeightVisitor& visitor) { vae_.visit(visitor); }, {});
  }

  Clip encode(const Clip& pixels, const VaeTiling& tiling = {}, bool raw = false) {
    const int64_t factor = config_.scale_factor_spatial;
    Clip latents{{config_.z_dim, config_.latent_frames(pixels.shape[1]), pixels.shape[2] / factor,
                  pixels.shape[3] / factor},
                 {}};
    latents.values.resize(static_cast<size_t>(latents.shape.numel()));
    in_arena([&](Vae& vae, Arena& arena) {
      vae.encode(arena, MutView::cast(latents.view()), pixels.view(), tiling, raw);
    });
    return latents;
  }

  // Frames as the sink gets them, one after the other: [T, H, W, 3].
  Values decode(const Clip& latents, const VaeTiling& tiling = {}) {
    Values video;
    in_arena([&](Vae& vae, Arena& arena) {
      vae.decode(arena, latents.view(), tiling, [&](const FrameGroup& group) {
        const View& frames = group.pixels;
        EXPECT_TRUE(frames.contiguous());
        EXPECT_EQ(frames.device, DeviceKind::cpu);
        video.insert(video.end(), frames.as<float>(), frames.as<float>() + frames.numel());
      });
    });
    return video;
  }

  Backend& backend() { return *backend_; }
  Vae& vae() { return vae_; }
  size_t last_peak() const { return last_peak_; }
  RandomWeights weights;

 private:
  void in_arena(const std::function<void(Vae&, Arena&)>& call) {
    last_peak_ = dry_peak(config_, options_, call);
    Arena arena(backend_->allocate(last_peak_));
    call(vae_, arena);
    EXPECT_EQ(arena.peak(), last_peak_);
    EXPECT_EQ(arena.used(), 0u);
  }

  std::unique_ptr<Backend> backend_ = cpu::make_cpu_backend();
  VaeConfig config_;
  VaeOptions options_;
  WeightStore store_;
  Vae vae_;
  size_t last_peak_ = 0;
};

// Frames that rank 0 gets when `ranks` threads decode together; the others only help.
Values decode_together(int ranks, const VaeConfig& config, const VaeOptions& options,
                       const Clip& latents) {
  Values video;
  ThreadWorld world(ranks);
  const Mesh mesh{.tp = ranks};
  world.run([&](int rank) {
    const std::unique_ptr<Backend> backend = cpu::make_cpu_backend();
    Vae vae(*backend, config, options);
    RandomWeights weights;
    vae.visit(weights);
    const MeshGroups absent = make_absent_groups(mesh, rank);
    const size_t peak = dry_peak(config, options, [&](Vae& dry, Arena& arena) {
      dry.decode(arena, latents.view(), {}, {}, absent.everyone());
    });
    Arena arena(backend->allocate(peak));
    const MeshGroups groups = make_groups(world, mesh, rank);
    EXPECT_TRUE(vae.shares_decode(latents.shape[2], latents.shape[3], {}, groups.everyone()));
    const Vae::FrameSink sink = [&](const FrameGroup& group) {
      const View& frames = group.pixels;
      video.insert(video.end(), frames.as<float>(), frames.as<float>() + frames.numel());
    };
    vae.decode(arena, latents.view(), {}, rank == 0 ? sink : Vae::FrameSink(), groups.everyone());
    EXPECT_LE(arena.peak(), peak);
    if (rank == 0) {
      EXPECT_EQ(arena.peak(), peak);
    }
    EXPECT_EQ(arena.used(), 0u);
  });
  return video;
}

VaeOptions chunks(int64_t latents) {
  VaeOptions options;
  options.decode_chunk = options.encode_chunk = latents;
  return options;
}

// Summation order may differ with the shape of a convolution; cache mistakes are of the order of 1.
constexpr double kSameValues = 1e-5;

TEST(VaeConfig, ReadsReleasedFile) {
  const VaeConfig config = VaeConfig::from_json(released_json());
  EXPECT_EQ(config.base_dim, 160);
  EXPECT_EQ(config.decoder_base_dim, 256);
  EXPECT_EQ(config.z_dim, 48);
  EXPECT_EQ(config.temporal_downsample, (std::vector<bool>{false, true, true}));
  EXPECT_EQ(config.scale_factor_spatial, 16);
  EXPECT_FLOAT_EQ(config.latents_std[47], 0.5f);
}

TEST(VaeConfig, DecoderWidthDefaultsToBase) {
  Json json = released_json();
  json.set("decoder_base_dim", Json());
  EXPECT_EQ(VaeConfig::from_json(json).decoder_base_dim, 160);
}

TEST(VaeConfig, RefusesByName) {
  const std::vector<std::tuple<std::string, Json, ErrorKind, std::string>> cases{
      {"_class_name", "AutoencoderKL", ErrorKind::unsupported, "AutoencoderKLWan"},
      {"is_residual", false, ErrorKind::unsupported, "is_residual"},
      {"attn_scales", Json::array({Json(0.5)}), ErrorKind::unsupported, "attn_scales"},
      {"patch_size", 4, ErrorKind::unsupported, "patch_size is 4"},
      {"in_channels", 3, ErrorKind::unsupported, "in_channels 3"},
      {"temperal_downsample", Json::array({true, true, true}), ErrorKind::corrupt,
       "temperal_downsample"},
      {"temperal_downsample", Json::array({true, true}), ErrorKind::unsupported,
       "temperal_downsample"},
      {"scale_factor_spatial", 8, ErrorKind::corrupt, "scale_factor_spatial is 8"},
      {"z_dim", 16, ErrorKind::corrupt, "latents_mean has 48 values, but z_dim is 16"},
      {"latents_std", Json::array(std::vector<Json>(48, Json(0.0))), ErrorKind::corrupt,
       "latents_std"},
      {"dim_mult", Json::array({1, 2, 4, 12}), ErrorKind::unsupported, "dim_mult"},
      {"base_dim", 0, ErrorKind::corrupt, "base_dim is 0"},
      {"base_dim", 1.5, ErrorKind::corrupt, "base_dim"},
  };
  for (const auto& [key, value, kind, text] : cases) {
    SCOPED_TRACE(key);
    Json json = released_json();
    json.set(key, value);
    const Json parsed = Json::parse(json.dump(), "vae/config.json");
    expect_error(kind, {"vae/config.json", text}, [&] { VaeConfig::from_json(parsed); });
  }
}

// B40
TEST(VaeConfig, CountsFrames) {
  const VaeConfig config = tiny_config();
  const std::map<int64_t, int64_t> latents{{1, 1}, {5, 2}, {189, 48}, {1001, 251}};
  for (const auto& [frames, count] : latents) {
    EXPECT_EQ(config.latent_frames(frames), count);
    EXPECT_EQ(config.decoded_frames(count), frames);
  }
}

TEST(VaeWeights, ListsReleasedTensors) {
  DryRunBackend dry(DeviceKind::cpu);
  Vae vae(dry, VaeConfig::from_json(released_json()));
  const auto tensors = list_tensors([&](WeightVisitor& visitor) { vae.visit(visitor); });
  int64_t parameters = 0;
  std::map<std::string, Shape> shapes;
  for (const ListedTensor& tensor : tensors) {
    parameters += tensor.shape.numel();
    shapes[tensor.name] = tensor.shape;
  }
  EXPECT_EQ(tensors.size(), 196u);
  EXPECT_EQ(shapes.size(), 196u);
  EXPECT_EQ(parameters, 704688668);
  EXPECT_EQ(shapes.at("decoder.up_blocks.3.resnets.0.conv_shortcut.weight"),
            (Shape{256, 512, 1, 1, 1}));
  EXPECT_EQ(shapes.at("encoder.mid_block.attentions.0.to_qkv.weight"), (Shape{1920, 640, 1, 1}));
}

// B45, B40: a latent sees no later frame, bit by bit.
TEST(Vae, EncodeIsCausal) {
  Bench bench(tiny_config(), chunks(1));
  const Clip whole = random_clip({3, 13, 32, 48}, 1);
  const Clip latents = bench.encode(whole);
  EXPECT_EQ(bench.encode(whole.frames(0, 1)).values, latents.frames(0, 1).values);
  EXPECT_EQ(bench.encode(whole.frames(0, 5)).values, latents.frames(0, 2).values);
  Clip changed = whole;
  for (int64_t c = 0; c < 3; ++c) changed.values[static_cast<size_t>((c * 13 + 9) * 32 * 48)] += 1;
  const Clip other = bench.encode(changed);
  EXPECT_EQ(other.frames(0, 3).values, latents.frames(0, 3).values);
  EXPECT_NE(other.frames(3, 1).values, latents.frames(3, 1).values);
}

// B40: the first k latents give the first 4 (k - 1) + 1 frames.
TEST(Vae, DecodeOfFirstLatentsIsFirstFrames) {
  Bench bench(tiny_config(), chunks(1));
  const Clip latents = random_clip({4, 4, 2, 3}, 2);
  const Values video = bench.decode(latents);
  const size_t frame = 32 * 48 * 3;
  ASSERT_EQ(video.size(), 13 * frame);
  for (const int64_t k : {1, 2, 3}) {
    const Values first = bench.decode(latents.frames(0, k));
    ASSERT_EQ(first.size(), static_cast<size_t>(4 * (k - 1) + 1) * frame);
    EXPECT_TRUE(std::equal(first.begin(), first.end(), video.begin())) << k << " latents";
  }
}

// B48
TEST(Vae, ChunkSizeDoesNotChangeLatents) {
  const Clip pixels = random_clip({3, 49, 32, 32}, 3);
  const Clip want = Bench(tiny_config(), chunks(1)).encode(pixels);
  for (const int64_t latents : {2, 3, 4, 12, 0}) {
    Bench bench(tiny_config(), chunks(latents));
    EXPECT_LT(relative_error(bench.encode(pixels).values, want.values), kSameValues)
        << latents << " latent frames a chunk";
  }
}

// B48
TEST(Vae, ChunkSizeDoesNotChangeFrames) {
  const Clip latents = random_clip({4, 8, 2, 2}, 4);
  const Values want = Bench(tiny_config(), chunks(1)).decode(latents);
  for (const int64_t size : {2, 4, 7, 0}) {
    Bench bench(tiny_config(), chunks(size));
    EXPECT_LT(relative_error(bench.decode(latents), want), kSameValues)
        << size << " latents a chunk";
  }
}

// B48
TEST(Vae, UpsamplingAFrameAtATimeDoesNotChangeFrames) {
  const Clip latents = random_clip({4, 8, 2, 2}, 4);
  VaeOptions options = chunks(0);
  const Values want = Bench(tiny_config(), options).decode(latents);
  options.upsample_bytes = 1;
  EXPECT_LT(relative_error(Bench(tiny_config(), options).decode(latents), want), kSameValues);
}

TEST(Vae, NormalisesLatents) {
  Bench bench(tiny_config());
  const VaeConfig config = tiny_config();
  const Clip pixels = random_clip({3, 5, 16, 32}, 5);
  const Clip raw = bench.encode(pixels, {}, true), latents = bench.encode(pixels);
  const size_t channel = 2 * 2;
  for (size_t i = 0; i < raw.values.size(); ++i) {
    const size_t c = i / channel;
    EXPECT_NEAR(latents.values[i], (raw.values[i] - config.latents_mean[c]) / config.latents_std[c],
                1e-6);
  }
}

TEST(Vae, OneLatentRemembersNothing) {
  Bench bench(tiny_config());
  bench.decode(random_clip({4, 1, 4, 4}, 6));
  const size_t image = bench.last_peak();
  bench.decode(random_clip({4, 2, 4, 4}, 6));
  // At 32 x 32 the last block alone keeps two frames of 4 to 8 channels for five convolutions.
  EXPECT_GT(bench.last_peak(), image + 5 * 2 * 32 * 32 * 4 * sizeof(float));
}

TEST(Vae, ArenaTooSmallIsRefused) {
  Bench bench(tiny_config());
  const Clip latents = random_clip({4, 2, 2, 2}, 7);
  bench.decode(latents);
  Arena arena(bench.backend().allocate(bench.last_peak() - 256));
  expect_error(ErrorKind::out_of_memory, {"arena"},
               [&] { bench.vae().decode(arena, latents.view(), {}, [](const FrameGroup&) {}); });
}

// B46
TEST(VaeTiles, SpansCoverThePicture) {
  for (const int64_t size : {52, 30, 80, 45, 60, 1}) {
    for (const auto& [tile, stride] : {std::pair{16, 12}, {8, 6}, {17, 12}, {16, 16}, {100, 50}}) {
      int64_t covered = 0;
      for (const TileSpan& span : tile_spans(size, tile, stride)) {
        EXPECT_EQ(span.begin % stride, 0);
        EXPECT_EQ(span.begin, covered);
        EXPECT_GT(span.size, 0);
        EXPECT_LE(span.begin + span.size, size);
        covered += std::min<int64_t>(stride, span.size);
      }
      EXPECT_EQ(covered, size) << tile << "/" << stride;
    }
  }
}

// B46: one line of tiles by hand. Tiles of 3 with stride 2 of a line of 5 overlap by one column,
// which the later tile gives up wholly (share 0 at its first column).
TEST(VaeTiles, BlendsLinearly) {
  const auto backend = cpu::make_cpu_backend();
  Arena arena(backend->allocate(1 << 16));
  Mosaic mosaic(*backend, arena, {1, 1, 6, 1}, DType::f32, 4, 2, 3);
  const std::vector<Values> tiles{{10, 10, 10, 10}, {20, 20, 20, 20}, {40, 40}};
  for (size_t j = 0; j < tiles.size(); ++j) {
    MutView tile = arena.make({1, 1, static_cast<int64_t>(tiles[j].size()), 1}, DType::f32);
    std::copy(tiles[j].begin(), tiles[j].end(), tile.as<float>());
    mosaic.place(0, static_cast<int64_t>(j), tile);
  }
  const float* got = mosaic.picture().as<float>();
  EXPECT_EQ(Values(got, got + 6), (Values{10, 10, 10, 15, 20, 30}));
}

// B46: tiles that cover the picture leave it uncut, bit by bit; with no overlap and a picture of
// one tile's height and width likewise.
TEST(VaeTiles, TileOfThePictureIsUntiled) {
  Bench bench(tiny_config());
  for (const int64_t latent_frames : {1, 2}) {
    const Clip latents = random_clip({4, latent_frames, 3, 4}, 8);
    const Values want = bench.decode(latents);
    EXPECT_EQ(bench.decode(latents, {true, 64, 48}), want);
    EXPECT_EQ(bench.decode(latents, {true, 256, 256}), want);
    const Clip pixels = random_clip({3, 4 * (latent_frames - 1) + 1, 48, 64}, 9);
    EXPECT_EQ(bench.encode(pixels, {true, 64, 48}).values, bench.encode(pixels).values);
  }
}

// B46: without overlap each tile is the picture of its own latents.
TEST(VaeTiles, NoOverlapIsSeparatePictures) {
  Bench bench(tiny_config());
  const Clip left = random_clip({4, 2, 2, 2}, 10), right = random_clip({4, 2, 2, 2}, 11);
  Clip both{{4, 2, 2, 4}, {}};
  for (size_t row = 0; row < 4 * 2 * 2; ++row) {
    for (const Clip* part : {&left, &right}) {
      both.values.insert(both.values.end(), part->values.begin() + static_cast<int64_t>(2 * row),
                         part->values.begin() + static_cast<int64_t>(2 * row + 2));
    }
  }
  const Values got = bench.decode(both, {true, 32, 32});
  const Values want[] = {bench.decode(left), bench.decode(right)};
  ASSERT_EQ(got.size(), 2 * want[0].size());
  for (size_t i = 0; i < got.size(); ++i) {
    const size_t column = i / 3 % 64, row = i / 3 / 64;
    ASSERT_EQ(got[i], want[column / 32][(row * 32 + column % 32) * 3 + i % 3]) << i;
  }
}

// B46: the sizes that tripped others, for counts and memory; values at small sizes are above.
TEST(VaeTiles, OddSizesPassADryRun) {
  for (const auto& [height, width] : {std::pair{480, 832}, {720, 1280}, {960, 960}}) {
    for (const auto& [tile, stride] : {std::pair{128, 96}, {256, 192}, {272, 192}, {256, 256}}) {
      for (const int64_t frames : {1, 5}) {
        const VaeTiling tiling{true, tile, stride};
        const int64_t latent_frames = (frames - 1) / 4 + 1;
        const void* nowhere = reinterpret_cast<const void*>(uintptr_t{1} << 43);
        const Shape latent_shape{4, latent_frames, height / 16, width / 16};
        const View latents = make_view(nowhere, latent_shape, DType::f32);
        const View pixels = make_view(nowhere, {3, frames, height, width}, DType::f32);
        const size_t decode = dry_peak(tiny_config(), {}, [&](Vae& vae, Arena& arena) {
          vae.decode(arena, latents, tiling, {});
        });
        dry_peak(tiny_config(), {}, [&](Vae& vae, Arena& arena) {
          vae.encode(arena, MutView::cast(latents), pixels, tiling);
        });
        // The picture is held whole: 12 channels at half resolution in f32.
        EXPECT_GT(decode, static_cast<size_t>(frames * height * width * 3 * 4));
      }
    }
  }
}

// B50: sizes are 64-bit throughout. 4096 x 4096 with the released widths: the input of the first
// convolution of the last level alone has 6 x 2048 x 2048 x 512 = 1.3e10 elements.
TEST(Vae, HugePictureIsMeasured) {
  const VaeConfig config = VaeConfig::from_json(released_json());
  const View latents =
      make_view(reinterpret_cast<const void*>(uintptr_t{1} << 43), {48, 2, 256, 256}, DType::f32);
  const size_t peak = dry_peak(config, {.dtype = DType::bf16},
                               [&](Vae& vae, Arena& arena) { vae.decode(arena, latents, {}, {}); });
  EXPECT_GT(peak, size_t{6} * 2048 * 2048 * 512 * 2);
  EXPECT_LT(peak, size_t{200} << 30);
}

// B51: statistics lie with the weights, and data from elsewhere is refused by name.
TEST(Vae, RefusesDataOnAnotherDevice) {
  DryRunBackend cuda(DeviceKind::cuda);
  Vae vae(cuda, tiny_config());
  place_weights(
      cuda, [&](WeightVisitor& visitor) { vae.visit(visitor); }, DType::f32);
  Arena arena = Arena::measuring(DeviceKind::cuda);
  const Clip latents = random_clip({4, 1, 2, 2}, 12);
  expect_error(ErrorKind::invalid_argument, {"another device"},
               [&] { vae.decode(arena, latents.view(), {}, {}); });
  View there = latents.view();
  there.device = DeviceKind::cuda;
  EXPECT_NO_THROW(vae.decode(arena, there, {}, {}));
}

// B14
TEST(Vae, NamesWhatIsNotFinite) {
  Bench bench(tiny_config());
  Clip latents = random_clip({4, 2, 2, 3}, 13);
  latents.values[static_cast<size_t>(((2 * 2 + 1) * 2 + 1) * 3 + 2)] = NAN;
  expect_error(ErrorKind::numeric, {"vae decode", "channel 2", "frame 1", "row 1", "column 2"},
               [&] { bench.decode(latents); });
  Clip pixels = random_clip({3, 5, 32, 32}, 14);
  pixels.values[static_cast<size_t>(3 * 32 * 32)] = INFINITY;
  expect_error(ErrorKind::numeric, {"vae encode", "frame 1"}, [&] { bench.encode(pixels); });
}

// B14: a VAE that overflows says so instead of writing black frames. Only the second chunk reads
// the weights in question.
TEST(Vae, NamesTheFrameThatOverflows) {
  Bench bench(tiny_config());
  bench.weights.at("decoder.up_blocks.0.upsampler.time_conv.weight")[7] = INFINITY;
  const Clip latents = random_clip({4, 2, 2, 2}, 15);
  EXPECT_NO_THROW(bench.decode(latents.frames(0, 1)));
  expect_error(ErrorKind::numeric, {"vae decode", "frame 1 "}, [&] { bench.decode(latents); });
}

// B14
TEST(Vae, NamesTheWeightThatIsNotFinite) {
  Bench bench(tiny_config());
  bench.weights.at("decoder.conv_in.bias")[3] = NAN;
  const ScratchFolder scratch;
  const auto file = scratch.path() / "vae.safetensors";
  write_safetensors(file, bench.weights.named());
  expect_error(ErrorKind::numeric, {"decoder.conv_in.bias"}, [&] {
    load_weights(bench.backend(), Safetensors::open_file(file),
                 [&](WeightVisitor& visitor) { bench.vae().visit(visitor); }, {});
  });
}

TEST(Vae, RefusesWrongSizes) {
  Bench bench(tiny_config());
  const auto encode = [&](Shape shape) {
    return [&bench, shape] { bench.encode(random_clip(shape, 16)); };
  };
  const auto wrong = ErrorKind::invalid_argument;
  expect_error(wrong, {"6 frames", "4n + 1", "5 or 9"}, encode({3, 6, 32, 32}));
  expect_error(wrong, {"height 40", "multiple of 16", "32 or 48"}, encode({3, 1, 40, 32}));
  expect_error(wrong, {"width 8", "use 16"}, encode({3, 1, 32, 8}));
  expect_error(wrong, {"[4, 1, 32, 32]", "[3, frames, height, width]"}, encode({4, 1, 32, 32}));
  expect_error(wrong, {"latents are [5, 1, 2, 2]", "[4, frames, height, width]"}, [&] {
    bench.decode(random_clip({5, 1, 2, 2}, 17));
  });
  for (const VaeTiling& tiling :
       {VaeTiling{true, 64, 96}, {true, 100, 96}, {true, 64, 0}, {true, -16, -32}}) {
    expect_error(wrong, {concat("tiles of ", tiling.tile), "multiples of 16"}, [&] {
      bench.decode(random_clip({4, 1, 8, 8}, 18), tiling);
    });
  }
}

// A yellow square with soft edges that moves right over navy, brighter at the bottom: of the kind
// this checkpoint was trained on.
Clip moving_square(int64_t frames, int64_t size) {
  const float square[] = {0.93f, 0.73f, -0.80f}, ground[] = {-0.82f, -0.78f, -0.36f};
  const float half = float(size) / 8, middle = float(size) / 2;
  // How much of a pixel the stretch around `centre` covers, with an edge about four pixels wide.
  const auto cover = [&](int64_t at, float centre) {
    return 1 / (1 + std::exp(1.8f * (std::abs(float(at) + 0.5f - centre) - half)));
  };
  Clip clip{{3, frames, size, size}, {}};
  for (size_t c = 0; c < 3; ++c) {
    for (int64_t t = 0; t < frames; ++t) {
      const float centre = float(size) / 4 + 3.0f * float(t);
      for (int64_t y = 0; y < size; ++y) {
        const float light = 0.92f + 0.16f * float(y) / float(size);
        const float back = (ground[c] + 1) * light - 1;
        for (int64_t x = 0; x < size; ++x) {
          clip.values.push_back(back + (square[c] - back) * cover(x, centre) * cover(y, middle));
        }
      }
    }
  }
  return clip;
}

Clip planar(const Values& frames, const Shape& shape) {
  Clip clip{shape, Values(frames.size())};
  const int64_t plane = shape[1] * shape[2] * shape[3];
  for (int64_t i = 0; i < plane; ++i) {
    for (int64_t c = 0; c < 3; ++c) {
      clip.values[static_cast<size_t>(c * plane + i)] = frames[static_cast<size_t>(3 * i + c)];
    }
  }
  return clip;
}

TEST(VaeRows, EveryRankHasSomeAndTheFirstTheMost) {
  for (int64_t rows : {5, 8, 45}) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
      int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const RowRange range = rows_of_rank(rows, ranks, rank);
        EXPECT_EQ(range.begin, next);
        EXPECT_GE(range.count, 1);
        EXPECT_LE(range.count, rows_of_rank(rows, ranks, 0).count);
        EXPECT_GE(range.count + 1, rows_of_rank(rows, ranks, 0).count);
        next += range.count;
      }
      EXPECT_EQ(next, rows);
    }
  }
}

// Cut into rows, every convolution sees what it saw in the whole picture: nothing but the order of
// summation may differ, at the cuts and elsewhere.
TEST(VaeRows, RanksDecodeTogetherWhatOneDecodes) {
  const VaeConfig config = tiny_config();
  for (int64_t rows : {5, 7}) {
    const Clip latents = random_clip({4, 4, rows, 3}, 31);
    for (int64_t chunk : {1, 2, 0}) {
      Bench bench(config, chunks(chunk));
      const Values whole = bench.decode(latents);
      for (int ranks : {2, 3, 5}) {
        VaeOptions options = chunks(chunk);
        // Some exchange rows for each frame that they upsample, some for all of a chunk.
        if (ranks != 2) options.upsample_bytes = 1;
        const Values cut = decode_together(ranks, config, options, latents);
        ASSERT_EQ(cut.size(), whole.size());
        float largest = 0;
        for (size_t i = 0; i < cut.size(); ++i) {
          largest = std::max(largest, std::abs(cut[i] - whole[i]));
        }
        EXPECT_LT(largest, 1e-5f) << rows << " rows, " << ranks << " ranks, chunks of " << chunk;
      }
    }
  }
}

// Tiles, and pictures of fewer rows than ranks, are not cut.
TEST(VaeRows, SaysWhenRanksDecodeTogether) {
  Bench bench(tiny_config());
  const MeshGroups groups = make_absent_groups({.tp = 3}, 0);
  const VaeTiling tiling{.enabled = true, .tile = 64, .stride = 48};
  EXPECT_TRUE(bench.vae().shares_decode(3, 2, {}, groups.tp.get()));
  EXPECT_FALSE(bench.vae().shares_decode(2, 9, {}, groups.tp.get()));
  EXPECT_FALSE(bench.vae().shares_decode(5, 4, tiling, groups.tp.get()));
  EXPECT_TRUE(bench.vae().shares_decode(4, 4, tiling, groups.tp.get()));
  EXPECT_FALSE(bench.vae().shares_decode(3, 2, {}, nullptr));
}

class ShippedVae : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = source_dir() / "models/cosmos3-pico/vae";
    if (!std::filesystem::exists(folder_)) GTEST_SKIP() << "no " << folder_;
  }
  std::filesystem::path folder_;
};

TEST_F(ShippedVae, ReconstructsAMovingSquare) {
  Bench bench(folder_, {});
  const Clip clip = moving_square(13, 256);
  const Clip latents = bench.encode(clip);
  const Clip back = planar(bench.decode(latents), clip.shape);
  EXPECT_GT(psnr(back.values, clip.values), 33);
}

// Activations of eight bits of mantissa through some thirty layers: about 40 dB below the picture.
TEST_F(ShippedVae, HalfPrecisionKeepsThePicture) {
  const Clip clip = moving_square(5, 128);
  Bench single(folder_, {}), half(folder_, {.dtype = DType::bf16});
  const Clip latents = single.encode(clip);
  EXPECT_LT(relative_error(half.encode(clip).values, latents.values), 0.05);
  EXPECT_GT(psnr(half.decode(latents), single.decode(latents)), 40);
  EXPECT_GT(single.last_peak(), half.last_peak());
}

// B46: with trained weights tiles agree with the whole, but for what a tile cannot see past its
// edge.
TEST_F(ShippedVae, TilesAgreeWithTheWhole) {
  Bench bench(folder_, {});
  const Clip clip = moving_square(5, 256);
  const Clip latents = bench.encode(clip);
  EXPECT_GT(psnr(bench.decode(latents, {true, 192, 128}), bench.decode(latents)), 40);
  // Encoded tiles are of patchified pixels: 96 are 192 pixels.
  const Clip tiled = bench.encode(clip, {true, 96, 64});
  EXPECT_GT(psnr(planar(bench.decode(tiled), clip.shape).values, clip.values), 33);
}

}  // namespace
}  // namespace orrery
