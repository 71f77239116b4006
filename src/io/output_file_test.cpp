#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <thread>

#include "expect_error.h"
#include "orrery/output.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

namespace fs = std::filesystem;

void write_all(const fs::path& target, const std::string& text) {
  OutputFile file(target);
  file.write(text);
  file.commit();
}

mode_t mode_of(const fs::path& file) {
  struct stat status {};
  EXPECT_EQ(::stat(file.c_str(), &status), 0);
  return status.st_mode & 07777;
}

TEST(OutputFile, AppearsOnCommitOnly) {
  const ScratchFolder folder;
  const auto target = folder.path() / "result.bin";
  {
    OutputFile file(target);
    EXPECT_EQ(folder.file_count(), 1) << "the temporary file is opened at once";
    file.write("abc", 3);
    EXPECT_FALSE(fs::exists(target));
    file.commit();
  }
  EXPECT_EQ(ScratchFolder::read(target), "abc");
  EXPECT_EQ(folder.file_count(), 1);
}

TEST(OutputFile, LeavesNothingBehindAndTheOldFileAlone) {
  const ScratchFolder folder;
  const auto target = folder.write("old.txt", "old");
  {
    OutputFile file(target);
    file.write("new", 3);
    OutputFile deep(folder.path() / "made" / "for" / "x.txt");
    EXPECT_TRUE(fs::is_directory(folder.path() / "made" / "for"));
  }
  EXPECT_EQ(ScratchFolder::read(target), "old");
  EXPECT_EQ(folder.file_count(), 1) << "also the folders that were made are gone";
}

TEST(OutputFile, MakesMissingFolders) {
  const ScratchFolder folder;
  write_all(folder.path() / "a/b/x.txt", "x");
  EXPECT_EQ(ScratchFolder::read(folder.path() / "a/b/x.txt"), "x");
}

// A4: no fixed name that a link could be planted under; two writers do not meet, nor do they take
// each other's files for leftovers.
TEST(OutputFile, TwoWritersOfOneTargetDoNotMeet) {
  const ScratchFolder folder;
  const auto target = folder.path() / "x.mp4";
  OutputFile one(target), two(target);
  EXPECT_EQ(folder.file_count(), 2);
  one.write(std::string("one"));
  two.write(std::string("two"));
  one.commit();
  EXPECT_EQ(ScratchFolder::read(target), "one");
  two.commit();
  EXPECT_EQ(ScratchFolder::read(target), "two");
}

TEST(OutputFile, KeepsTheModeOfAnExistingFile) {  // A4
  const ScratchFolder folder;
  const auto old = folder.write("old.txt", "old");
  for (const mode_t mode : {0600, 0640, 0755}) {
    ASSERT_EQ(::chmod(old.c_str(), mode), 0);
    write_all(old, "new");
    EXPECT_EQ(mode_of(old), mode);
  }
  const mode_t mask = ::umask(027);
  write_all(folder.path() / "new.txt", "new");
  ::umask(mask);
  EXPECT_EQ(mode_of(folder.path() / "new.txt"), 0640u);
}

TEST(OutputFile, FollowsLinksAndKeepsThem) {  // A7
  const ScratchFolder folder;
  fs::create_directory(folder.path() / "there");
  fs::create_symlink("there/real.txt", folder.path() / "link.txt");
  write_all(folder.path() / "link.txt", "first");  // a link to nothing yet
  EXPECT_EQ(ScratchFolder::read(folder.path() / "there/real.txt"), "first");
  fs::create_symlink("link.txt", folder.path() / "second.txt");
  write_all(folder.path() / "second.txt", "second");
  EXPECT_EQ(ScratchFolder::read(folder.path() / "there/real.txt"), "second");
  EXPECT_TRUE(fs::is_symlink(folder.path() / "link.txt"));
  EXPECT_TRUE(fs::is_symlink(folder.path() / "second.txt"));
  fs::create_symlink("loop.txt", folder.path() / "loop.txt");
  expect_error(ErrorKind::invalid_argument, {"loop.txt", "symbolic links"},
               [&] { OutputFile file(folder.path() / "loop.txt"); });
}

TEST(OutputFile, DevicesAndPipesAreWrittenNotReplaced) {  // A1
  write_all("/dev/null", "gone");
  struct stat status {};
  ASSERT_EQ(::stat("/dev/null", &status), 0);
  EXPECT_TRUE(S_ISCHR(status.st_mode));

  const ScratchFolder folder;
  const auto pipe = folder.path() / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  expect_error(ErrorKind::invalid_argument, {"pipe", "no process reads"},
               [&] { OutputFile file(pipe); });
  const int reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  write_all(pipe, "through");
  char text[8] = {};
  EXPECT_EQ(::read(reader, text, sizeof text), 7);
  EXPECT_STREQ(text, "through");
  ::close(reader);
  EXPECT_TRUE(fs::is_fifo(pipe));

  // As of a shell's >(command), and of standard output that goes to a file.
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  write_all("/dev/fd/" + std::to_string(ends[1]), "down");
  EXPECT_EQ(::read(ends[0], text, sizeof text), 4);
  ::close(ends[0]);
  ::close(ends[1]);
  const auto file = folder.write("out.txt", "");
  const int open = ::open(file.c_str(), O_WRONLY);
  ASSERT_EQ(::write(open, "one ", 4), 4);
  write_all("/proc/self/fd/" + std::to_string(open), "two");
  ASSERT_EQ(::write(open, " three", 6), 6);
  ::close(open);
  EXPECT_EQ(ScratchFolder::read(file), "one two three");
}

TEST(OutputFile, RefusesByName) {  // B85: output folder read-only
  const ScratchFolder folder;
  expect_error(ErrorKind::invalid_argument, {"is a folder", folder.path().string()},
               [&] { OutputFile file(folder.path()); });
  expect_error(ErrorKind::invalid_argument, {"new/", "is a folder"},
               [&] { OutputFile file(folder.path() / "new" / ""); });
  // /proc takes no new files from anyone, root included.
  expect_error(ErrorKind::not_found, {"/proc/x.png", "cannot write the file"},
               [] { OutputFile file("/proc/x.png"); });
  expect_error(ErrorKind::invalid_argument, {"too long"},
               [&] { OutputFile file(folder.path() / std::string(256, 'n')); });
  folder.write("file", "");
  expect_error(ErrorKind::invalid_argument, {"x.txt", "Not a directory"},
               [&] { OutputFile file(folder.path() / "file/x.txt"); });
  EXPECT_EQ(folder.file_count(), 1);
}

TEST(OutputFile, FullDiskIsNamed) {  // A8; B85, B91
  const ScratchFolder folder;
  // A limit on file sizes stands in for the full disk.
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto old_handler = ::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{512, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  expect_error(ErrorKind::invalid_argument, {"full.mp4", "cannot write the file", "too large"},
               [&] { write_all(folder.path() / "full.mp4", std::string(1000, 'x')); });
  EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(folder.file_count(), 0);
}

// A8: processes killed at random moments leave the old file or the new one under the name, and the
// next output in the folder removes what they left; files of living processes stay.
TEST(OutputFile, KilledWritersLeaveNothingForLong) {
  const ScratchFolder folder;
  const auto target = folder.write("x.bin", std::string(1 << 16, 'a'));
  OutputFile living(folder.path() / "living.bin");
  std::mt19937 random(1);
  int seen_leftovers = 0;
  for (int round = 0; round < 40; ++round) {
    int started[2];
    ASSERT_EQ(::pipe(started), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      if (::write(started[1], "!", 1) != 1) ::_exit(1);
      for (char c = 'b';; c = c == 'z' ? 'b' : static_cast<char>(c + 1)) {
        OutputFile file(target);
        for (int i = 0; i < 64; ++i) file.write(std::string(1 << 10, c));
        file.commit();
      }
    }
    char byte;
    ASSERT_EQ(::read(started[0], &byte, 1), 1);
    ::close(started[0]);
    ::close(started[1]);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 5000));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const std::string content = ScratchFolder::read(target);
    ASSERT_EQ(content, std::string(1 << 16, content.at(0))) << "half a file under the name";
    seen_leftovers += folder.file_count() > 2;
    write_all(folder.path() / "x.bin", content);
    ASSERT_EQ(folder.file_count(), 2) << "a leftover after the next output";
  }
  EXPECT_GT(seen_leftovers, 0) << "no child was killed while it wrote: the test shows nothing";
  living.write(std::string("alive"));
  living.commit();
  EXPECT_EQ(ScratchFolder::read(folder.path() / "living.bin"), "alive");
}

TEST(OutputFile, NamesLikeLeftoversOfOthersStay) {
  const ScratchFolder folder;
  folder.write(".orrery-notes.tmp", "");
  folder.write(".orrery-0123456789abcdef.tmp.txt", "");
  folder.write(".orrery-0123456789abcdef.tmp", "");
  write_all(folder.path() / "x.txt", "x");
  EXPECT_EQ(folder.file_count(), 3) << "the third name alone is that of a leftover";
}

TEST(OutputFolder, AppearsWholeAndIsNeverAdopted) {  // A8
  const ScratchFolder scratch;
  const auto target = scratch.path() / "model";
  {
    const OutputFolder folder(target);
    write_all(folder.path() / "a.txt", "a");
    EXPECT_FALSE(fs::exists(target));
  }
  EXPECT_TRUE(fs::is_empty(scratch.path()));
  const pid_t child = ::fork();
  if (child == 0) {
    const OutputFolder folder(target);
    write_all(folder.path() / "old shard", "a");
    ::raise(SIGKILL);
  }
  ::waitpid(child, nullptr, 0);
  EXPECT_FALSE(fs::is_empty(scratch.path()));
  OutputFolder folder(target);
  write_all(folder.path() / "new shard", "b");
  folder.commit();
  EXPECT_EQ(std::distance(fs::directory_iterator(scratch.path()), {}), 1);
  EXPECT_TRUE(fs::exists(target / "new shard"));
  EXPECT_FALSE(fs::exists(target / "old shard"));
}

TEST(FileClaims, OneFileUnderTwoNamesIsRefused) {  // A2
  const ScratchFolder folder;
  const fs::path at = folder.path();
  const auto prompt = folder.write("prompt.txt", "p");
  fs::create_symlink("clip.mp4", at / "link.mp4");
  fs::create_hard_link(prompt, at / "hard.txt");
  FileClaims claims;
  claims.reads("--prompt-file", prompt);
  const OutputFile video = claims.open("--output", at / "clip.mp4");
  const auto before = folder.file_count();
  for (const fs::path& same : {at / "clip.mp4", at / "." / "clip.mp4", at / "link.mp4"}) {
    expect_error(ErrorKind::invalid_argument, {"--report", "--output", "same file"},
                 [&] { claims.open("--report", same); });
  }
  for (const fs::path& input : {prompt, at / "hard.txt"}) {
    expect_error(ErrorKind::invalid_argument, {"--report", "input of --prompt-file"},
                 [&] { claims.open("--report", input); });
  }
  const OutputFile null = claims.open("--report", "/dev/null");
  const OutputFile again = claims.open("--save-latents", "/dev/null");
  expect_error(ErrorKind::invalid_argument, {"--save-sound", "Not a directory"},
               [&] { claims.open("--save-sound", prompt / "file/x"); });
  EXPECT_EQ(folder.file_count(), before);
}

}  // namespace
}  // namespace orrery
