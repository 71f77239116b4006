// The program takes what the public entry point takes, by the same names.
#include <gtest/gtest.h>

#include "base/json.h"
#include "io/safetensors.h"
#include "io/video.h"
#include "process.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

namespace fs = std::filesystem;

class EntryPoint : public testing::Test {
 protected:
  EntryPoint() {
    VideoOptions options;
    options.height = 48;
    options.width = 64;
    options.fps = 10;
    VideoWriter writer(file("clip.mp4"), options);
    for (int t = 0; t < 9; ++t) {
      std::vector<uint8_t> frame(48 * 64 * 3, 20);
      for (int y = 16; y < 32; ++y) std::fill_n(frame.begin() + (y * 64 + 4 * t) * 3, 16 * 3, 220);
      writer.write(frame.data());
    }
    writer.finish();
  }

  fs::path file(const std::string& name) const { return scratch_.path() / name; }
  // On a small model with every head.
  e2e::Outcome generate(const std::vector<std::string>& more) const {
    std::vector<std::string> arguments{"generate",
                                       "--model",
                                       e2e::source_folder() + "/tests/golden/data/pipeline/model",
                                       "--prompt",
                                       "Push.",
                                       "--num-inference-steps",
                                       "1",
                                       "--guidance-scale",
                                       "1",
                                       "--report",
                                       file("report.json").string()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return e2e::run(arguments);
  }
  e2e::Outcome act(const char* mode, const std::vector<std::string>& more) const {
    std::vector<std::string> arguments{"--action-mode",
                                       mode,
                                       "--action-chunk-size",
                                       "4",
                                       "--domain-name",
                                       "pusht",
                                       "--view-point",
                                       "third_person_view",
                                       "--resolution-tier",
                                       "256",
                                       "--fps",
                                       "10"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return generate(arguments);
  }
  std::string latents(const std::string& name) const {
    const Safetensors opened = Safetensors::open_file(file(name + ".safetensors"));
    const View values = opened.view("latents");
    return {static_cast<const char*>(values.data), static_cast<size_t>(values.numel()) * 4};
  }

  ScratchFolder scratch_;
};

TEST_F(EntryPoint, EveryFlagIsThere) {
  const std::string help = e2e::run({"generate", "--help"}).out;
  for (const char* flag :
       {// inference_cosmos3.py
        "--prompt ", "--model ", "--vision-path", "--video-path",
        "--condition-frame-indexes-vision", "--condition-video-keep", "--output", "--height",
        "--width", "--num-frames", "--fps", "--guidance-scale", "--num-inference-steps",
        "--flow-shift", "--seed", "--tp-degree", "--cp-degree", "--enable-sound", "--action-mode",
        "--action-path", "--action-chunk-size", "--domain-name", "--view-point",
        "--resolution-tier", "--no-duration-template", "--no-resolution-template",
        "--disable-safety-checker", "--no-safety-check",
        // the pipelines' own
        "--negative-prompt", "--use-system-prompt", "--image",
        // transfer
        "--control ", "--control-weight", "--control-guidance ", "--control-guidance-interval",
        "--guidance-interval", "--num-video-frames-per-chunk", "--num-conditional-frames",
        "--num-first-chunk-conditional-frames", "--preset-edge-threshold", "--preset-blur-strength",
        "--emphasize-control-in-prompt",
        // adapters and the guardrail
        "--lora", "--guardrail "}) {
    EXPECT_NE(help.find(flag), std::string::npos) << flag;
  }
}

// A video as --vision-path, an output folder, actions as JSON rows: as there.
TEST_F(EntryPoint, ActionsRoundTrip) {
  const fs::path folder = file("found");
  fs::create_directory(folder);
  const e2e::Outcome found = act("inverse_dynamics", {"--vision-path", file("clip.mp4").string(),
                                                      "--output", folder.string()});
  ASSERT_EQ(found.status, 0) << found.err;
  EXPECT_EQ(read_video(folder / "sample.mp4").frames.size(), 5u);
  const Json actions = Json::load(folder / "sample_action.json").at("actions");
  ASSERT_EQ(actions.items().size(), 4u);
  for (const Json& row : actions.items()) EXPECT_EQ(row.items().size(), 2u);

  // The rows alone, an object with them, and a batch of one are the same actions.
  scratch_.write("rows.json", actions.dump());
  scratch_.write("batch.json", Json::array({actions}).dump());
  for (const fs::path& path :
       {folder / "sample_action.json", file("rows.json"), file("batch.json")}) {
    const e2e::Outcome made = act(
        "forward_dynamics", {"--vision-path", file("clip.mp4").string(), "--action-path",
                             path.string(), "--output", file("made.mp4").string(), "--save-latents",
                             file(path.stem().string() + ".safetensors").string()});
    ASSERT_EQ(made.status, 0) << made.err;
  }
  EXPECT_EQ(latents("rows"), latents("sample_action"));
  EXPECT_EQ(latents("batch"), latents("sample_action"));
}

// Actions run without a system prompt unless it is asked for.
TEST_F(EntryPoint, ActionsHaveNoSystemPrompt) {
  const auto tokens = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"--vision-path", file("clip.mp4").string(), "--output",
                                       file("made.mp4").string()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    EXPECT_EQ(act("policy", arguments).status, 0);
    return Json::load(file("report.json")).at("tokens").at("text").as_int();
  };
  EXPECT_EQ(tokens({}), tokens({"--use-system-prompt", "off"}));
  EXPECT_GT(tokens({"--use-system-prompt", "on"}), tokens({}));
}

TEST_F(EntryPoint, FrameIndexesByCommas) {
  const auto with = [&](const std::string& name, const std::vector<std::string>& indexes) {
    std::vector<std::string> arguments{"--video-path",   file("clip.mp4").string(),
                                       "--height",       "48",
                                       "--width",        "64",
                                       "--num-frames",   "9",
                                       "--output",       file("made.mp4").string(),
                                       "--save-latents", file(name + ".safetensors").string()};
    if (!indexes.empty()) arguments.push_back("--condition-frame-indexes-vision");
    arguments.insert(arguments.end(), indexes.begin(), indexes.end());
    const e2e::Outcome outcome = generate(arguments);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
  };
  with("default", {});
  with("commas", {"0,1"});
  with("blanks", {"0", "1"});
  with("one", {"0"});
  EXPECT_EQ(latents("commas"), latents("default"));
  EXPECT_EQ(latents("blanks"), latents("default"));
  EXPECT_NE(latents("one"), latents("default"));
}

}  // namespace
}  // namespace orrery
