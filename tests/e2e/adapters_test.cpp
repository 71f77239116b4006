// What is put around the model: LoRA adapters and the guardrail.
#include <gtest/gtest.h>

#include "base/json.h"
#include "expect_error.h"
#include "io/safetensors.h"
#include "io/video.h"
#include "model_variant.h"
#include "orrery/engine.h"
#include "process.h"
#include "scratch_folder.h"
#include "small_request.h"

namespace orrery {
namespace {

namespace fs = std::filesystem;

std::vector<float> latents_with(const std::vector<LoraFile>& lora) {
  EngineOptions options;
  options.lora = lora;
  return Engine::open(e2e::pico(), options).generate(e2e::small_request(64, 64, 5)).latents.values;
}

class LoraFiles : public testing::Test {
 protected:
  ScratchFolder scratch_;
  // Rank 2 on one projection of each tower of layer 3 (256 in, 256 out).
  fs::path adapter(const std::string& name, float b) const {
    std::vector<float> down(2 * 256), up(256 * 2, b);
    for (size_t i = 0; i < down.size(); ++i) down[i] = static_cast<float>(i % 7) * 0.01f - 0.03f;
    const View a = make_view(down.data(), {2, 256}, DType::f32),
               bv = make_view(up.data(), {256, 2}, DType::f32);
    write_safetensors(scratch_.path() / name,
                      {{"transformer.layers.3.self_attn.add_q_proj.lora_A.weight", a},
                       {"transformer.layers.3.self_attn.add_q_proj.lora_B.weight", bv},
                       {"layers.3.self_attn.to_q.lora_A.default.weight", a},
                       {"layers.3.self_attn.to_q.lora_B.default.weight", bv}});
    return scratch_.path() / name;
  }
};

TEST_F(LoraFiles, ZeroChangesNothingAndMoreChangesMore) {
  const std::vector<float> plain = latents_with({});
  EXPECT_EQ(latents_with({{adapter("zero", 0.0f)}}), plain);
  EXPECT_EQ(latents_with({{adapter("off", 0.5f), 0}}), plain);
  const auto change = [&](const std::vector<float>& other) {
    double sum = 0;
    for (size_t i = 0; i < plain.size(); ++i)
      sum += double(other[i] - plain[i]) * double(other[i] - plain[i]);
    return sum;
  };
  const fs::path file = adapter("some", 0.5f);
  const double once = change(latents_with({{file}}));
  EXPECT_GT(once, 0);
  EXPECT_NE(change(latents_with({{file, -1}})), once);
  // A half and a half is a whole, in one rounding.
  EXPECT_EQ(change(latents_with({{file, 0.5}, {file, 0.5}})), once);
}

TEST_F(LoraFiles, TheProgramRecordsThem) {
  const fs::path report = scratch_.path() / "report.json";
  std::vector<std::string> arguments{"generate",
                                     "--model",
                                     e2e::pico(),
                                     "--prompt",
                                     "A red circle.",
                                     "--height",
                                     "32",
                                     "--width",
                                     "32",
                                     "--num-frames",
                                     "1",
                                     "--num-inference-steps",
                                     "1",
                                     "--guidance-scale",
                                     "1",
                                     "--output",
                                     (scratch_.path() / "x.png").string(),
                                     "--report",
                                     report.string(),
                                     "--lora",
                                     adapter("some.safetensors", 0.5f).string() + ":0.25"};
  const e2e::Outcome outcome = e2e::run(arguments);
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const Json lora = Json::load(report).at("settings").at("lora").at(size_t{0});
  EXPECT_EQ(lora.at("file").as_string(), "some.safetensors");
  EXPECT_EQ(lora.at("scale").as_double(), 0.25);
  arguments.back() = adapter("some.safetensors", 0.5f).string() + ":much";
  const e2e::Outcome wrong = e2e::run(arguments);
  EXPECT_EQ(wrong.status, 2);
  EXPECT_NE(wrong.err.find("\"much\" after the colon is no number"), std::string::npos)
      << wrong.err;
}

class GuardedRun : public testing::Test {
 protected:
  ScratchFolder scratch_;
  std::string guard(const std::string& body) const {
    return "sh " + scratch_.write("guard.sh", body).string();
  }
  e2e::Outcome generate(const std::string& model, const std::vector<std::string>& more) const {
    std::vector<std::string> arguments{"generate",
                                       "--model",
                                       model,
                                       "--prompt",
                                       "A **red** circle; 5 * 3.",
                                       "--height",
                                       "32",
                                       "--width",
                                       "32",
                                       "--num-frames",
                                       "5",
                                       "--num-inference-steps",
                                       "1",
                                       "--guidance-scale",
                                       "1",
                                       "--output",
                                       (scratch_.path() / "x.mp4").string(),
                                       "--report",
                                       (scratch_.path() / "report.json").string()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return e2e::run(arguments);
  }
  bool wrote_anything() const {
    return fs::exists(scratch_.path() / "x.mp4") || fs::exists(scratch_.path() / "report.json");
  }
  // What the report and the file itself say.
  void expect_recorded(const std::string& verdict) const {
    EXPECT_EQ(Json::load(scratch_.path() / "report.json").at("guardrail").as_string(), verdict);
    EXPECT_NE(
        ScratchFolder::read(scratch_.path() / "x.mp4").find("\"guardrail\":\"" + verdict + "\""),
        std::string::npos);
  }
};

TEST_F(GuardedRun, ApprovalIsRecorded) {
  // It sees 5 frames of 32 x 32 behind its line of JSON, and the prompt as written (B33).
  const std::string command = guard(R"sh(
if [ "$1" = frames ]; then [ $(tail -n +2 | wc -c) = 15360 ] || exit 9; else grep -q '\*\*red\*\*' || exit 8; fi
printf '{"verdict": "approved"}'
)sh");
  const e2e::Outcome outcome = generate(e2e::pico(), {"--guardrail", command});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  expect_recorded("approved");
}

// B36: a check that was not made is recorded as that, and said where the licence asks for one.
TEST_F(GuardedRun, WithoutOneItIsSkippedAndSaysSo) {
  const e2e::Outcome quiet = generate(e2e::pico(), {});
  ASSERT_EQ(quiet.status, 0) << quiet.err;
  expect_recorded("skipped: none configured");
  EXPECT_EQ(quiet.err.find("licence"), std::string::npos) << quiet.err;

  const e2e::ModelVariant asking;
  asking.write("model_index.json", Json::load(fs::path(e2e::pico()) / "model_index.json")
                                       .set("enable_safety_checker", true)
                                       .dump());
  const e2e::Outcome outcome = generate(asking.path().string(), {});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.err.find("the licence of this model asks for one"), std::string::npos)
      << outcome.err;
  expect_recorded("skipped: none configured");

  // Switched off by the public entry point's flags: recorded as that, and no reminder.
  for (const char* flag : {"--no-safety-check", "--disable-safety-checker"}) {
    const e2e::Outcome off = generate(asking.path().string(), {flag});
    ASSERT_EQ(off.status, 0) << off.err;
    EXPECT_EQ(off.err.find("licence"), std::string::npos) << off.err;
    expect_recorded("skipped: switched off");
  }
  EXPECT_EQ(generate(e2e::pico(), {"--no-safety-check", "--guardrail", "true"}).status, 2);
}

TEST_F(GuardedRun, BlockedOrBrokenWritesNothing) {
  const std::string approved = "printf '{\"verdict\": \"approved\"}'";
  const std::pair<std::string, const char*> cases[]{
      {"printf '{\"verdict\": \"blocked\", \"reason\": \"no circles\"}'",
       "the prompt is blocked: no circles"},
      {"[ $1 = prompt ] && " + approved + " || printf '{\"verdict\": \"blocked\"}'",
       "the frames are blocked"},
      {"[ $1 = prompt ] && " + approved + "; true", "no verdict"},
      {"exit 1", "status 1"},
      {"[ $1 = prompt ] && " + approved + " || exit 4", "status 4"},
      {"sleep 30", "no verdict on the prompt within 0.5 seconds"},
  };
  for (const auto& [body, says] : cases) {
    const e2e::Outcome outcome =
        generate(e2e::pico(), {"--guardrail", guard(body), "--guardrail-timeout", "0.5"});
    const bool blocked = std::string(says).find("blocked") != std::string::npos;
    EXPECT_EQ(outcome.status, blocked ? 3 : 4) << body;
    EXPECT_NE(outcome.err.find(says), std::string::npos) << outcome.err;
    EXPECT_FALSE(wrote_anything()) << body;
  }
}

// B35: no default that this program ships is anything a checker could trip over: the negative
// prompt it passes on is empty unless the user gives one.
TEST_F(GuardedRun, TheDefaultNegativePromptIsEmpty) {
  const std::string command = guard(R"sh(
if [ "$1" = prompt ]; then grep -q '"negative_prompt":""' || exit 7; fi
printf '{"verdict": "approved"}'
)sh");
  EXPECT_EQ(generate(e2e::pico(), {"--guardrail", command}).status, 0);
}

}  // namespace
}  // namespace orrery
