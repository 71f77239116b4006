#include "io/wav.h"

#include <gtest/gtest.h>

#include <cmath>

#include "expect_error.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

TEST(WriteWav, HeaderAndSamplesByteForByte) {
  const ScratchFolder folder;
  const auto file = folder.path() / "a.wav";
  // B76: what is louder than full scale is clipped, not wrapped.
  write_wav(file, {{0, 0.5f, 1.5f}, {-1, -2, 1}}, 48000);
  const std::string want(
      "RIFF\x30\0\0\0WAVEfmt \x10\0\0\0\1\0\2\0\x80\xbb\0\0\0\xee\2\0\4\0\x10\0data\x0c\0\0\0"
      "\0\0\1\x80\0\x40\1\x80\xff\x7f\xff\x7f",
      56);
  EXPECT_EQ(ScratchFolder::read(file), want);
  EXPECT_EQ(folder.file_count(), 1);
}

TEST(WriteWav, RefusesByName) {
  const ScratchFolder folder;
  const auto file = folder.path() / "a.wav";
  expect_error(ErrorKind::invalid_argument, {"a.wav", "0 channels"},
               [&] { write_wav(file, {}, 48000); });
  expect_error(ErrorKind::invalid_argument, {"differ in length (1 and 2"}, [&] {
    write_wav(file, {{0}, {0, 0}}, 48000);
  });
  expect_error(ErrorKind::numeric, {"NaN"}, [&] { write_wav(file, {{NAN}}, 48000); });
  expect_error(ErrorKind::invalid_argument, {"rate of 0"}, [&] { write_wav(file, {{0}}, 0); });
  EXPECT_EQ(folder.file_count(), 0);
}

}  // namespace
}  // namespace orrery
