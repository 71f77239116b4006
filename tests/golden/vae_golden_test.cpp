// The VAE against the reference in fp32: encode, decode and tiled decode of every tensor in the
// folder.
#include <gtest/gtest.h>

#include <regex>

#include "backend/dry_run.h"
#include "cpu/cpu_backend.h"
#include "golden.h"
#include "model/vae.h"
#include "model/weights.h"

namespace orrery {
namespace {

// Two independent fp32 implementations agree to about 1e-6; the rest is room for another order of
// summation. Mistakes in caches or shortcuts start at 1e-3.
constexpr double kTolerance = 2e-5;

size_t arena_bytes(const VaeConfig& config, const std::function<void(Vae&, Arena&)>& call) {
  DryRunBackend dry(DeviceKind::cpu);
  Vae vae(dry, config);
  place_weights(
      dry, [&](WeightVisitor& visitor) { vae.visit(visitor); }, DType::f32);
  Arena measuring = Arena::measuring(DeviceKind::cpu);
  call(vae, measuring);
  return measuring.peak();
}

class VaeGolden : public testing::Test {
 protected:
  void SetUp() override {
    ORRERY_SKIP_WITHOUT("vae");
    folder_ = golden::directory() / "vae";
    backend_ = cpu::make_cpu_backend();
    config_ = VaeConfig::from_json(Json::load(folder_ / "vae/config.json"));
    // The files state latents before normalisation: with mean 0 and deviation 1 decode takes them
    // so.
    config_.latents_mean.assign(config_.latents_mean.size(), 0.0f);
    config_.latents_std.assign(config_.latents_std.size(), 1.0f);
    vae_ = std::make_unique<Vae>(*backend_, config_);
    store_ = load_weights(*backend_, Safetensors::open_folder(folder_ / "vae"),
                          [&](WeightVisitor& visitor) { vae_->visit(visitor); }, {});
    tensors_ = std::make_unique<golden::Tensors>(folder_ / "tensors.safetensors");
    const Safetensors file = Safetensors::open_file(folder_ / "tensors.safetensors");
    for (const StoredTensor& tensor : file.tensors()) names_.push_back(tensor.name);
  }

  Tensor input(const std::string& name) const {
    const Shape shape = tensors_->shape(name);
    Tensor tensor = backend_->allocate_tensor({shape[1], shape[2], shape[3], shape[4]}, DType::f32);
    const std::vector<float> values = tensors_->floats(name);
    backend_->upload(tensor.view, make_view(values.data(), tensor.view.shape, DType::f32));
    return tensor;
  }

  // Frames [T, H, W, 3] put together as [3, T, H, W].
  std::vector<float> decode(View latents, const VaeTiling& tiling) {
    const auto call = [&](Vae& vae, Arena& arena) { vae.decode(arena, latents, tiling, {}); };
    Arena arena(backend_->allocate(arena_bytes(config_, call)));
    const int64_t total = config_.decoded_frames(latents.dim(1));
    const int64_t area = latents.dim(2) * latents.dim(3) * config_.scale_factor_spatial *
                         config_.scale_factor_spatial;
    std::vector<float> video(static_cast<size_t>(3 * total * area));
    int64_t at = 0;
    vae_->decode(arena, latents, tiling, [&](const FrameGroup& group) {
      const View& frames = group.pixels;
      for (int64_t i = 0; i < frames.numel(); ++i) {
        const int64_t pixel = at * area + i / 3;
        video[static_cast<size_t>(i % 3 * total * area + pixel)] = frames.as<float>()[i];
      }
      at += frames.dim(0);
    });
    EXPECT_EQ(at, total);
    return video;
  }

  std::filesystem::path folder_;
  std::unique_ptr<Backend> backend_;
  VaeConfig config_;
  std::unique_ptr<Vae> vae_;
  WeightStore store_;
  std::unique_ptr<golden::Tensors> tensors_;
  std::vector<std::string> names_;
};

TEST_F(VaeGolden, Encode) {
  int cases = 0;
  for (const std::string& name : names_) {
    if (!name.starts_with("encode") || !name.ends_with(".x")) continue;
    const std::string mean = name.substr(0, name.size() - 2) + ".mean";
    const Tensor pixels = input(name);
    const Shape shape = tensors_->shape(mean);
    Tensor latents =
        backend_->allocate_tensor({shape[1], shape[2], shape[3], shape[4]}, DType::f32);
    const auto call = [&](Vae& vae, Arena& arena) {
      vae.encode(arena, latents.view, pixels.view, {}, true);
    };
    Arena arena(backend_->allocate(arena_bytes(config_, call)));
    call(*vae_, arena);
    const std::span<const float> got(latents.view.as<float>(),
                                     static_cast<size_t>(latents.view.numel()));
    EXPECT_LT(golden::relative_error(got, tensors_->floats(mean)), kTolerance) << name;
    ++cases;
  }
  EXPECT_GT(cases, 0);
}

TEST_F(VaeGolden, Decode) {
  int cases = 0;
  for (const std::string& name : names_) {
    if (!name.starts_with("decode") || !name.ends_with(".z")) continue;
    const std::string x = name.substr(0, name.size() - 2) + ".x";
    EXPECT_LT(golden::relative_error(decode(input(name).view, {}), tensors_->floats(x)), kTolerance)
        << name;
    ++cases;
  }
  EXPECT_GT(cases, 0);
}

TEST_F(VaeGolden, TiledDecode) {
  if (!tensors_->has("tiled.z")) GTEST_SKIP() << "no tiled case in " << folder_;
  // case.json says it in words: "tiled decode with 48/32 tiles".
  const std::string what = Json::load(folder_ / "case.json").at("what").as_string();
  std::smatch found;
  ASSERT_TRUE(std::regex_search(what, found, std::regex("(\\d+)/(\\d+) tiles"))) << what;
  const VaeTiling tiling{true, std::stoll(found[1]), std::stoll(found[2])};
  EXPECT_LT(
      golden::relative_error(decode(input("tiled.z").view, tiling), tensors_->floats("tiled.x")),
      kTolerance);
}

// The shipped checkpoint on the latents its reference runs ended with: the frames they became.
TEST(VaeGoldenFrames, ShippedCheckpoint) {
  ORRERY_SKIP_WITHOUT("pico");
  const auto folder = golden::model_directory() / "vae";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "no " << folder;
  const auto backend = cpu::make_cpu_backend();
  const VaeConfig config = VaeConfig::from_json(Json::load(folder / "config.json"));
  Vae vae(*backend, config);
  const WeightStore store = load_weights(*backend, Safetensors::open_folder(folder),
                                         [&](WeightVisitor& visitor) { vae.visit(visitor); }, {});
  int cases = 0;
  for (const auto& entry : std::filesystem::directory_iterator(golden::directory() / "pico")) {
    if (entry.path().extension() != ".safetensors") continue;
    const golden::Tensors tensors(entry.path());
    if (!tensors.has("latents") || !tensors.has("frame_last")) continue;
    SCOPED_TRACE(entry.path().filename());
    const Shape shape = tensors.shape("latents");
    const std::vector<float> values = tensors.floats("latents");
    const View latents =
        make_view(values.data(), {shape[1], shape[2], shape[3], shape[4]}, DType::f32);
    const auto call = [&](const Vae::FrameSink& sink) {
      return [&latents, sink](Vae& network, Arena& arena) {
        network.decode(arena, latents, {}, sink);
      };
    };
    Arena arena(backend->allocate(arena_bytes(config, call({}))));
    std::vector<uint8_t> last;
    call([&](const FrameGroup& group) {
      const View& bytes = group.bytes;
      const View frame = bytes.select(0, bytes.dim(0) - 1);
      last.assign(frame.as<uint8_t>(), frame.as<uint8_t>() + frame.numel());
    })(vae, arena);
    const std::vector<uint8_t> want = tensors.bytes("frame_last");
    ASSERT_EQ(last.size(), want.size());
    int64_t off = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_LE(std::abs(last[i] - want[i]), 1) << i;
      off += last[i] != want[i];
    }
    // Values that fall on the border between two levels.
    EXPECT_LT(off, static_cast<int64_t>(want.size() / 1000)) << "values that are one level off";
    ++cases;
  }
  EXPECT_GT(cases, 0);
}

}  // namespace
}  // namespace orrery
