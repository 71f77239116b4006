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
  return part_sizes({transformer, vae}, {DType::bf16, shard, true}, DType::bf16);
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
    options.transformer.hold = options.vae.hold = DType::bf16;
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

// The text tower stays when it fits beside what a request needs, to the byte; with an offload only
// when that is asked for; on the CPU there is nothing to decide.
TEST(ModelWeights, TheTextTowerStaysWhereItFits) {
  const PartSizes s = sizes_of("nano");
  const int64_t beside = int64_t{7} << 30;
  const int64_t whole = s.generation + s.vae + s.text_layers() + beside;
  const auto keeps = [&](Resident resident, Offload offload, int64_t budget,
                         DeviceKind device = DeviceKind::cuda) {
    return keeps_text(resident, s, offload, device, beside, budget);
  };
  EXPECT_TRUE(keeps(Resident::automatic, Offload::none, whole));
  EXPECT_FALSE(keeps(Resident::automatic, Offload::none, whole - 1));
  EXPECT_FALSE(keeps(Resident::automatic, Offload::model, whole));
  EXPECT_FALSE(keeps(Resident::automatic, Offload::layer, whole));
  EXPECT_TRUE(keeps(Resident::on, Offload::layer, 0));
  EXPECT_FALSE(keeps(Resident::off, Offload::none, whole));
  EXPECT_FALSE(keeps(Resident::on, Offload::none, whole, DeviceKind::cpu));

  const Footprint kept = footprint_of(s, Offload::none, DeviceKind::cuda, true);
  EXPECT_EQ(kept.resident, s.generation + s.vae + s.text_layers());
  EXPECT_EQ(kept.most(), kept.resident);
}

// What stays is brought once: a second prompt uploads nothing and finds the memory as it was. When
// it must make room it goes at once, and comes back by itself.
TEST(ModelWeights, AResidentTextTowerIsBroughtOnce) {
  const std::filesystem::path model = source_dir() / "models/cosmos3-pico";
  DryRunBackend dry(DeviceKind::cuda, true);
  Transformer transformer(
      dry, TransformerConfig::from_json(Json::load(model / "transformer/config.json")),
      DType::bf16);
  Vae vae(dry, VaeConfig::from_json(Json::load(model / "vae/config.json")), {});
  const auto before = static_cast<int64_t>(dry.allocated());
  ModelWeights::Options options;
  options.transformer.hold = options.vae.hold = DType::bf16;
  options.transformer.ignored = Transformer::is_unused;
  ModelWeights weights(dry, {transformer, vae}, open_model_folder(model), options);
  const auto held = [&] { return static_cast<int64_t>(dry.allocated()) - before; };
  // A prompt; the bytes it uploads.
  const auto prompt = [&] {
    dry.reset_stats();
    const ModelWeights::Use text(weights, Part::text);
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t i = 0; i < transformer.config().num_hidden_layers; ++i)
        transformer.bring_layer(Tower::und, static_cast<int>(i));
    }
    const auto uploads = dry.stats().find("upload");
    return uploads == dry.stats().end() ? 0.0 : uploads->second.bytes;
  };
  const int64_t without = held();
  EXPECT_EQ(without, weights.resident_bytes());
  const double twice = prompt();
  EXPECT_EQ(held(), without);

  weights.keep_text(true);
  EXPECT_EQ(weights.resident_bytes(), without);  // it comes with the next prompt
  EXPECT_EQ(prompt(), twice / 2);
  EXPECT_EQ(held(), without + weights.sizes().text_layers());
  EXPECT_EQ(held(), weights.resident_bytes());
  EXPECT_EQ(weights.resident_bytes(), weights.footprint().resident);
  EXPECT_EQ(prompt(), 0);

  weights.keep_text(false);
  EXPECT_EQ(held(), without);
  EXPECT_EQ(prompt(), twice);
}

TEST(ModelWeights, TheCpuOffloadsNothing) {
  EXPECT_EQ(offload_on(DeviceKind::cuda, Offload::none), Offload::none);
  EXPECT_EQ(offload_on(DeviceKind::cuda, Offload::model), Offload::model);
  EXPECT_EQ(offload_on(DeviceKind::cuda, Offload::layer), Offload::layer);
  EXPECT_EQ(offload_on(DeviceKind::cpu, Offload::layer), Offload::none);
}

}  // namespace
}  // namespace orrery
