// The sound decoder against the reference in fp32, on every case of the folders audio*.
#include <gtest/gtest.h>

#include "cpu/cpu_backend.h"
#include "golden.h"
#include "model/sound.h"
#include "model/weights.h"

namespace orrery {
namespace {

// Given latents and fp32 throughout, implementations agree to 2e-5; snakes amplify what differs.
constexpr double kTolerance = 2e-5;

TEST(AudioGolden, Decode) {
  int cases = 0;
  for (const std::string& area : golden::cases("")) {
    if (!area.starts_with("audio")) continue;
    const auto folder = golden::directory() / area;
    SCOPED_TRACE(area);
    const auto backend = cpu::make_cpu_backend();
    SoundDecoder decoder(
        *backend, SoundConfig::from_json(Json::load(folder / "sound_tokenizer/config.json")));
    const Safetensors files = Safetensors::open_folder(folder / "sound_tokenizer");
    const WeightStore store = load_weights(
        *backend, files, [&](WeightVisitor& v) { decoder.visit(v); },
        sound_loading(decoder.config(), files));
    const golden::Tensors tensors(folder / "tensors.safetensors");
    const Shape z = tensors.shape("z"), shape = tensors.shape("wave");
    std::vector<float> values = tensors.floats("z");
    Tensor latents = backend->allocate_tensor({z[1], z[2]}, DType::f32);
    backend->upload(latents.view, make_view(values.data(), latents.view.shape, DType::f32));
    Tensor wave = allocate_host_tensor({shape[1], shape[2]}, DType::f32);
    Arena arena(backend->allocate(size_t{64} << 20));
    decoder.decode(arena, wave.view, latents.view);
    const std::span<const float> got(wave.view.as<float>(), static_cast<size_t>(wave.view.numel()));
    EXPECT_LT(golden::relative_error(got, tensors.floats("wave")), kTolerance);
    ++cases;
  }
  if (cases == 0) GTEST_SKIP() << "no golden data for audio in " << golden::directory();
}

}  // namespace
}  // namespace orrery
