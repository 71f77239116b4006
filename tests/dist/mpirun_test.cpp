// The program under mpirun: processes as ranks.
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <thread>

#include "e2e/process.h"
#include "golden/golden.h"
#include "io/safetensors.h"
#include "orrery/output.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

using e2e::Outcome;
using e2e::Process;

std::string find_mpirun() {
  std::stringstream path(std::getenv("PATH"));
  for (std::string folder; std::getline(path, folder, ':');) {
    if (std::filesystem::exists(folder + "/mpirun")) return folder + "/mpirun";
  }
  return "";
}

using Words = std::vector<std::string>;

Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

class Mpirun : public testing::Test {
 protected:
  void SetUp() override {
    mpirun_ = find_mpirun();
    if (mpirun_.empty()) GTEST_SKIP() << "no mpirun in PATH";
    // A job that hangs is a failure of its own.
    launch_ = {"60", mpirun_, "--oversubscribe", "--allow-run-as-root"};
  }
  std::string file(const std::string& name) const { return (scratch_.path() / name).string(); }
  Words clip(const std::string& output) const {
    return {e2e::binary(),
            "generate",
            "--model",
            e2e::pico(),
            "--prompt",
            "A small red circle moves left.",
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
            "--threads",
            "1",
            "--output",
            file(output)};
  }
  Outcome run(int ranks, const Words& command) const {
    return Process(job(ranks, command), "timeout").finish();
  }
  static Outcome alone(const Words& command) {
    return Process({command.begin() + 1, command.end()}).finish();
  }
  Words job(int ranks, const Words& command) const {
    return launch_ + Words{"-np", std::to_string(ranks)} + command;
  }
  std::vector<float> latents(const std::string& name) const {
    return golden::Tensors(scratch_.path() / name).floats("latents");
  }

  ScratchFolder scratch_;
  std::string mpirun_;
  Words launch_;
};

// cfg runs what one rank runs. (The metadata of the clips name the ranks.)
TEST_F(Mpirun, GuidanceParallelGivesTheBytesOfOneRank) {
  ASSERT_EQ(alone(clip("one.mp4") + Words{"--save-latents", file("one.safetensors")}).status, 0);
  const Outcome outcome = run(
      2, clip("many.mp4") + Words{"--cfg-degree", "2", "--save-latents", file("many.safetensors")});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(outcome.out, file("many.mp4") + "\n") << "rank 0 alone speaks";
  EXPECT_EQ(latents("many.safetensors"), latents("one.safetensors"));
}

// The same ranks as processes and as threads: the same bytes, sums of tp being added up in rank
// order by both. One rank's differ by rounding only (bound as in engine_mesh_test.cpp).
TEST_F(Mpirun, GivesTheBytesOfThreadsAndOneRankWithinRounding) {
  const auto saved = [&](const std::string& name) { return Words{"--save-latents", file(name)}; };
  ASSERT_EQ(alone(clip("one.mp4") + saved("one.st")).status, 0);
  const struct {
    int ranks;
    Words degrees;
  } kJobs[]{{2, {"--cp-degree", "2"}},
            {4, {"--cp-degree", "2", "--cfg-degree", "2"}},
            {4, {"--cp-degree", "4"}},
            {4, {"--tp-degree", "2", "--cp-degree", "2"}}};
  for (const auto& job : kJobs) {
    ASSERT_EQ(alone(clip("threads.mp4") + job.degrees + saved("threads.st")).status, 0);
    const Outcome outcome = run(job.ranks, clip("many.mp4") + job.degrees + saved("many.st"));
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, file("many.mp4") + "\n") << "rank 0 alone speaks";
    EXPECT_EQ(ScratchFolder::read(file("many.mp4")), ScratchFolder::read(file("threads.mp4")))
        << job.degrees[0];
    EXPECT_EQ(latents("many.st"), latents("threads.st")) << job.degrees[0];
    EXPECT_LT(golden::relative_error(latents("many.st"), latents("one.st")),
              5 * 2 * 4 * 2 * 8 * std::sqrt(768.0) * 0x1p-24);
  }
}

TEST_F(Mpirun, RefusesBeforeItStarts) {
  const struct {
    Words command;
    const char* says;
  } kCases[]{
      {clip("x.mp4"), "tp 1 x cp 1 x cfg 1 needs 1 ranks, but 2 run"},
      {clip("x.mp4") + Words{"--cp-degree", "4"}, "needs 4 ranks, but 2 run"},
      {clip("x.mp4") + Words{"--tp-degree", "3"}, "degrees that do: 1, 2"},
      {clip("x.mp4") + Words{"--cp-degree", "two"}, "--cp-degree"},
      {clip("no/folder/x.mp4") + Words{"--cp-degree", "2"}, "does not exist"},
  };
  for (const auto& refused : kCases) {
    const Outcome outcome = run(2, refused.command);
    EXPECT_EQ(outcome.status, 2) << outcome.err;
    const size_t first = outcome.err.find("orrery: ");
    ASSERT_NE(first, std::string::npos) << outcome.err;
    EXPECT_NE(outcome.err.find(refused.says), std::string::npos) << outcome.err;
    EXPECT_EQ(outcome.err.find("orrery: ", first + 1), std::string::npos)
        << "said once: " << outcome.err;
  }
  EXPECT_EQ(scratch_.file_count(), 0);
}

TEST_F(Mpirun, RanksWithDifferentRequestsAreTold) {
  const Words other = clip("x.mp4") + Words{"--cp-degree", "2"};
  Words changed = other;
  for (size_t i = 0; i < changed.size(); ++i) {
    if (changed[i] == "--seed") changed[i + 1] = "8";
  }
  // Other flags; the same flags, but another strategy in the environment.
  const Words by_flag = job(1, other) + Words{":", "-np", "1"} + changed;
  const Words by_environment =
      job(1, other) + Words{":", "-np", "1", "-x", "ORRERY_ATTENTION=dense"} + other;
  for (const Words& command : {by_flag, by_environment}) {
    const Outcome outcome = Process(command, "timeout").finish();
    EXPECT_EQ(outcome.status, 2) << outcome.err;
    EXPECT_NE(outcome.err.find("rank 1 was given another request than rank 0"), std::string::npos)
        << outcome.err;
  }
  EXPECT_EQ(scratch_.file_count(), 0);
}

// A rank that fails on its own (rank 0 asks the guardrail) while the other waits for it.
TEST_F(Mpirun, AFailingRankEndsAllWithItsMessage) {
  const auto start = std::chrono::steady_clock::now();
  const Outcome outcome =
      run(2, clip("x.mp4") + Words{"--cp-degree", "2", "--guardrail", "exit 7"});
  EXPECT_EQ(outcome.status, 4) << outcome.err;
  EXPECT_NE(outcome.err.find("status 7"), std::string::npos) << outcome.err;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  EXPECT_EQ(scratch_.file_count(), 0);
}

// Processes whose parent is `pid`.
std::vector<pid_t> children_of(pid_t pid) {
  std::ifstream list("/proc/" + std::to_string(pid) + "/task/" + std::to_string(pid) + "/children");
  std::vector<pid_t> children;
  for (pid_t child; list >> child;) children.push_back(child);
  return children;
}

// The ranks that timeout's mpirun started (which may run helpers too).
std::vector<pid_t> ranks_of(const Process& process) {
  std::vector<pid_t> ranks;
  for (pid_t mpirun : children_of(process.pid())) {
    for (pid_t child : children_of(mpirun)) {
      std::ifstream name("/proc/" + std::to_string(child) + "/comm");
      std::string comm;
      if (name >> comm && comm == "orrery") ranks.push_back(child);
    }
  }
  return ranks;
}

// Faults, second list, C9: every signal to any rank ends the job. A rank that is killed cannot
// remove its temporary file: the next output in the folder does.
TEST_F(Mpirun, ASignalToOneRankEndsAll) {
  Words command = clip("x.mp4") + Words{"--cp-degree", "2"};
  for (size_t i = 0; i < command.size(); ++i) {
    if (command[i] == "--num-inference-steps") command[i + 1] = "900";
  }
  for (const int signal : {SIGKILL, SIGTERM, SIGINT, SIGHUP}) {
    Process process(job(2, command), "timeout");
    process.wait_for("prompt: 1/1");
    const std::vector<pid_t> ranks = ranks_of(process);
    ASSERT_EQ(ranks.size(), 2u);
    const auto start = std::chrono::steady_clock::now();
    kill(ranks[1], signal);
    const Outcome outcome = process.finish();
    EXPECT_NE(outcome.status, 0) << signal;
    EXPECT_NE(outcome.status, 124) << "the job had to be stopped from outside: " << signal;
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20)) << signal;
    EXPECT_FALSE(std::filesystem::exists(scratch_.path() / "x.mp4")) << signal;
    // A rank may outlive mpirun for a moment; what it left goes with the next output after its end.
    for (;;) {
      const OutputFile next(scratch_.path() / "next.mp4");
      if (scratch_.file_count() == 1) break;
      ASSERT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60)) << signal;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }
}

}  // namespace
}  // namespace orrery
