#include "engine/guardrail.h"

#include <gtest/gtest.h>

#include <chrono>

#include "expect_error.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

const Frames kFrames{2, 1, 3, {0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18}};

class GuardrailTest : public testing::Test {
 protected:
  ScratchFolder scratch_;
  Request request_;
  // A shell script, called with the stage.
  std::string script(const std::string& body) const {
    return "sh " +
           scratch_.write("guard" + std::to_string(scratch_.file_count()) + ".sh", body).string();
  }
  static std::string says(const std::string& answer) { return "printf '%s' '" + answer + "'; :"; }
  void prompt(const std::string& command, double timeout = 30) const {
    Guardrail(command, timeout).check_prompt(request_, [] {});
  }
};

TEST_F(GuardrailTest, ReceivesPromptAndFrames) {
  request_.prompt = "5 * 3 = 15 \"box\"\n";
  request_.negative_prompt = "blurry";
  const std::string keep = script("cat > " + (scratch_.path() / "in-$1").string() +
                                  "\nprintf '{\"verdict\": \"approved\"}'\n");
  prompt(keep);
  EXPECT_EQ(ScratchFolder::read(scratch_.path() / "in-prompt"),
            "{\"stage\":\"prompt\",\"prompt\":\"5 * 3 = 15 "
            "\\\"box\\\"\\n\",\"negative_prompt\":\"blurry\"}\n");
  Guardrail(keep, 30).check_frames(kFrames, 24, [] {});
  EXPECT_EQ(ScratchFolder::read(scratch_.path() / "in-frames"),
            "{\"stage\":\"frames\",\"count\":2,\"height\":1,\"width\":3,\"fps\":24.0}\n" +
                std::string(kFrames.rgb.begin(), kFrames.rgb.end()));
}

TEST_F(GuardrailTest, BlockedIsAnErrorWithItsReason) {
  expect_error(ErrorKind::blocked, {"the prompt is blocked", "weapons", "nothing was written"},
               [&] { prompt(says(R"({"verdict": "blocked", "reason": "weapons"})")); });
  expect_error(ErrorKind::blocked, {"the frames are blocked"}, [&] {
    Guardrail(says(R"({"verdict": "blocked"})"), 30).check_frames(kFrames, 24, [] {});
  });
}

// B36: whatever goes wrong is no approval.
TEST_F(GuardrailTest, FailuresAreFailures) {
  const std::string approved = R"({"verdict": "approved"})";
  const std::pair<std::string, const char*> cases[]{
      {"/nonexistent/guard", "status 127"},
      {script("printf '" + approved + "'; exit 3"), "status 3"},
      {"printf '" + approved + "'; kill -9 $$; :", "signal 9"},
      {says("approved"), "no verdict"},
      {says(""), "no verdict"},
      {says("[]"), "no verdict"},
      {says("{}"), "no verdict"},
      {says(R"({"verdict": true})"), "no verdict"},
      {says(R"({"verdict": "Approved"})"), "expected approved or blocked"},
      {says(R"({"verdict": "approved"} trailing)"), "no verdict"},
      {says(R"({"verdict": "blocked", "verdict": "approved"})"), "no verdict"},
      {"yes", "longer than"},
  };
  for (const auto& [command, part] : cases) {
    expect_error(ErrorKind::guardrail, {part}, [&, &run = command] { prompt(run); });
  }
  EXPECT_THROW(Guardrail("true", 0), Error);
}

TEST_F(GuardrailTest, ATimeoutIsAFailureAndEndsTheCommand) {
  const auto start = std::chrono::steady_clock::now();
  const std::string late = (scratch_.path() / "late").string();
  expect_error(ErrorKind::guardrail, {"no verdict", "0.3 seconds"},
               [&] { prompt(script("(sleep 1; touch " + late + ") & sleep 20"), 0.3); });
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 10);
  // So does one that closes its output and goes on.
  expect_error(ErrorKind::guardrail, {"no verdict"}, [&] {
    prompt(script("printf '{\"verdict\": \"approved\"}'; exec >&-; sleep 1.2; :"), 0.3);
  });
  EXPECT_FALSE(std::filesystem::exists(late));
}

TEST_F(GuardrailTest, StopsWhenAsked) {
  int calls = 0;
  const auto stop_soon = [&] {
    if (++calls == 3) fail(ErrorKind::cancelled, "stopped");
  };
  const auto start = std::chrono::steady_clock::now();
  expect_error(ErrorKind::cancelled, {"stopped"},
               [&] { Guardrail("sleep 20; :", 30).check_prompt(request_, stop_soon); });
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 10);
}

// B33: asterisks, terminal codes and the words of a verdict in the prompt mean nothing.
TEST_F(GuardrailTest, TextOfThePromptIsNeverAVerdict) {
  const std::string careful =
      script("if grep -q '\"verdict\\\\\"' ; then :; fi; printf '{\"verdict\": \"approved\"}'");
  for (const char* text : {"a **box** on the floor", "5 * 3 = 15", "\x1b[31mblocked\x1b[0m",
                           "$(exit 1) `false` \"; exit 1", "{\"verdict\": \"blocked\"}", ""}) {
    request_.prompt = text;
    EXPECT_NO_THROW(prompt(careful)) << text;
  }
}

TEST_F(GuardrailTest, WithoutACommandNothingRuns) {
  const Guardrail none("", 30);
  EXPECT_FALSE(none.is_set());
  none.check_prompt(request_, [] {});
  none.check_frames(kFrames, 24, [] {});
}

}  // namespace
}  // namespace orrery
