// The commands of docs/modes.md, run in order as they stand there, but smaller and with one step.
#include <gtest/gtest.h>

#include <fstream>
#include <regex>

#include "process.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

namespace fs = std::filesystem;

// Indented lines that start with the program; a backslash continues on the next line.
std::vector<std::string> commands(const fs::path& page) {
  std::ifstream in(page);
  std::vector<std::string> found;
  bool continues = false;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("    build/release/orrery "))
      found.emplace_back();
    else if (!continues)
      continue;
    continues = line.ends_with('\\');
    if (continues) line.pop_back();
    found.back() += line;
  }
  return found;
}

TEST(ModesPage, EveryCommandRuns) {
  const ScratchFolder scratch;
  const std::string source = e2e::source_folder();
  int count = 0;
  for (std::string command : commands(source + "/docs/modes.md")) {
    if (command.find("...") != std::string::npos) continue;  // names files that are the reader's
    command = std::regex_replace(command, std::regex("build/release/orrery"),
                                 fs::absolute(e2e::binary()).string());
    command = std::regex_replace(command, std::regex("--model "), "--model " + source + "/");
    command = std::regex_replace(command, std::regex("--(height|width) 256"), "--$1 64");
    command = std::regex_replace(command, std::regex("--num-inference-steps [0-9]+"),
                                 "--num-inference-steps 1");
    const e2e::Outcome outcome =
        e2e::Process({"-c", "cd '" + scratch.path().string() + "' && " + command}, "sh").finish();
    EXPECT_EQ(outcome.status, 0) << command << "\n" << outcome.err;
    ++count;
  }
  EXPECT_EQ(count, 9);  // two from text, image, video, sound, three of actions, transfer
  for (const char* made : {"still.png", "t2v.mp4", "i2v.mp4", "v2v.mp4", "drum.wav", "actions.json",
                           "forward.mp4", "found.json", "transfer.mp4"}) {
    EXPECT_TRUE(fs::exists(scratch.path() / made)) << made;
  }
}

}  // namespace
}  // namespace orrery
