#include "dist/thread_comm.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <future>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "tensor/tensor.h"

namespace orrery {
namespace {

std::vector<int> all(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Two trades of one exchange, blocks dense and with gaps; a rank's own blocks stay as they are.
TEST(ThreadComm, ExchangeTransposesBlocks) {
  for (int size = 1; size <= 4; ++size) {
    ThreadWorld world(size);
    world.run([&](int rank) {
      const auto comm = world.group(rank, all(size));
      ASSERT_EQ(comm->rank(), rank);
      ASSERT_EQ(comm->size(), size);
      const Tensor in = allocate_host_tensor({size, 5}, DType::f32);
      const Tensor dense = allocate_host_tensor({size, 5}, DType::f32);
      const Tensor gaps = allocate_host_tensor({size, 4}, DType::f32);
      for (int64_t i = 0; i < in.view.numel(); ++i) in.view.as<float>()[i] = float(100 * rank + i);
      for (int repeat = 0; repeat < 3; ++repeat) {
        std::fill_n(dense.view.as<float>(), dense.view.numel(), -1.0f);
        std::fill_n(gaps.view.as<float>(), gaps.view.numel(), -1.0f);
        const Trade trades[] = {{dense.view, in.view},
                                {gaps.view.slice(1, 1, 2), in.view.slice(1, 3, 2)}};
        comm->finish(comm->start_exchange(trades));
        for (int from = 0; from < size; ++from) {
          const float sent = float(100 * from + rank * 5);
          for (int i = 0; i < 5; ++i) {
            EXPECT_EQ(dense.view.as<float>()[from * 5 + i], from == rank ? -1.0f : sent + float(i));
          }
          for (int i = 0; i < 4; ++i) {
            const bool arrives = from != rank && (i == 1 || i == 2);
            EXPECT_EQ(gaps.view.as<float>()[from * 4 + i], arrives ? sent + float(i + 2) : -1.0f);
          }
        }
        comm->barrier();
      }
    });
  }
}

// Blocks with gaps; the outer sides of the first and the last rank stay as they are.
TEST(ThreadComm, HalosComeFromTheNeighbours) {
  for (int size = 1; size <= 4; ++size) {
    ThreadWorld world(size);
    world.run([&](int rank) {
      const auto comm = world.group(rank, all(size));
      // Two blocks of rows 0 (halo), 1, 2, 3, 4 (halo), three values each.
      const Tensor rows = allocate_host_tensor({2, 5, 3}, DType::f32);
      const auto value = [&](int r, int64_t block, int64_t row, int64_t i) {
        return float(1000 * r + 100 * block + 10 * row + i);
      };
      float* data = rows.view.as<float>();
      for (int64_t i = 0; i < 30; ++i) data[i] = value(rank, i / 15, i / 3 % 5, i % 3);
      const MutView& x = rows.view;
      comm->exchange_halos({x.select(1, 0), x.select(1, 4), x.select(1, 1), x.select(1, 3)});
      for (int64_t i = 0; i < 30; ++i) {
        const int64_t block = i / 15, row = i / 3 % 5;
        float expected = value(rank, block, row, i % 3);
        if (row == 0 && rank > 0) expected = value(rank - 1, block, 3, i % 3);
        if (row == 4 && rank + 1 < size) expected = value(rank + 1, block, 1, i % 3);
        EXPECT_EQ(data[i], expected) << "rank " << rank << " of " << size << ", value " << i;
      }
    });
  }
}

TEST(RowParts, CoverTheRowsInOrder) {
  const auto parts_of = [](int64_t rows, int64_t part_rows) {
    ThreadWorld world(2, part_rows);
    const auto comm = world.group(0, {0, 1});
    return row_parts(rows, comm.get());
  };
  const auto counts = [&](int64_t rows, int64_t part_rows) {
    std::vector<int64_t> result;
    int64_t end = 0;
    for (const RowRange& part : parts_of(rows, part_rows)) {
      EXPECT_EQ(part.begin, end);
      end += part.count;
      result.push_back(part.count);
    }
    EXPECT_EQ(end, rows);
    return result;
  };
  EXPECT_EQ(counts(22080, 4096), (std::vector<int64_t>{5632, 5632, 5632, 5184}));
  EXPECT_EQ(counts(1000, 400), (std::vector<int64_t>{512, 488}));
  EXPECT_EQ(counts(700, 400), (std::vector<int64_t>{700}));
  EXPECT_EQ(counts(0, 400), (std::vector<int64_t>{0}));
  EXPECT_EQ(row_parts(5000, nullptr).size(), 1u);
}

TEST(ThreadComm, AllGatherAndBroadcast) {
  ThreadWorld world(3);
  world.run([&](int rank) {
    const auto comm = world.group(rank, all(3));
    const Tensor in = allocate_host_tensor({2}, DType::i64);
    const Tensor out = allocate_host_tensor({3, 2}, DType::i64);
    in.view.as<int64_t>()[0] = rank;
    in.view.as<int64_t>()[1] = 10 * rank;
    comm->all_gather(out.view, in.view);
    for (int64_t r = 0; r < 3; ++r) {
      EXPECT_EQ(out.view.as<int64_t>()[2 * r], r);
      EXPECT_EQ(out.view.as<int64_t>()[2 * r + 1], 10 * r);
    }
    comm->broadcast(in.view, 2);
    EXPECT_EQ(in.view.as<int64_t>()[1], 20);
  });
}

// Values that do not add associatively: the order is rank order, and every rank has the same bytes.
TEST(ThreadComm, AllReduceAddsInRankOrder) {
  for (int64_t count : {1, 2, 5, 1000}) {
    ThreadWorld world(4);
    std::vector<std::vector<float>> results(4);
    world.run([&](int rank) {
      const auto comm = world.group(rank, all(4));
      const Tensor x = allocate_host_tensor({count}, DType::f32);
      const float terms[] = {1e8f, 1.0f, -1e8f, 0.25f};
      for (int64_t i = 0; i < count; ++i) x.view.as<float>()[i] = terms[rank] * float(i + 1);
      comm->all_reduce(x.view);
      results[size_t(rank)].assign(x.view.as<float>(), x.view.as<float>() + count);
    });
    for (int64_t i = 0; i < count; ++i) {
      const float f = float(i + 1);
      const float want = ((1e8f * f + 1.0f * f) + -1e8f * f) + 0.25f * f;
      for (const auto& result : results) EXPECT_EQ(result[size_t(i)], want) << i;
    }
  }
}

TEST(ThreadComm, AllReduceOfBf16RoundsOnce) {
  ThreadWorld world(3);
  world.run([&](int rank) {
    const auto comm = world.group(rank, all(3));
    const Tensor x = allocate_host_tensor({7}, DType::bf16);
    // 1 + 2^-8 + 2^-8: rounding after each addition would lose both small terms.
    const float terms[] = {1.0f, 0.00390625f, 0.00390625f};
    for (int i = 0; i < 7; ++i) x.view.as<bf16>()[i] = to_bf16(terms[rank]);
    comm->all_reduce(x.view);
    for (int i = 0; i < 7; ++i) EXPECT_EQ(to_float(x.view.as<bf16>()[i]), 1.0078125f);
  });
}

TEST(ThreadComm, GroupsOfOneWorldDoNotMix) {
  ThreadWorld world(4);
  world.run([&](int rank) {
    const int pair = rank / 2;
    const auto row = world.group(rank, {2 * pair, 2 * pair + 1});
    const auto column = world.group(rank, {rank % 2, rank % 2 + 2});
    const Tensor x = allocate_host_tensor({1}, DType::f32);
    x.view.as<float>()[0] = float(1 << rank);
    row->all_reduce(x.view);
    EXPECT_EQ(x.view.as<float>()[0], pair == 0 ? 3.0f : 12.0f);
    column->all_reduce(x.view);
    EXPECT_EQ(x.view.as<float>()[0], 15.0f);
  });
}

// A rank that dies ends all within a second, and its own message comes out.
TEST(ThreadComm, AFailingRankReleasesTheOthers) {
  ThreadWorld world(3);
  std::string seen[3];
  const auto start = std::chrono::steady_clock::now();
  try {
    world.run([&](int rank) {
      const auto comm = world.group(rank, all(3));
      comm->barrier();
      if (rank == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        fail(ErrorKind::numeric, "layer 7 holds a NaN");
      }
      try {
        comm->barrier();
      } catch (const Error& error) {
        seen[rank] = error.what();
        throw;
      }
    });
    FAIL() << "the failure was lost";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::numeric);
    EXPECT_STREQ(error.what(), "layer 7 holds a NaN");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
  EXPECT_EQ(seen[0], "rank 1 failed: layer 7 holds a NaN");
  EXPECT_EQ(seen[2], "rank 1 failed: layer 7 holds a NaN");
}

// Whoever the first failure releases fails after it, and is not taken for it.
TEST(ThreadComm, OnFailureComesOnceTheFailureIsOnRecord) {
  ThreadWorld world(3);
  std::promise<void> promise;
  const std::shared_future<void> released = promise.get_future().share();
  int calls = 0;
  try {
    world.run(
        [&](int rank) {
          if (rank == 1) fail(ErrorKind::numeric, "the first");
          released.wait();
          fail(ErrorKind::device, "released");
        },
        [&] {
          ++calls;
          promise.set_value();
        });
    FAIL() << "the failure was lost";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "the first");
  }
  EXPECT_EQ(calls, 1);
}

// A failure elsewhere: a group whose members arrive before and after it must not get stuck
// half-way.
TEST(ThreadComm, AFailureOutsideTheGroupReleasesEarlyAndLateMembers) {
  ThreadWorld world(3);
  try {
    world.run([&](int rank) {
      const auto pause = [](int milliseconds) {
        std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
      };
      if (rank == 2) {
        pause(30);
        fail(ErrorKind::numeric, "elsewhere");
      }
      const auto pair = world.group(rank, {0, 1});
      if (rank == 1) pause(90);
      pair->barrier();
    });
    FAIL() << "the failure was lost";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "elsewhere");
  }
  // Nothing of it is left for the next run.
  world.run([&](int rank) {
    const auto everyone = world.group(rank, all(3));
    const auto pair = rank < 2 ? world.group(rank, {0, 1}) : world.group(rank, {2});
    const Tensor x = allocate_host_tensor({1}, DType::f32);
    x.view.as<float>()[0] = float(1 << rank);
    pair->all_reduce(x.view);
    EXPECT_EQ(x.view.as<float>()[0], rank < 2 ? 3.0f : 4.0f);
    everyone->barrier();
  });
}

TEST(ThreadComm, ARankThatLeavesEarlyIsAFailure) {
  ThreadWorld world(2);
  try {
    world.run([&](int rank) {
      const auto comm = world.group(rank, all(2));
      if (rank == 0) comm->barrier();
    });
    FAIL() << "rank 0 should not have come through";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "barrier: rank 1 ended without taking part");
  }
}

TEST(ThreadComm, RanksThatDisagreeAreTold) {
  ThreadWorld world(2);
  try {
    world.run([&](int rank) {
      const auto comm = world.group(rank, all(2));
      const Tensor x = allocate_host_tensor({4 + 4 * rank}, DType::f32);
      comm->all_reduce(x.view);
    });
    FAIL() << "sizes differ";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("ranks disagree"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find(" of 32"), std::string::npos);
  }
}

TEST(ThreadComm, RefusesBadArguments) {
  EXPECT_THROW(ThreadWorld(0), Error);
  ThreadWorld world(2);
  EXPECT_THROW(world.group(1, {0}), Error);
  const auto alone = world.group(0, {0});
  const Tensor x = allocate_host_tensor({2, 3}, DType::f32);
  const Tensor y = allocate_host_tensor({3, 2}, DType::f32);
  const Trade misfit{y.view, x.view};
  EXPECT_THROW(alone->exchange({&misfit, 1}), Error);
  EXPECT_THROW(alone->broadcast(x.view, 1), Error);
  EXPECT_THROW(alone->all_gather(allocate_host_tensor({2}, DType::f32).view, x.view), Error);
  EXPECT_THROW(alone->all_reduce(x.view.permute({1, 0})), Error);
}

// A rank whose thread cannot start ends the run with a sentence. In a process of its own, whose
// address space ends a little above what it has.
TEST(ThreadWorldDeathTest, AThreadThatCannotStartIsAnError) {
  const auto run_without_room = [] {
    std::ifstream statm("/proc/self/statm");
    rlim_t pages = 0;
    statm >> pages;
    constexpr rlim_t kRoom = 2 << 20;  // less than a thread's stack
    const rlimit limit{pages * 4096 + kRoom, RLIM_INFINITY};
    setrlimit(RLIMIT_AS, &limit);
    try {
      ThreadWorld(3).run([](int) {});
    } catch (const Error& error) {
      const bool says = std::string(error.what()).find("starts no thread") != std::string::npos;
      std::_Exit(error.kind() == ErrorKind::out_of_memory && says ? 0 : 1);
    }
    std::_Exit(2);
  };
  EXPECT_EXIT(run_without_room(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace orrery
