#include "io/wav.h"

#include <gtest/gtest.h>

#include <cmath>

#include "expect_error.h"

namespace orrery {
namespace {

TEST(EncodeWav, HeaderAndSamplesByteForByte) {
  // B76: what is louder than full scale is clipped, not wrapped.
  const std::string want(
      "RIFF\x30\0\0\0WAVEfmt \x10\0\0\0\1\0\2\0\x80\xbb\0\0\0\xee\2\0\4\0\x10\0data\x0c\0\0\0"
      "\0\0\1\x80\0\x40\1\x80\xff\x7f\xff\x7f",
      56);
  EXPECT_EQ(encode_wav({{0, 0.5f, 1.5f}, {-1, -2, 1}}, 48000, "a.wav"), want);
}

TEST(EncodeWav, RefusesByName) {
  expect_error(ErrorKind::invalid_argument, {"a.wav", "0 channels"},
               [&] { encode_wav({}, 48000, "a.wav"); });
  expect_error(ErrorKind::invalid_argument, {"differ in length (1 and 2"}, [&] {
    encode_wav({{0}, {0, 0}}, 48000, "a.wav");
  });
  expect_error(ErrorKind::numeric, {"NaN"}, [&] { encode_wav({{NAN}}, 48000, "a.wav"); });
  expect_error(ErrorKind::invalid_argument, {"rate of 0"}, [&] { encode_wav({{0}}, 0, "a.wav"); });
}

}  // namespace
}  // namespace orrery
