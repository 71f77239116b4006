// A checkpoint that was made can be opened, checked and run.
#include "published/random_checkpoint.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "expect_error.h"
#include "io/safetensors.h"
#include "orrery/engine.h"
#include "scratch_folder.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

namespace fs = std::filesystem;

// The structure of Edge, small.
ModelPreset tiny() {
  ModelPreset preset = model_preset("edge");
  preset.transformer.set("hidden_size", 64)
      .set("intermediate_size", 96)
      .set("num_hidden_layers", 2)
      .set("num_attention_heads", 4)
      .set("num_key_value_heads", 2)
      .set("head_dim", 32)
      .set("vocab_size", 600)
      .set("rope_scaling", Json::object().set("mrope_section", Json::array({8, 4, 4})));
  preset.vae.set("base_dim", 16).set("decoder_base_dim", 16).set("num_res_blocks", 1);
  return preset;
}

TEST(RandomCheckpoint, OpensAndRuns) {
  const ScratchFolder scratch;
  const fs::path folder = scratch.path() / "model";
  int64_t last = 0, total = 0;
  write_random_checkpoint(folder, tiny(), {},
                          [&](const Progress& p) { last = p.step, total = p.total; }, {});
  EXPECT_EQ(last, total);
  EXPECT_EQ(std::distance(fs::directory_iterator(scratch.path()), {}),
            1);  // nothing half-written is left

  const Safetensors transformer = Safetensors::open_folder(folder / "transformer");
  ASSERT_NE(transformer.find("lm_head.weight"), nullptr);
  EXPECT_EQ(transformer.find("layers.0.self_attn.k_norm_und_for_gen.weight")->shape, (Shape{32}));
  const Tensor norm = transformer.read("layers.1.input_layernorm_moe_gen.weight", DType::f32);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(norm.view.as<float>()[i], 1.0f);
  const Tensor down = transformer.read("layers.1.mlp.down_proj.weight", DType::f32);
  double squares = 0;
  for (int64_t i = 0; i < down.view.numel(); ++i) squares += std::pow(down.view.as<float>()[i], 2);
  EXPECT_NEAR(std::sqrt(squares / static_cast<double>(down.view.numel())), 0.02, 0.002);

  Engine engine = Engine::open(folder);
  Request request;
  request.prompt = "A cup.";
  request.height = request.width = 32;
  request.num_frames = 1;
  request.num_inference_steps = 2;
  const Result result = engine.generate(request);
  ASSERT_EQ(result.frames.rgb.size(), 32u * 32 * 3);
  for (float value : result.latents.values) EXPECT_LT(std::abs(value), 100.0f);
  EXPECT_EQ(detokenize(folder, tokenize(folder, "grüße <|im_end|>")), "grüße <|im_end|>");
}

// Nano and Super have heads for actions and sound, and a decoder of sound.
TEST(RandomCheckpoint, OffersEveryMode) {
  ModelPreset preset = tiny();
  const ModelPreset nano = model_preset("nano");
  for (const char* key : {"action_gen", "action_dim", "num_embodiment_domains", "sound_gen",
                          "sound_dim", "sound_latent_fps"})
    preset.transformer.set(key, nano.transformer.at(key));
  preset.sound = nano.sound;
  preset.sound.set("dec_dim", 4).set("sampling_rate", 48000);
  const ScratchFolder scratch;
  const fs::path folder = scratch.path() / "model";
  write_random_checkpoint(folder, preset, {}, {}, {});
  const Safetensors decoder = Safetensors::open_folder(folder / "sound_tokenizer");
  ASSERT_NE(decoder.find("decoder.conv1.weight_g"), nullptr);
  ASSERT_NE(decoder.find("decoder.block.0.snake1.alpha"), nullptr);
  EXPECT_EQ(decoder.find("decoder.block.0.snake1.alpha")->shape.rank(), 3);

  Engine engine = Engine::open(folder);
  Request request;
  request.prompt = "A bell.";
  request.height = request.width = 32;
  request.num_frames = 5;
  request.num_inference_steps = 1;
  request.enable_sound = true;
  const Result result = engine.generate(request);
  ASSERT_EQ(result.sound.size(), 2u);
  for (float value : result.sound.front()) ASSERT_TRUE(std::isfinite(value));
  EXPECT_NE(inspect(folder, false).find("inverse dynamics"), std::string::npos);
}

TEST(RandomCheckpoint, FollowsTheSeed) {
  const ScratchFolder scratch;
  const auto first_of = [&](int64_t seed, const std::string& name) {
    CheckpointOptions options;
    options.seed = seed;
    write_random_checkpoint(scratch.path() / name, tiny(), options, {}, {});
    return Safetensors::open_folder(scratch.path() / name / "transformer")
        .read("proj_in.weight", DType::f32);
  };
  const Tensor a = first_of(1, "a"), b = first_of(1, "b"), c = first_of(2, "c");
  EXPECT_EQ(a.view.as<float>()[7], b.view.as<float>()[7]);
  EXPECT_NE(a.view.as<float>()[7], c.view.as<float>()[7]);
}

TEST(RandomCheckpoint, CopiesATokenizer) {
  const ScratchFolder scratch;
  CheckpointOptions options;
  options.tokenizer = source_dir() / "models/cosmos3-pico/text_tokenizer";
  write_random_checkpoint(scratch.path() / "model", tiny(), options, {}, {});
  EXPECT_EQ(tokenize(scratch.path() / "model", "video"),
            tokenize(source_dir() / "models/cosmos3-pico", "video"));

  ModelPreset small = tiny();
  small.transformer.set("vocab_size", 300);
  expect_error(ErrorKind::invalid_argument, {"ids up to 542"},
               [&] { write_random_checkpoint(scratch.path() / "other", small, options, {}, {}); });
}

TEST(RandomCheckpoint, RefusesAFolderInUseAndLeavesNothingWhenStopped) {
  const ScratchFolder scratch;
  scratch.write("used/file.txt", "mine");
  expect_error(ErrorKind::invalid_argument, {"not an empty folder"},
               [&] { write_random_checkpoint(scratch.path() / "used", tiny(), {}, {}, {}); });
  expect_error(ErrorKind::not_found, {"does not exist"},
               [&] { write_random_checkpoint(scratch.path() / "no/model", tiny(), {}, {}, {}); });
  std::stop_source stop;
  stop.request_stop();
  expect_error(ErrorKind::cancelled, {"stopped"}, [&] {
    write_random_checkpoint(scratch.path() / "model", tiny(), {}, {}, stop.get_token());
  });
  EXPECT_EQ(std::distance(fs::directory_iterator(scratch.path()), {}), 1);
}

}  // namespace
}  // namespace orrery
