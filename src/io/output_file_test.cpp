#include "io/output_file.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "expect_error.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

TEST(OutputFile, AppearsOnCommitOnly) {
  const ScratchFolder folder;
  const auto target = folder.path() / "result.bin";
  {
    OutputFile file(target);
    EXPECT_EQ(file.temporary().extension(), ".bin");
    EXPECT_EQ(file.temporary().parent_path(), folder.path());
    file.write("abc", 3);
    EXPECT_FALSE(std::filesystem::exists(target));
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
  }
  EXPECT_EQ(ScratchFolder::read(target), "old");
  EXPECT_EQ(folder.file_count(), 1);
}

TEST(OutputFile, TwoWritersOfOneTargetDoNotMeet) {
  const ScratchFolder folder;
  OutputFile one(folder.path() / "x.mp4"), two(folder.path() / "x.mp4");
  EXPECT_NE(one.temporary(), two.temporary());
}

TEST(OutputFile, RefusesByName) {  // B85: output folder missing or read-only
  const ScratchFolder folder;
  expect_error(ErrorKind::invalid_argument, {"is a folder", folder.path().string()},
               [&] { OutputFile file(folder.path()); });
  expect_error(ErrorKind::not_found, {"absent", "does not exist"},
               [&] { OutputFile file(folder.path() / "absent" / "x.png"); });
  // /proc takes no new files from anyone, root included.
  expect_error(ErrorKind::invalid_argument, {"/proc/x.png", "cannot write the file"},
               [] { OutputFile file("/proc/x.png"); });
  OutputFile file(folder.path() / "x.png");
  expect_error(ErrorKind::invalid_argument, {"x.png", "No space left"},
               [&] { file.refuse(ENOSPC); });
}

}  // namespace
}  // namespace orrery
