#include "base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

namespace orrery {
namespace {

TEST(ParallelFor, CallsEveryIndexOnce) {
  std::vector<std::atomic<int>> calls(1000);
  parallel_for(1000, [&](int64_t i) { ++calls[static_cast<size_t>(i)]; });
  for (const auto& count : calls) EXPECT_EQ(count, 1);
  parallel_for(0, [](int64_t) { FAIL(); });
}

TEST(ParallelFor, ThrowsTheFirstErrorWhenAllHaveRun) {
  std::atomic<int> calls = 0;
  try {
    parallel_for(64, [&](int64_t i) {
      ++calls;
      if (i % 10 == 7) throw std::runtime_error(std::to_string(i));
    });
    FAIL() << "no error came through";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "7");
  }
  EXPECT_EQ(calls, 64);
}

}  // namespace
}  // namespace orrery
