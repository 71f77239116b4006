// A run repeated from what it made: the same bytes.
#include <gtest/gtest.h>

#include "base/json.h"
#include "io/video.h"
#include "model_variant.h"
#include "process.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

namespace fs = std::filesystem;

struct Mode {
  const char* name;
  std::vector<std::string> arguments;  // "@NAME" stands for a file made here
  const char* output;
};

class Runs : public testing::Test {
 protected:
  Runs() {
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
    // A sound decoder of a rate that players know.
    const std::string config = "sound_tokenizer/config.json";
    model_.write(config, Json::load(model_.path() / config).set("sampling_rate", 48000).dump());
    scratch_.write("rows.json", "[[0.1, 0.2], [0.2, 0.1], [0, 0], [-0.1, 0.3]]");
  }

  std::string file(const std::string& name) const { return (scratch_.path() / name).string(); }
  std::string bytes(const std::string& name) const { return ScratchFolder::read(file(name)); }
  e2e::Outcome generate(const std::vector<std::string>& more) const {
    std::vector<std::string> arguments{"generate", "--quiet"};
    for (const std::string& word : more) {
      const size_t at = word.find('@');
      arguments.push_back(at == std::string::npos ? word
                                                  : word.substr(0, at) + file(word.substr(at + 1)));
    }
    return e2e::run(arguments);
  }
  e2e::Outcome first(const std::vector<std::string>& more, const std::string& output) const {
    std::vector<std::string> arguments{"--model",
                                       model_.path().string(),
                                       "--prompt",
                                       "A \"small\" r\u00f6d circle.",
                                       "--num-inference-steps",
                                       "1",
                                       "--seed",
                                       "3",
                                       "--report",
                                       "@a.json",
                                       "--output",
                                       "@" + output};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return generate(arguments);
  }

 private:
  ScratchFolder scratch_;
  e2e::ModelVariant model_{e2e::source_folder() + "/tests/golden/data/pipeline/model"};
};

class Repeat : public Runs, public testing::WithParamInterface<Mode> {};

TEST_P(Repeat, ByteForByte) {
  const std::string extension = GetParam().output;
  const e2e::Outcome made = first(GetParam().arguments, "a" + extension);
  ASSERT_EQ(made.status, 0) << made.err;
  const e2e::Outcome from_report = generate({"--from", "@a.json", "--output", "@b" + extension});
  ASSERT_EQ(from_report.status, 0) << from_report.err;
  EXPECT_EQ(bytes("b" + extension), bytes("a" + extension));
  const e2e::Outcome from_output =
      generate({"--from", "@a" + extension, "--output", "@c" + extension});
  ASSERT_EQ(from_output.status, 0) << from_output.err;
  EXPECT_EQ(bytes("c" + extension), bytes("a" + extension));
}

const std::vector<std::string> kSmall{"--height", "48", "--width", "64", "--guidance-scale", "3"};
std::vector<std::string> small(std::vector<std::string> more) {
  more.insert(more.begin(), kSmall.begin(), kSmall.end());
  return more;
}
std::vector<std::string> act(const char* mode, std::vector<std::string> more) {
  const std::vector<std::string> common{"--action-mode",
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
                                        "10",
                                        "--vision-path",
                                        "@clip.mp4",
                                        "--guidance-scale",
                                        "1"};
  more.insert(more.begin(), common.begin(), common.end());
  return more;
}

INSTANTIATE_TEST_SUITE_P(
    Modes, Repeat,
    testing::Values(
        Mode{"Picture", small({"--num-frames", "1", "--negative-prompt", "grey"}), ".png"},
        Mode{"Jpeg", small({"--num-frames", "1", "--no-resolution-template"}), ".jpg"},
        Mode{"Text", small({"--num-frames", "6", "--crf", "30", "--scheduler", "checkpoint"}),
             ".mp4"},  // 6 frames are not 4 n + 1
        Mode{"Video",
             small({"--num-frames", "9", "--video-path", "@clip.mp4",
                    "--condition-frame-indexes-vision", "0,1", "--condition-video-keep", "last",
                    "--video-fit", "cover"}),
             ".mp4"},
        Mode{"Sound", small({"--num-frames", "9", "--enable-sound", "--no-safety-check"}), ".mp4"},
        Mode{"Action", act("forward_dynamics", {"--action-path", "@rows.json"}), ".mp4"},
        Mode{"Policy", act("policy", {"--use-system-prompt", "on"}), ".mp4"},
        Mode{"Transfer",
             small({"--control", "depth=@clip.mp4", "--control", "blur", "--video-path",
                    "@clip.mp4", "--control-weight", "depth=2", "--preset-blur-strength", "low",
                    "--num-video-frames-per-chunk", "5", "--guidance-interval", "0", "900"}),
             ".mp4"}),
    [](const auto& test) { return test.param.name; });

TEST_F(Runs, NameWhatIsOverriddenAndWhatHasChanged) {
  const e2e::Outcome made = first(small({"--num-frames", "5", "--video-path", "@clip.mp4",
                                         "--condition-frame-indexes-vision", "0"}),
                                  "a.mp4");
  ASSERT_EQ(made.status, 0) << made.err;

  const std::vector<std::string> again{"generate", "--from", file("a.json"), "--output",
                                       file("b.mp4")};
  std::vector<std::string> arguments = again;
  arguments.insert(arguments.end(), {"--seed", "4", "--report", file("b.json")});
  const e2e::Outcome other = e2e::run(arguments);
  ASSERT_EQ(other.status, 0) << other.err;
  EXPECT_NE(other.err.find("--seed 4 is used instead of 3"), std::string::npos) << other.err;
  EXPECT_NE(bytes("b.mp4"), bytes("a.mp4"));
  EXPECT_EQ(Json::load(file("b.json")).at("settings").at("seed").as_int(), 4);

  // The picture it began with is another one, or gone.
  fs::copy_file(file("clip.mp4"), file("kept.mp4"));
  fs::copy_file(file("a.mp4"), file("clip.mp4"), fs::copy_options::overwrite_existing);
  const e2e::Outcome changed = e2e::run(again);
  EXPECT_EQ(changed.status, 2);
  EXPECT_NE(changed.err.find("clip.mp4 has changed"), std::string::npos) << changed.err;
  fs::remove(file("clip.mp4"));
  const e2e::Outcome gone = e2e::run(again);
  EXPECT_EQ(gone.status, 2);
  EXPECT_NE(gone.err.find("clip.mp4"), std::string::npos) << gone.err;
  arguments = again;
  arguments.insert(arguments.end(), {"--video-path", file("kept.mp4")});
  EXPECT_EQ(e2e::run(arguments).status, 0);

  const e2e::Outcome foreign = e2e::run({"generate", "--from", file("kept.mp4")});
  EXPECT_EQ(foreign.status, 2);
  EXPECT_NE(foreign.err.find("does not say how it was made"), std::string::npos) << foreign.err;
}

// The page in docs is what the tables say.
TEST(Reference, PageIsThatOfTheTables) {
  const e2e::Outcome page = e2e::run({"reference", "markdown"});
  ASSERT_EQ(page.status, 0) << page.err;
  EXPECT_EQ(page.out, ScratchFolder::read(e2e::source_folder() + "/docs/settings-reference.md"))
      << "orrery reference markdown > docs/settings-reference.md";
  for (const char* format : {"man", "bash", "zsh"}) {
    const e2e::Outcome made = e2e::run({"reference", format});
    EXPECT_EQ(made.status, 0);
    EXPECT_NE(made.out.find("num"), std::string::npos) << format;
  }
}

}  // namespace
}  // namespace orrery
