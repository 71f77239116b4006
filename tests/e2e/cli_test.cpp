// The program as a user meets it: what it makes, what it refuses, how it stops.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>

#include "base/json.h"
#include "io/safetensors.h"
#include "io/video.h"
#include "process.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

namespace fs = std::filesystem;

std::string read_bytes(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<std::string> small_clip(const fs::path& output) {
  return {"generate",
          "--model",
          e2e::pico(),
          "--prompt",
          "A small red circle moves left on a black background.",
          "--height",
          "64",
          "--width",
          "96",
          "--num-frames",
          "5",
          "--num-inference-steps",
          "2",
          "--guidance-scale",
          "3",
          "--seed",
          "7",
          "--output",
          output.string()};
}

std::vector<std::string> with(std::vector<std::string> arguments,
                              const std::vector<std::string>& more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

class Cli : public testing::Test {
 protected:
  ScratchFolder scratch_;
  fs::path file(const std::string& name) const { return scratch_.path() / name; }
  // Neither the output nor anything half-written is left.
  void expect_nothing_written() const {
    EXPECT_TRUE(fs::is_empty(scratch_.path())) << fs::directory_iterator(scratch_.path())->path();
  }
};

TEST_F(Cli, MakesAVideoWithItsSettingsInside) {
  const e2e::Outcome outcome = e2e::run(
      with(small_clip(file("clip.mp4")), {"--report", file("report.json").string(),
                                          "--save-latents", file("latents.safetensors").string()}));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(outcome.out, file("clip.mp4").string() + "\n");
  const Video video = read_video(file("clip.mp4"));
  EXPECT_EQ(video.frames.size(), 5u);
  EXPECT_EQ(video.height, 64);
  EXPECT_EQ(video.width, 96);
  EXPECT_DOUBLE_EQ(video.fps, 24);
  EXPECT_NE(read_bytes(file("clip.mp4")).find("moves left"), std::string::npos);

  const Json report = Json::load(file("report.json"));
  EXPECT_EQ(report.at("settings").at("seed").as_int(), 7);
  EXPECT_EQ(report.at("step_seconds").items().size(), 2u);
  EXPECT_EQ(report.at("settings").at("scheduler").at("timesteps").items().size(), 2u);
  // 2 branches: 8 layers in 2 steps, and the text tower but for its last layer; every call dense.
  const auto& dispatch = report.at("attention").at("dispatch").items();
  ASSERT_EQ(dispatch.size(), 2u * (8 * 2 + 7));
  for (const Json& call : dispatch) EXPECT_EQ(call.at("implementation").as_string(), "native");
  // Who computed each kind of operation; the VAE attends besides.
  const auto calls_of = [&](const char* op, const char* who) {
    const Json& operation = report.at("operations").at(op);
    EXPECT_EQ(operation.at("implementations").members().size(), 1u) << op;
    const int64_t calls = operation.at("implementations").at(who).at("calls").as_int();
    EXPECT_EQ(operation.at("calls").as_int(), calls) << op;
    return calls;
  };
  EXPECT_GT(calls_of("linear", "onednn"), 0);
  EXPECT_GT(calls_of("conv3d", "onednn"), 0);
  EXPECT_GT(calls_of("attention", "native"), static_cast<int64_t>(dispatch.size()));
  const Safetensors latents = Safetensors::open_file(file("latents.safetensors"));
  EXPECT_EQ(latents.view("latents").shape, (Shape{1, 16, 2, 4, 6}));
}

// B84: same build, seed and settings, other process and thread count: same bytes.
TEST_F(Cli, RepeatsItselfByteForByte) {
  ASSERT_EQ(e2e::run(with(small_clip(file("a.mp4")), {"--threads", "1"})).status, 0);
  ASSERT_EQ(e2e::run(with(small_clip(file("b.mp4")), {"--threads", "2"})).status, 0);
  EXPECT_EQ(read_bytes(file("a.mp4")), read_bytes(file("b.mp4")));
}

TEST_F(Cli, ContinuesFromGivenNoise) {
  // The seed's own noise, given as a file, makes the same clip.
  ASSERT_EQ(e2e::run(small_clip(file("a.mp4"))).status, 0);
  const e2e::Outcome wrong = e2e::run(
      with(small_clip(file("b.mp4")), {"--latents", file("missing.safetensors").string()}));
  EXPECT_EQ(wrong.status, 2);
  EXPECT_NE(wrong.err.find("missing.safetensors"), std::string::npos) << wrong.err;
}

struct Refusal {
  const char* name;
  std::vector<std::string> arguments;
  const char* says;  // part of the sentence
};

class CliRefuses : public Cli, public testing::WithParamInterface<Refusal> {};

TEST_P(CliRefuses, WithASentenceAndStatus2) {
  const Refusal& refusal = GetParam();
  std::vector<std::string> arguments{"generate", "--model", e2e::pico(), "--output",
                                     file("x.mp4").string()};
  bool has_prompt = false;
  for (size_t i = 0; i < refusal.arguments.size(); ++i) {
    const std::string& argument = refusal.arguments[i];
    has_prompt |= argument == "--prompt";
    // A later flag replaces the default given here.
    if ((argument == "--model" || argument == "--output") && i + 1 < refusal.arguments.size()) {
      const auto at = std::find(arguments.begin(), arguments.end(), argument);
      *(at + 1) = argument == "--output" ? file(refusal.arguments[i + 1]).string()
                                         : refusal.arguments[i + 1];
      ++i;
      continue;
    }
    arguments.push_back(argument);
  }
  if (!has_prompt) arguments = with(arguments, {"--prompt", "x"});
  const e2e::Outcome outcome = e2e::run(arguments);
  EXPECT_EQ(outcome.status, 2) << outcome.err;
  EXPECT_NE(outcome.err.find(refusal.says), std::string::npos) << outcome.err;
  expect_nothing_written();
}

const std::vector<Refusal> kRefusals{
    {"HeightNotAMultiple", {"--height", "719"}, "the nearest is 720"},
    {"WidthNotAMultiple", {"--width", "1281"}, "the nearest is 1280"},
    {"TinyWidth", {"--width", "8"}, "the nearest is 16"},
    {"ZeroHeight", {"--height", "0"}, "--height must be at least 1"},
    {"HugeWidth", {"--height", "16", "--width", "100000"}, "the limit is 16384"},
    {"ZeroFrames", {"--num-frames", "0"}, "--num-frames must be at least 1"},
    {"NegativeFrames", {"--num-frames", "-1"}, "--num-frames must be at least 1"},
    {"ZeroSteps", {"--num-inference-steps", "0"}, "--num-inference-steps must be at least 1"},
    {"ZeroFps", {"--fps", "0"}, "fps must be a positive number"},
    {"NegativeFps", {"--fps", "-5"}, "fps must be a positive number"},
    {"NanGuidance",
     {"--guidance-scale", "nan"},
     "--guidance-scale must be a finite decimal number"},
    // B86
    {"UnknownFlag",
     {"--guidence-scale", "3"},
     "--guidence-scale is not known; did you mean --guidance-scale?"},
    {"UnknownFlagWithValue", {"--num-inference-step=3"}, "did you mean --num-inference-steps?"},
    {"StepsNotWhole", {"--num-inference-steps", "35.5"}, "--num-inference-steps"},
    {"UnknownModel", {"--model", "/nonexistent/model"}, "/nonexistent/model"},
    {"EmptyPrompt", {"--prompt", " "}, "the prompt is empty"},
    {"LongPrompt", {"--prompt", std::string(30000, '7')}, "4096"},
    {"UnknownExtension", {"--output", "x.avi2"}, ".avi2"},
    {"ImageForVideo", {"--output", "x.png"}, "still image"},
    {"SoundWithoutHead", {"--enable-sound"}, "makes no sound"},
    {"UnknownDevice", {"--device", "tpu"}, "device \"tpu\" is not known"},
    {"CudaAbsent",
     {"--device", "cuda", "--height", "64", "--width", "64", "--num-frames", "1", "--output",
      "x.png"},
     "CUDA"},
    {"BadKarras", {"--karras", "maybe"}, "--karras"},
    // Numbers are decimal and in range.
    {"SeedInHex", {"--seed", "0x10"}, "whole decimal number"},
    {"SeedTooLarge", {"--seed", "18446744073709551616"}, "2^64 - 1"},
    {"FramesBeyond64Bits", {"--num-frames", "99999999999999999999"}, "--num-frames"},
    {"FpsWithUnit", {"--fps", "24fps"}, "finite decimal number"},
    // Fields of another mode.
    {"StrayActions", {"--action-path", "nofile.json"}, "--action-path needs --action-mode"},
    {"StrayDomain", {"--domain-name", "pusht"}, "--domain-name needs --action-mode"},
    {"StrayView", {"--view-point", "wrist_view"}, "--view-point needs --action-mode"},
    {"StrayTier", {"--resolution-tier", "256"}, "--resolution-tier needs --action-mode"},
    {"StrayFit", {"--video-fit", "cover"}, "--video-fit needs --video-path"},
    {"StrayKeep", {"--condition-video-keep", "first"}, "needs --video-path"},
    {"StrayIndexes", {"--condition-frame-indexes-vision", "0"}, "needs --video-path"},
    {"UnknownView", {"--action-mode", "policy", "--view-point", "nose"}, "wrist_view"},
    {"UnknownShortWord", {"--cfg", "3"}, "did you mean --cfg-scale?"},
    {"PartOfAFlag", {"--negative", "x"}, "did you mean --negative-prompt?"},
    {"UnknownDomain",
     {"--action-mode", "policy", "--domain-name", "nobody", "--resolution-tier", "256", "--image",
      e2e::source_folder() + "/tests/data/absent.png"},
     "absent.png"},
};
INSTANTIATE_TEST_SUITE_P(Each, CliRefuses, testing::ValuesIn(kRefusals),
                         [](const auto& test) { return test.param.name; });

// A model folder of links, one file of which is replaced.
class DamagedModel : public Cli {
 protected:
  fs::path damaged(const std::string& victim) {
    const fs::path model = fs::temp_directory_path() / concat_name(victim);
    fs::remove_all(model);
    for (const auto& entry : fs::recursive_directory_iterator(e2e::pico())) {
      const fs::path to = model / fs::relative(entry.path(), e2e::pico());
      if (entry.is_directory()) {
        fs::create_directories(to);
      } else if (fs::relative(entry.path(), e2e::pico()) == victim) {
        fs::create_directories(to.parent_path());
        fs::copy_file(entry.path(), to);
      } else {
        fs::create_directories(to.parent_path());
        fs::create_symlink(entry.path(), to);
      }
    }
    models_.push_back(model);
    return model;
  }
  ~DamagedModel() override {
    for (const fs::path& model : models_) fs::remove_all(model);
  }
  e2e::Outcome generate(const fs::path& model) const {
    std::vector<std::string> arguments = small_clip(file("x.mp4"));
    arguments[2] = model.string();
    return e2e::run(arguments);
  }

 private:
  static std::string concat_name(std::string victim) {
    std::replace(victim.begin(), victim.end(), '/', '_');
    return "orrery_damaged_" + std::to_string(getpid()) + "_" + victim;
  }
  std::vector<fs::path> models_;
};

std::string first_shard(const std::string& component) {
  for (const auto& entry : fs::directory_iterator(e2e::pico() + "/" + component)) {
    const std::string name = entry.path().filename().string();
    if (name.find("-00001-of-") != std::string::npos) return component + "/" + name;
  }
  return {};
}

TEST_F(DamagedModel, TruncatedShardIsNamed) {
  const std::string victim = first_shard("transformer");
  const fs::path model = damaged(victim);
  fs::resize_file(model / victim, fs::file_size(model / victim) / 2);
  const e2e::Outcome outcome = generate(model);
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find(fs::path(victim).filename().string()), std::string::npos)
      << outcome.err;
  expect_nothing_written();
}

// B14: one NaN in the weights is an error that names the tensor, never a black video.
TEST_F(DamagedModel, NonFiniteWeightIsNamed) {
  for (const char* component : {"transformer", "vae"}) {
    const std::string victim = first_shard(component);
    const fs::path model = damaged(victim);
    std::string name;
    size_t offset = 0;
    {
      const Safetensors shard = Safetensors::open_file(model / victim);
      const std::string bytes = read_bytes(model / victim);
      for (const StoredTensor& tensor : shard.tensors()) {
        if (tensor.stored_type != "BF16" || tensor.bytes < 64) continue;
        name = tensor.name;
        offset = bytes.find(std::string(reinterpret_cast<const char*>(tensor.data), 64));
        break;
      }
    }
    ASSERT_FALSE(name.empty());
    std::fstream out(model / victim, std::ios::in | std::ios::out | std::ios::binary);
    const uint16_t nan = 0x7fc0;
    out.seekp(static_cast<std::streamoff>(offset));
    out.write(reinterpret_cast<const char*>(&nan), 2);
    out.close();
    const e2e::Outcome outcome = generate(model);
    EXPECT_EQ(outcome.status, 2) << outcome.err;
    EXPECT_NE(outcome.err.find(name), std::string::npos) << outcome.err;
    expect_nothing_written();
  }
}

TEST_F(Cli, StopsWithinAStepAndLeavesNothing) {
  std::vector<std::string> arguments = small_clip(file("x.mp4"));
  arguments = with(arguments, {"--height", "128", "--width", "128"});
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--num-inference-steps") arguments[i + 1] = "500";
    if (arguments[i] == "--height" && i < 10)
      arguments.erase(arguments.begin() + static_cast<long>(i),
                      arguments.begin() + static_cast<long>(i) + 4);
  }
  e2e::Process process(arguments);
  process.wait_for("prompt: 1/1");
  process.signal(SIGINT);
  const e2e::Outcome outcome = process.finish();
  EXPECT_EQ(outcome.status, 130) << outcome.err;
  EXPECT_NE(outcome.err.find("stopped during"), std::string::npos) << outcome.err;
  expect_nothing_written();
}

TEST_F(Cli, TokenizesAndBack) {
  const e2e::Outcome ids = e2e::run({"tokenize", e2e::pico(), "A small red circle."});
  ASSERT_EQ(ids.status, 0) << ids.err;
  std::vector<std::string> arguments{"tokenize", e2e::pico(), "--decode"};
  std::string word;
  for (char c : ids.out) {
    if (c == ' ' || c == '\n') {
      if (!word.empty()) arguments.push_back(word);
      word.clear();
    } else {
      word += c;
    }
  }
  EXPECT_EQ(e2e::run(arguments).out, "A small red circle.\n");
}

TEST_F(Cli, InspectsAndPlans) {
  const e2e::Outcome inspected = e2e::run({"inspect", e2e::pico(), "--json"});
  ASSERT_EQ(inspected.status, 0) << inspected.err;
  const Json info = Json::parse(inspected.out, "inspect");
  EXPECT_EQ(info.at("components").at("transformer").at("num_hidden_layers").as_int(), 8);
  const e2e::Outcome planned = e2e::run(
      {"plan", e2e::pico(), "--height", "256", "--width", "256", "--num-frames", "33", "--json"});
  ASSERT_EQ(planned.status, 0) << planned.err;
  EXPECT_EQ(Json::parse(planned.out, "plan").at("generation_tokens").as_int(), 9 * 8 * 8);
}

// Where there is nothing to offload, the flag is no error.
TEST_F(Cli, OffloadSaysThatTheCpuHasNothingToDo) {
  const e2e::Outcome outcome = e2e::run(with(small_clip(file("clip.mp4")), {"--offload", "layer"}));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.err.find("offload layer has nothing to do on the CPU"), std::string::npos)
      << outcome.err;
  const e2e::Outcome wrong = e2e::run(with(small_clip(file("b.mp4")), {"--offload", "disk"}));
  EXPECT_EQ(wrong.status, 2);
}

// One object a line, the same keys in each.
TEST_F(Cli, BenchPrintsTheSameKeys) {
  const e2e::Outcome outcome =
      e2e::run({"bench", "attention", "--query-tokens", "100", "--key-tokens", "130", "--heads",
                "4", "--kv-heads", "2", "--head-dim", "16"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const std::vector<std::string> keys{"bench", "case",       "device", "driver", "commit",
                                      "date",  "command",    "value",  "unit",   "floor",
                                      "peer",  "peer_value", "ratio"};
  std::istringstream lines(outcome.out);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    const Json object = Json::parse(line, "line");
    std::vector<std::string> found;
    for (const auto& [key, value] : object.members()) found.push_back(key);
    EXPECT_EQ(found, keys);
    EXPECT_GT(object.at("value").as_double(), 0);
  }
  EXPECT_EQ(count, 5);  // dense and block-sparse by two implementations each, and the selection
  const e2e::Outcome nothing = e2e::run({"bench", "load"});
  EXPECT_EQ(nothing.status, 2);
  EXPECT_NE(nothing.err.find("--model"), std::string::npos) << nothing.err;
}

}  // namespace
}  // namespace orrery
