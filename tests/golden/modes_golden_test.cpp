// Whole runs of the program in every mode, held against the public pipeline: each case.json has the
// arguments of `orrery generate`, which runs in the case's folder. ORRERY_GOLDEN_MODES_DIR names
// the folder; without it the small part in the repository is run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "base/json.h"
#include "e2e/process.h"
#include "golden/golden.h"
#include "io/image.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

namespace fs = std::filesystem;

// Order of sums; another implementation agrees to 3.4e-6. The smallest mistake that was tried, a
// weight left out, makes 2e-2.
constexpr double kTolerance = 1e-5;
// A 16-bit sample, rounded.
constexpr double kSample = 1.01 / 32768;
// One rounding tie in a thousand values may fall to the other side.
constexpr double kFramesOff = 1e-3;
// A run in bf16 is as far from the fp32 one as the reference's, within the noise of both.
constexpr double kBf16Gap = 2, kBf16Apart = 2.5;

using golden::modes_directory;

// "family/case" of the runs of one family; of those that have no suite of their own for "".
std::vector<std::string> runs(const std::string& wanted) {
  std::vector<std::string> names;
  std::error_code none;
  for (const auto& family : fs::directory_iterator(modes_directory(), none)) {
    const std::string name = family.path().filename().string();
    const bool is_own = name == "transfer" || name == "omni";
    if (!fs::exists(family.path() / "model") || (is_own ? name : "") != wanted) continue;
    for (const auto& run : fs::directory_iterator(family.path())) {
      if (fs::exists(run.path() / "case.json"))
        names.push_back(name + "/" + run.path().filename().string());
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

class ModesGolden : public testing::TestWithParam<std::string> {
 protected:
  fs::path folder_ = modes_directory() / GetParam();
  Json info_ = Json::load(folder_ / "case.json");
  golden::Tensors want_{folder_ / "tensors.safetensors"};
  ScratchFolder scratch_;
  bool is_picture_ = want_.has("frames") && want_.shape("frames")[0] == 1;

  std::string file(const std::string& name) const { return (scratch_.path() / name).string(); }

  void run(const std::string& dtype) {
    std::vector<std::string> arguments{
        "-C",       folder_.string(), fs::absolute(e2e::binary()).string(),
        "generate", "--model",        (folder_.parent_path() / "model").string()};
    for (const Json& argument : info_.at("cli").items()) arguments.push_back(argument.as_string());
    if (want_.has("action"))
      arguments.insert(arguments.end(), {"--save-action", file("a.safetensors")});
    if (want_.has("sound")) arguments.insert(arguments.end(), {"--save-sound", file("s.wav")});
    arguments.insert(arguments.end(),
                     {"--dtype", dtype, "--noise-dtype", "fp32", "--quiet", "--save-latents",
                      file("z.safetensors"), "--output", file(is_picture_ ? "o.png" : "o.mp4")});
    const e2e::Outcome outcome = e2e::Process(arguments, "env").finish();
    ASSERT_EQ(outcome.status, 0) << outcome.err;
  }

  std::vector<float> only_tensor(const std::string& name) const {
    const Safetensors saved = Safetensors::open_file(file(name));
    return golden::Tensors(file(name)).floats(saved.tensors().front().name);
  }
  double apart(const std::string& got, const std::string& want) const {
    return golden::relative_error(only_tensor(got), want_.floats(want));
  }

  // Planar in the goldens, interleaved 16-bit samples behind the 44 bytes of a WAV header.
  void expect_sound() const {
    const std::vector<float> want = want_.floats("sound");
    const auto channels =
        static_cast<size_t>(want_.shape("sound")[want_.shape("sound").rank() - 2]);
    const std::string wav = ScratchFolder::read(scratch_.path() / "s.wav");
    constexpr size_t kHeader = 44;
    ASSERT_EQ(wav.size(), kHeader + 2 * want.size());
    const size_t samples = want.size() / channels;
    for (size_t i = 0; i < want.size(); ++i) {
      const size_t at = kHeader + 2 * (i % samples * channels + i / samples);
      const int value = static_cast<int16_t>(static_cast<uint8_t>(wav[at]) |
                                             static_cast<uint8_t>(wav[at + 1]) << 8);
      ASSERT_NEAR(value / 32767.0, std::clamp(double(want[i]), -1.0, 1.0), kSample) << i;
    }
  }

  void expect_picture() const {
    const Image got = read_image(file("o.png"));
    const std::vector<uint8_t> want = want_.bytes("frames");
    ASSERT_EQ(got.rgb.size(), want.size());
    size_t off = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_LE(std::abs(int(got.rgb[i]) - int(want[i])), 1) << i;
      off += got.rgb[i] != want[i];
    }
    EXPECT_LE(double(off), std::max(2.0, kFramesOff * double(want.size())));
  }
};

TEST_P(ModesGolden, WholeRun) {
  run("fp32");
  if (HasFatalFailure()) return;
  EXPECT_LT(apart("z.safetensors", "latents"), kTolerance);
  if (want_.has("action")) {
    EXPECT_LT(apart("a.safetensors", "action"), kTolerance);
  }
  if (want_.has("sound")) expect_sound();
  if (is_picture_) expect_picture();
  if (!want_.has("latents_bf16")) return;
  run("bf16");
  if (HasFatalFailure()) return;
  const double gap = info_.at("reference_gap").as_double();
  EXPECT_LT(apart("z.safetensors", "latents"), kBf16Gap * gap);
  EXPECT_LT(apart("z.safetensors", "latents_bf16"), kBf16Apart * gap);
}

std::string test_name(const testing::TestParamInfo<std::string>& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '/', '_');
  return name;
}

// Suites of their own, which may run beside each other.
INSTANTIATE_TEST_SUITE_P(Transfer, ModesGolden, testing::ValuesIn(runs("transfer")), test_name);
INSTANTIATE_TEST_SUITE_P(Omni, ModesGolden, testing::ValuesIn(runs("omni")), test_name);
INSTANTIATE_TEST_SUITE_P(Others, ModesGolden, testing::ValuesIn(runs("")), test_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ModesGolden);

}  // namespace
}  // namespace orrery
