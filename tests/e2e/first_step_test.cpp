// The text tower beside the first denoising step, against the text tower before it.
#include <gtest/gtest.h>

#include <filesystem>
#include <vector>

#include "e2e/small_request.h"
#include "engine/backends.h"
#include "engine/measure.h"
#include "engine/run.h"
#include "expect_error.h"
#include "model/weights.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

enum class When { before, beside };

class FirstStep : public testing::Test {
 protected:
  FirstStep()
      : checkpoint_(read_checkpoint(source_dir() / "models/cosmos3-pico")),
        settings_(resolve(request_, checkpoint_)),
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
                              {DeviceKind::cpu, backend_->fuses_weights(), DType::f32, {}, {}, 0})
                          .plan;
    // Both guidance branches at once hold their states beside each other.
    Arena arena(backend_->allocate(static_cast<size_t>(2 * plan.activation_bytes)));
    int texts = 0;  // times that the text tower's weights were asked for
    const auto with_text = [&](const std::function<void()>& body) { ++texts, body(); };
    RunOptions options;
    options.text_with_first_step = when == When::beside;
    orrery::Run run({transformer_, vae_, nullptr, with_text}, arena,
                    {settings_, strategy_, ids, &request_}, options);
    for (const Stage& stage : stages_of(settings_)) {
      if (stage.kind == StageKind::decode) break;
      if (stage.kind == StageKind::denoise && exercised) run.exercise(0);
      run.perform(stage.kind == StageKind::denoise ? Stage{stage.kind, 0, 0, steps} : stage);
      if (stage.kind == StageKind::prompt) {
        EXPECT_EQ(texts, when == When::before ? 1 : 0);
      }
    }
    EXPECT_EQ(texts, 1);
    return run.latents();
  }

  Request request_ = e2e::small_request(64, 64, 5);
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
  const std::vector<float> before = latents(When::before, 2);
  EXPECT_EQ(latents(When::beside, 2), before);
  EXPECT_NE(latents(When::before, 1), before);
}

TEST_F(FirstStep, TextIsReadEarlierWhenALayoutIsTried) {
  EXPECT_EQ(latents(When::beside, 1, true), latents(When::before, 1));
}

// The run asks between layers, but not within a step that may be replayed.
TEST_F(FirstStep, PausesBetweenLayers) {
  const auto ids = prompt_lists(
      checkpoint_, Tokenizer::load(checkpoint_.folder.folder / "text_tokenizer"), settings_);
  const auto layers = static_cast<int>(checkpoint_.transformer.num_hidden_layers);
  Arena arena(backend_->allocate(size_t{256} << 20));
  for (const bool replays : {false, true}) {
    RunOptions options;
    options.replays = replays;
    orrery::Run run({transformer_, vae_, nullptr}, arena, {settings_, strategy_, ids, &request_},
                    options);
    int pauses = 0, allowed = 1 << 20;
    RunHooks hooks;
    hooks.pause = [&] {
      if (++pauses > allowed) fail(ErrorKind::cancelled, "enough");
    };
    run.perform({StageKind::prompt}, hooks);
    EXPECT_EQ(pauses, layers);  // both prompts side by side
    run.perform({StageKind::noise}, hooks);
    pauses = 0;
    run.perform({StageKind::denoise, 0, 0, 1}, hooks);
    EXPECT_EQ(pauses, replays ? 0 : 2 * layers);  // an evaluation of each prompt
    pauses = 0;
    allowed = layers + 1;
    if (!replays) {
      expect_error(ErrorKind::cancelled, {"enough"}, [&] {
        run.perform({StageKind::denoise, 0, 1, 1}, hooks);
      });
    }
    EXPECT_EQ(arena.used(), 0u);
  }
}

// A stage needs those before it.
TEST_F(FirstStep, StagesOutOfOrderAreRefused) {
  const auto ids = prompt_lists(
      checkpoint_, Tokenizer::load(checkpoint_.folder.folder / "text_tokenizer"), settings_);
  Arena arena(backend_->allocate(size_t{64} << 20));
  orrery::Run run({transformer_, vae_, nullptr}, arena, {settings_, strategy_, ids, &request_});
  const auto refuses = [&](StageKind kind, const char* part) {
    expect_error(ErrorKind::invalid_argument, {part}, [&] { run.perform({kind}); });
  };
  refuses(StageKind::denoise, "denoise comes after prompt and noise");
  refuses(StageKind::decode, "decode comes after noise");
  run.perform({StageKind::noise});
  refuses(StageKind::denoise, "denoise comes after prompt and noise");
  refuses(StageKind::load, "belongs to the engine");
}

// The dry run of a device goes both ways and counts the text once.
TEST_F(FirstStep, PlansOfADeviceCountTheTextOnce) {
  const auto ids = prompt_lists(
      checkpoint_, Tokenizer::load(checkpoint_.folder.folder / "text_tokenizer"), settings_);
  const auto plan_on = [&](DeviceKind device) {
    return measure(checkpoint_, settings_, strategy_, ids, {device, false, DType::f32, {}, {}, 0})
        .plan;
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
