// The files of a run: what is refused before the weights are read, and what is left when a run ends
// in another way than it should. Letters and numbers: docs/known-faults.md, second list.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <csignal>
#include <random>
#include <thread>

#include "base/json.h"
#include "model_variant.h"
#include "process.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

class Files : public testing::Test {
 protected:
  ScratchFolder scratch_;
  std::string file(const std::string& name) const { return (scratch_.path() / name).string(); }
  Words still(const std::string& output, const std::string& model = e2e::pico()) const {
    return {"generate",
            "--model",
            model,
            "--prompt",
            "A small red circle.",
            "--height",
            "64",
            "--width",
            "64",
            "--num-frames",
            "1",
            "--seed",
            "1",
            "--output",
            output,
            "--guidance-scale",
            "1",
            "--num-inference-steps",
            "2"};
  }
  Words policy(const std::string& output) const {
    return {"generate",
            "--model",
            e2e::pico(),
            "--action-mode",
            "policy",
            "--domain-name",
            "pusht",
            "--resolution-tier",
            "256",
            "--action-chunk-size",
            "4",
            "--image",
            e2e::source_folder() + "/tests/data/media/upright.png",
            "--num-inference-steps",
            "1",
            "--guidance-scale",
            "1",
            "--prompt",
            "x",
            "--output",
            output};
  }
  // Nothing is left, and no weight was read.
  void refused(const Words& arguments, const Words& says) const {
    const auto before = scratch_.file_count();
    const e2e::Outcome outcome = e2e::run(arguments);
    EXPECT_EQ(outcome.status, 2) << outcome.err;
    for (const std::string& part : says) {
      EXPECT_NE(outcome.err.find(part), std::string::npos) << part << "\n" << outcome.err;
    }
    EXPECT_EQ(outcome.err.find("denoise"), std::string::npos) << outcome.err;
    EXPECT_EQ(scratch_.file_count(), before) << outcome.err;
  }
};

TEST_F(Files, TwoNamesOfOneFile) {  // A2
  refused(still(file("s.png")) + Words{"--report", file("./s.png")},
          {"--report and --output", "same file"});
  scratch_.write("prompt.txt", "a prompt");
  Words words = still(file("s.png")) + Words{"--report", file("prompt.txt")};
  words[3] = "--prompt-file";
  words[4] = file("prompt.txt");
  refused(words, {"--report", "the input of --prompt-file"});
}

TEST_F(Files, WhatCannotBeWritten) {  // A3
  fs::create_directory(file("folder"));
  refused(still(file("s.png")) + Words{"--report", file("folder")}, {"--report", "is a folder"});
  refused(still(file("s.png")) + Words{"--save-latents", "/proc/x"}, {"--save-latents", "/proc/x"});
  refused(still(file("s.png")) + Words{"--save-action", file("a.json")},
          {"--save-action", "no actions are predicted"});
  refused(still(file("s.png")) + Words{"--save-sound", file("a.wav")},
          {"--save-sound", "no sound is made"});
  refused(still("-"), {"--output -"});
}

TEST_F(Files, AFailingReportLeavesThePicture) {  // A3
  const e2e::Outcome outcome = e2e::run(still(file("s.png")) + Words{"--report", "/dev/full"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find("/dev/full"), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("written: " + file("s.png")), std::string::npos) << outcome.err;
  EXPECT_TRUE(fs::exists(file("s.png")));
}

TEST_F(Files, ReportOnStandardOutput) {  // A1
  for (const char* name : {"-", "/dev/stdout"}) {
    const e2e::Outcome outcome = e2e::run(still(file("new/s.png")) + Words{"--report", name});
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const Json report = Json::parse(outcome.out, "report");
    EXPECT_EQ(report.at("files").at("output").as_string(), file("new/s.png"));
    EXPECT_NE(outcome.err.find(file("new/s.png") + "\n"), std::string::npos);
  }
}

TEST_F(Files, PredictedActionsAreKept) {  // A5
  const e2e::Outcome outcome =
      e2e::run(policy(file("p.mp4")) + Words{"--report", file("report.json")});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(outcome.out, file("p.mp4") + "\n" + file("p_action.json") + "\n");
  EXPECT_EQ(Json::load(file("p_action.json")).at("actions").items().size(), 4u);
  EXPECT_EQ(Json::load(file("report.json")).at("files").at("action").as_string(),
            file("p_action.json"));
}

TEST_F(Files, ALimitOnFileSizesIsASentence) {  // A8
  std::string command = "ulimit -f 1; exec \"$@\"";
  Words words{"-c", command, "sh", e2e::binary()};
  const e2e::Outcome outcome = e2e::Process(words + still(file("s.png")), "bash").finish();
  EXPECT_EQ(outcome.status, 2) << outcome.err;
  EXPECT_NE(outcome.err.find("too large"), std::string::npos) << outcome.err;
  EXPECT_TRUE(fs::is_empty(scratch_.path()));
}

// A8: signals at random moments of a run. Nothing but whole files stands under a name, and what a
// killed run leaves is gone after the next.
TEST_F(Files, SignalsAtRandomMoments) {
  std::mt19937 random(7);
  int stopped = 0;
  for (const int signal : {SIGKILL, SIGTERM, SIGKILL, SIGINT, SIGKILL, SIGHUP}) {
    e2e::Process process(still(file("s.png")) + Words{"--num-inference-steps", "40", "--quiet"});
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 800));
    process.signal(signal);
    stopped += process.finish().status != 0;
    if (fs::exists(file("s.png"))) {
      const std::string bytes = ScratchFolder::read(file("s.png"));
      EXPECT_EQ(bytes.substr(1, 3), "PNG");
      EXPECT_NE(bytes.find("IEND"), std::string::npos);
    }
  }
  EXPECT_GT(stopped, 0);
  ASSERT_EQ(e2e::run(still(file("s.png"))).status, 0);
  EXPECT_EQ(scratch_.file_count(), 1);
}

TEST_F(Files, AShardCutShortWhileItIsReadIsNamed) {  // C7
  const e2e::ModelVariant model;
  const fs::path shards = model.path() / "transformer";
  std::string shard;
  for (const auto& entry : fs::directory_iterator(shards)) {
    const std::string name = entry.path().filename().string();
    if (name.find("-00001-of-") != std::string::npos) shard = "transformer/" + name;
  }
  model.write(shard, ScratchFolder::read(model.path() / shard));
  Words words = still(file("s.png"), model.path().string());
  words.back() = "900";
  e2e::Process process(words);
  process.wait_for("prompt: 1/1");
  fs::resize_file(model.path() / shard, 4096);
  const e2e::Outcome outcome = process.finish();
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  EXPECT_NE(outcome.err.find(fs::path(shard).filename().string() + ": the file was cut short"),
            std::string::npos)
      << outcome.err;
  EXPECT_FALSE(fs::exists(file("s.png")));
}

TEST_F(Files, JobsOfOtherLaunchersAreRefused) {  // C10
  for (const auto& [launcher, environment] :
       {std::pair<std::string, Words>{"torchrun",
                                      {"TORCHELASTIC_RUN_ID=1", "WORLD_SIZE=4", "RANK=2"}},
        {"srun", {"SLURM_STEP_NUM_TASKS=4", "SLURM_PROCID=2"}}}) {
    const e2e::Outcome outcome =
        e2e::Process(environment + Words{e2e::binary()} + still(file("s.png")), "env").finish();
    EXPECT_EQ(outcome.status, 2) << outcome.err;
    EXPECT_NE(outcome.err.find("rank 2 of 4 that " + launcher), std::string::npos) << outcome.err;
  }
  EXPECT_TRUE(fs::is_empty(scratch_.path()));
}

TEST_F(Files, ThreadsAreBounded) {  // C10
  refused(still(file("s.png")) + Words{"--threads", "100000"}, {"num_threads is 100000", "1024"});
}

// D: names of unknown origin do not reach the terminal as they are.
TEST_F(Files, ControlCharactersAreEscaped) {
  const std::string name = file("a\x1b[31m\x07.txt");
  Words words = still(file("s.png"));
  words[3] = "--prompt-file";
  words[4] = name;
  const e2e::Outcome outcome = e2e::run(words);
  EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(outcome.err.find('\x1b'), std::string::npos);
  EXPECT_NE(outcome.err.find("a\\x1b[31m\\x07.txt"), std::string::npos) << outcome.err;
  words[3] = "--dtype";
  words[4] = std::string(100000, 'x');
  EXPECT_LT(e2e::run(words).err.size(), 2000u);
}

}  // namespace
}  // namespace orrery
