// The text tower beside the first denoising step, against the text tower before it.
#include <gtest/gtest.h>

#include <filesystem>
#include <vector>

#include "e2e/small_request.h"
#include "engine/backends.h"
#include "engine/measure.h"
#include "engine/run.h"
#include "model/weights.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

using When = Run::Text;

class FirstStep : public testing::Test {
 protected:
  FirstStep()
      : checkpoint_(read_checkpoint(source_dir() / "models/cosmos3-pico")),
        settings_(resolve(e2e::small_request(64, 64, 5), checkpoint_)),
        backend_(make_backend(EngineOptions{})),
        transformer_(*backend_, checkpoint_.transformer, DType::f32),
        vae_(*backend_, checkpoint_.vae, vae_options(DeviceKind::cpu, DType::f32)),
        strategy_(strategy_of(checkpoint_, "dense")) {
    LoadOptions load;
    load.ignored = Transformer::is_unused;
    weights_ = load_weights(
        *backend_, Safetensors::open_folder(checkpoint_.folder.folder / "transformer"),
        [&](WeightVisitor& v) { transformer_.visit_und(v), transformer_.visit_gen(v); }, load);
  }

  // Latents after `steps`; `exercised`: a layout is tried before the first.
  std::vector<float> latents(When when, int steps, bool exercised = false) {
    const auto ids = prompt_lists(
        checkpoint_, Tokenizer::load(checkpoint_.folder.folder / "text_tokenizer"), settings_);
    const Plan plan = measure(checkpoint_, settings_, strategy_, ids,
                              {DeviceKind::cpu, backend_->fuses_weights(), DType::f32, {}, {}, 0});
    // Both guidance branches at once hold their states beside each other.
    Arena arena(backend_->allocate(static_cast<size_t>(2 * plan.activation_bytes)));
    int texts = 0;  // times that the text tower's weights were asked for
    const auto with_text = [&](const std::function<void()>& body) { ++texts, body(); };
    orrery::Run run({transformer_, vae_, nullptr, with_text}, arena, settings_, strategy_, ids, {});
    run.prefill(when);
    EXPECT_EQ(texts, when == When::now ? 1 : 0);
    NormalGenerator noise(RngKind::cpu, settings_.seed);
    run.start(&noise, NoiseType::fp32, {});
    if (exercised) run.exercise(0);
    for (int i = 0; i < steps; ++i) run.step(i, &noise);
    EXPECT_EQ(texts, 1);
    return run.latents();
  }

  Checkpoint checkpoint_;
  Settings settings_;
  std::unique_ptr<Backend> backend_;
  Transformer transformer_;
  Vae vae_;
  AttentionStrategy strategy_;
  WeightStore weights_;
};

TEST_F(FirstStep, TextBesideItChangesNothing) {
  ASSERT_TRUE(settings_.guided());
  const std::vector<float> before = latents(When::now, 2);
  EXPECT_EQ(latents(When::with_first_step, 2), before);
  EXPECT_NE(latents(When::now, 1), before);
}

TEST_F(FirstStep, TextIsReadEarlierWhenALayoutIsTried) {
  EXPECT_EQ(latents(When::with_first_step, 1, true), latents(When::now, 1));
}

// The dry run of a device goes both ways and counts the text once.
TEST_F(FirstStep, PlansOfADeviceCountTheTextOnce) {
  const auto ids = prompt_lists(
      checkpoint_, Tokenizer::load(checkpoint_.folder.folder / "text_tokenizer"), settings_);
  const auto plan_on = [&](DeviceKind device) {
    return measure(checkpoint_, settings_, strategy_, ids, {device, false, DType::f32, {}, {}, 0});
  };
  const Plan host = plan_on(DeviceKind::cpu), device = plan_on(DeviceKind::cuda);
  ASSERT_EQ(host.stages.size(), device.stages.size());
  int compared = 0;
  for (size_t i = 0; i < host.stages.size(); ++i) {
    ASSERT_EQ(device.stages[i].name, host.stages[i].name);
    if (host.stages[i].name != "prompt" && host.stages[i].name != "denoise") continue;
    EXPECT_DOUBLE_EQ(device.stages[i].flops, host.stages[i].flops) << host.stages[i].name;
    ++compared;
  }
  EXPECT_EQ(compared, 2);
}

}  // namespace
}  // namespace orrery
