#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "base/cores.h"

namespace orrery {
namespace {

TEST(ThreadPool, CallsEveryIndexOnceOnNumbersBelowTheLimit) {
  ThreadPool pool(4);
  for (int threads : {1, 2, 3, 4, 9}) {
    for (int64_t count : {0, 1, 2, 3, 5, 1000}) {
      std::vector<std::atomic<int>> calls(static_cast<size_t>(count));
      std::atomic<int> highest = 0;
      pool.run(count, threads, [&](int64_t i, int thread) {
        ++calls[static_cast<size_t>(i)];
        int seen = highest;
        while (thread > seen && !highest.compare_exchange_weak(seen, thread)) {
        }
      });
      for (const auto& n : calls) EXPECT_EQ(n, 1);
      EXPECT_LT(highest, std::max(1, std::min(threads, pool.size())));
    }
  }
}

// A number belongs to one thread during a loop: unprotected counters per number add up, and what a
// loop wrote is there for the caller and for the next loop's threads.
TEST(ThreadPool, NumbersAreNotSharedAndLoopsFollowEachOther) {
  constexpr int kThreads = 3, kLoops = 20000, kCount = 7;
  ThreadPool pool(kThreads);
  struct alignas(64) Counter {
    int64_t n = 0;
  };
  std::vector<Counter> by_thread(kThreads);
  std::vector<int64_t> cells(kCount);
  for (int loop = 0; loop < kLoops; ++loop) {
    pool.run(kCount, kThreads, [&](int64_t i, int thread) {
      ++by_thread[static_cast<size_t>(thread)].n;
      ++cells[static_cast<size_t>(i)];
    });
    ASSERT_EQ(cells[static_cast<size_t>(loop % kCount)], loop + 1);
  }
  int64_t all = 0;
  for (const Counter& counter : by_thread) all += counter.n;
  EXPECT_EQ(all, int64_t{kLoops} * kCount);
}

TEST(ThreadPool, RunsTheFirstCallOfEachWorkerBeforeItsWork) {
  std::atomic<int> started = 0;
  {
    ThreadPool pool(3, [&] { ++started; });
    EXPECT_EQ(pool.size(), 3);
  }
  EXPECT_EQ(started, 2);
}

TEST(Cores, OfThisProcessAreKnown) { EXPECT_GE(usable_cores(), 1); }

}  // namespace
}  // namespace orrery
