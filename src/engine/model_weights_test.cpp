// What the weights of the published sizes take on a device in each mode.
#include "engine/model_weights.h"

#include <gtest/gtest.h>

#include "backend/dry_run.h"
#include "base/error.h"
#include "base/json.h"
#include "expect_error.h"
#include "published/presets.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

PartSizes sizes_of(const char* config, const Shard& shard = {}) {
  const ModelPreset preset = model_preset(config);
  DryRunBackend dry(DeviceKind::cuda, true);
  Transformer transformer(dry, TransformerConfig::from_json(preset.transformer), DType::bf16);
  Vae vae(dry, VaeConfig::from_json(preset.vae), {});
  const auto bf16 = [](const std::string&) { return DType::bf16; };
  return part_sizes({transformer, vae}, bf16, bf16, shard);
}

// One layer of Super: (64 + 2 * 8) heads of 128 in, 64 out, three MLP matrices, two norms of the
// hidden size and two of a head.
constexpr int64_t kSuperLayer =
    2 * (5120 * 80 * 128 + 8192 * 5120 + 3 * int64_t{5120} * 25600 + 2 * 5120 + 2 * 128);

TEST(ModelWeights, SizesAreThoseOfTheTensors) {
  const PartSizes sizes = sizes_of("super");
  EXPECT_EQ(sizes.generation_layer, kSuperLayer);
  EXPECT_EQ(sizes.text_layer, kSuperLayer);
  EXPECT_EQ(sizes.generation - sizes.generation_ends, 64 * kSuperLayer);
  EXPECT_EQ(sizes.text_ends, 2 * int64_t{151936} * 5120);
  EXPECT_EQ(sizes.all(), sizes.text + sizes.generation + sizes.vae);
  // Each of two ranks holds half the matrices; norms stay whole.
  const PartSizes half = sizes_of("super", {0, 2, nullptr});
  EXPECT_EQ(half.generation_layer, kSuperLayer / 2 + 2 * 5120 + 2 * 128);
  EXPECT_EQ(half.vae, sizes.vae);
}

TEST(ModelWeights, ModesTakeWhatTheySay) {
  const PartSizes s = sizes_of("super");
  const Footprint none = footprint_of(s, Offload::none, DeviceKind::cuda);
  EXPECT_EQ(none.resident, s.generation + s.vae);
  EXPECT_EQ(none.denoise, none.resident + s.text_layer);
  EXPECT_EQ(none.decode, none.resident);
  EXPECT_EQ(none.most(), none.denoise);
  EXPECT_EQ(none.pinned, 0);

  const Footprint model = footprint_of(s, Offload::model, DeviceKind::cuda);
  EXPECT_EQ(model.resident, 0);
  EXPECT_EQ(model.denoise, s.generation + s.text_layer);
  EXPECT_EQ(model.decode, s.vae);

  const Footprint layer = footprint_of(s, Offload::layer, DeviceKind::cuda);
  EXPECT_EQ(layer.denoise, s.generation_ends + 3 * kSuperLayer + s.vae);
  EXPECT_EQ(layer.pinned, 64 * kSuperLayer);
  EXPECT_LT(layer.most(), 7'000'000'000);  // Super on any card

  // The CPU maps everything once.
  EXPECT_EQ(footprint_of(s, Offload::none, DeviceKind::cpu).most(), s.all());
}

// B80: while the files are loaded and while parts come and go, the device never holds more than the
// mode says, the towers that take turns least of all.
TEST(ModelWeights, LoadingHoldsNoMoreThanTheModeSays) {
  const std::filesystem::path model = source_dir() / "models/cosmos3-pico";
  size_t peaks[3];
  for (Offload offload : {Offload::none, Offload::model, Offload::layer}) {
    DryRunBackend dry(DeviceKind::cuda, true);
    Transformer transformer(
        dry, TransformerConfig::from_json(Json::load(model / "transformer/config.json")),
        DType::bf16);
    Vae vae(dry, VaeConfig::from_json(Json::load(model / "vae/config.json")), {});
    const size_t before = dry.allocated();
    ModelWeights::Options options;
    options.offload = offload;
    options.transformer.dtype = options.vae.dtype = DType::bf16;
    options.transformer.ignored = Transformer::is_unused;
    ModelWeights weights(dry, {transformer, vae}, open_model_folder(model), options);
    for (Part part : {Part::text, Part::generation, Part::vae}) {
      const ModelWeights::Use use(weights, part);
      EXPECT_TRUE(weights.has(part));
    }
    size_t& peak = peaks[static_cast<size_t>(offload)];
    peak = dry.peak_allocated() - before;
    EXPECT_GT(peak, 0u);
    EXPECT_LE(static_cast<int64_t>(peak), weights.footprint().most());
  }
  EXPECT_LT(peaks[static_cast<size_t>(Offload::layer)], peaks[static_cast<size_t>(Offload::none)]);
}

TEST(ModelWeights, TheCpuOffloadsNothing) {
  EXPECT_EQ(offload_on(DeviceKind::cuda, Offload::none), Offload::none);
  EXPECT_EQ(offload_on(DeviceKind::cuda, Offload::model), Offload::model);
  EXPECT_EQ(offload_on(DeviceKind::cuda, Offload::layer), Offload::layer);
  EXPECT_EQ(offload_on(DeviceKind::cpu, Offload::layer), Offload::none);
}

}  // namespace
}  // namespace orrery
