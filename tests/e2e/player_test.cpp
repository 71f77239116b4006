// What other programs make of a generated file: ffprobe's account of a clip with sound.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "base/json.h"
#include "model_variant.h"
#include "process.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

namespace fs = std::filesystem;

// A small model that makes sound, at a rate that players know.
class Player : public testing::Test {
 protected:
  Player() : model_(e2e::source_folder() + "/tests/golden/data/pipeline/model") {
    const char* config = "sound_tokenizer/config.json";
    model_.write(config, Json::load(model_.path() / config).set("sampling_rate", 48000).dump());
  }
  void SetUp() override {
    if (e2e::Process({"-version"}, "ffprobe").finish().status != 0) {
      GTEST_SKIP() << "ffprobe (Debian package ffmpeg) is not installed";
    }
  }

  fs::path file(const std::string& name) const { return scratch_.path() / name; }
  e2e::Outcome generate(const std::vector<std::string>& more) const {
    std::vector<std::string> arguments{"generate",
                                       "--model",
                                       model_.path().string(),
                                       "--prompt",
                                       "A drum.",
                                       "--height",
                                       "48",
                                       "--width",
                                       "80",
                                       "--num-inference-steps",
                                       "1",
                                       "--guidance-scale",
                                       "1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return e2e::run(arguments);
  }
  static Json probe(const fs::path& clip) {
    const e2e::Outcome outcome = e2e::Process({"-v", "error", "-count_frames", "-show_streams",
                                               "-show_format", "-of", "json", clip.string()},
                                              "ffprobe")
                                     .finish();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    return Json::parse(outcome.out, "ffprobe");
  }
  static double number(const Json& stream, const char* key) {
    return std::strtod(stream.at(key).as_string().c_str(), nullptr);
  }

  e2e::ModelVariant model_;
  ScratchFolder scratch_;
};

TEST_F(Player, ReadsWhatWasAskedFor) {
  const e2e::Outcome outcome =
      generate({"--enable-sound", "--num-frames", "13", "--fps", "23.976", "--output",
                file("clip.mp4").string(), "--save-sound", file("clip.wav").string()});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const Json clip = probe(file("clip.mp4"));
  ASSERT_EQ(clip.at("streams").items().size(), 2u);
  const Json& video = clip.at("streams").at(size_t{0});
  const Json& sound = clip.at("streams").at(size_t{1});

  // What every browser plays: H.264 High with 4:2:0 colours of 8 bits, AAC, the index in front.
  EXPECT_EQ(video.at("codec_name").as_string(), "h264");
  EXPECT_EQ(video.at("profile").as_string(), "High");
  EXPECT_EQ(video.at("pix_fmt").as_string(), "yuv420p");
  EXPECT_EQ(video.at("color_space").as_string(), "bt709");
  EXPECT_EQ(video.at("codec_tag_string").as_string(), "avc1");
  EXPECT_EQ(sound.at("codec_name").as_string(), "aac");
  EXPECT_EQ(sound.at("profile").as_string(), "LC");
  const std::string bytes = ScratchFolder::read(file("clip.mp4"));
  EXPECT_LT(bytes.find("moov"), bytes.find("mdat"));
  EXPECT_LT(bytes.find("moov"), bytes.size());

  EXPECT_EQ(video.at("width").as_int(), 80);
  EXPECT_EQ(video.at("height").as_int(), 48);
  EXPECT_EQ(video.at("nb_read_frames").as_string(), "13");
  EXPECT_EQ(video.at("r_frame_rate").as_string(), "24000/1001");
  EXPECT_EQ(video.at("avg_frame_rate").as_string(), "24000/1001");
  EXPECT_EQ(sound.at("sample_rate").as_string(), "48000");
  EXPECT_EQ(sound.at("channels").as_int(), 2);

  // In step: both begin at 0 and end within one frame of each other.
  const double frame = 1001.0 / 24000;
  EXPECT_NEAR(number(video, "start_time"), 0, 1e-3);
  EXPECT_NEAR(number(sound, "start_time"), 0, 1e-3);
  EXPECT_NEAR(number(video, "duration"), 13 * frame, 1e-3);
  EXPECT_LE(std::abs(number(sound, "duration") - number(video, "duration")), frame);

  // The sound by itself lasts as long as the pictures, to the sample.
  const Json wav = probe(file("clip.wav"));
  const Json& alone = wav.at("streams").at(size_t{0});
  EXPECT_EQ(alone.at("codec_name").as_string(), "pcm_s16le");
  EXPECT_EQ(alone.at("channels").as_int(), 2);
  EXPECT_EQ(alone.at("duration_ts").as_int(), std::llround(13 / 23.976 * 48000));
}

// Every frame decodes, and none is late: the times are those of the rate.
TEST_F(Player, ShowsEveryFrameAtItsTime) {
  ASSERT_EQ(
      generate({"--num-frames", "9", "--fps", "10", "--output", file("clip.mp4").string()}).status,
      0);
  const e2e::Outcome outcome =
      e2e::Process({"-v", "error", "-select_streams", "v", "-show_entries", "frame=pts_time", "-of",
                    "json", file("clip.mp4").string()},
                   "ffprobe")
          .finish();
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const Json shown = Json::parse(outcome.out, "ffprobe");
  const auto& frames = shown.at("frames").items();
  ASSERT_EQ(frames.size(), 9u);
  for (size_t t = 0; t < 9; ++t) EXPECT_NEAR(number(frames[t], "pts_time"), 0.1 * double(t), 1e-4);
}

TEST_F(Player, SoundHasAPlaceToGo) {
  const auto refused = [&](const std::vector<std::string>& arguments, const char* says) {
    const e2e::Outcome outcome = generate(arguments);
    EXPECT_EQ(outcome.status, 2);
    EXPECT_NE(outcome.err.find(says), std::string::npos) << outcome.err;
    EXPECT_TRUE(fs::is_empty(scratch_.path()));
  };
  refused({"--num-frames", "1", "--enable-sound", "--output", file("x.png").string()},
          "a still image holds no sound");
  refused({"--num-frames", "5", "--output", file("x.mp4").string(), "--save-sound",
           file("x.wav").string()},
          "no sound is made");
  // B91: a rate that the container's sound cannot have is told before anything is generated.
  const char* config = "sound_tokenizer/config.json";
  model_.write(config, Json::load(model_.path() / config).set("sampling_rate", 480).dump());
  refused({"--num-frames", "5", "--enable-sound", "--output", file("x.mp4").string()},
          "480 samples per second");
}

}  // namespace
}  // namespace orrery
