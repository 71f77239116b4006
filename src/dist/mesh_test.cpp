#include "dist/mesh.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"

namespace orrery {
namespace {

std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
    return error.what();
  }
  return "";
}

TEST(Mesh, PlacesRanksTpFirst) {
  const Mesh mesh{2, 3, 2};
  ASSERT_EQ(mesh.world(), 12);
  EXPECT_EQ(mesh.tp_group(7), (std::vector<int>{6, 7}));
  EXPECT_EQ(mesh.cp_group(7), (std::vector<int>{7, 9, 11}));
  EXPECT_EQ(mesh.cfg_group(7), (std::vector<int>{1, 7}));
  EXPECT_THROW(mesh.place(12), Error);
  EXPECT_THROW(mesh.place(-1), Error);
}

TEST(Mesh, PlaceAndRankAreInverseAndGroupsPartitionTheWorld) {
  for (int tp = 1; tp <= 4; ++tp) {
    for (int cp = 1; cp <= 4; ++cp) {
      for (int cfg = 1; cfg <= 2; ++cfg) {
        const Mesh mesh{tp, cp, cfg};
        for (int rank = 0; rank < mesh.world(); ++rank) {
          EXPECT_EQ(mesh.rank(mesh.place(rank)), rank);
          for (const auto& group :
               {mesh.tp_group(rank), mesh.cp_group(rank), mesh.cfg_group(rank)}) {
            EXPECT_EQ(std::set<int>(group.begin(), group.end()).size(), group.size());
            EXPECT_EQ(std::count(group.begin(), group.end(), rank), 1);
            for (int other : group) {
              EXPECT_TRUE(mesh.tp_group(other) == group || mesh.cp_group(other) == group ||
                          mesh.cfg_group(other) == group);
            }
          }
        }
      }
    }
  }
}

// B73: the message comes at the start and names the degrees that this checkpoint allows.
TEST(Mesh, RefusesTpThatDoesNotDivideAndNamesTheDegreesThatDo) {
  for (int tp : {3, 5, 7, 16}) {
    const std::string message = refusal([&] { Mesh{tp, 1, 1}.check({32, 8, {12288}}, tp); });
    EXPECT_EQ(message,
              concat("tp degree ", tp,
                     " does not divide this checkpoint's 32 query heads, 8 key/value heads, "
                     "12288 feed-forward columns; degrees that do: 1, 2, 4, 8"));
  }
  for (int degree : {0, -1}) {
    EXPECT_EQ(refusal([&] {
                Mesh{degree, 1, 1}.check({32, 8, {}}, 1);
              }),
              concat("tp degree ", degree, ": expected 1 or more"));
    EXPECT_EQ(refusal([&] {
                Mesh{1, degree, 1}.check({32, 8, {}}, 1);
              }),
              concat("cp degree ", degree, ": expected 1 or more"));
  }
  EXPECT_EQ(refusal([] {
              Mesh{1, 1, 3}.check({32, 8, {}}, 3);
            }),
            "cfg degree 3: expected 1 or 2, one rank group per guidance branch");
}

// B73: odd feed-forward widths limit tp too.
TEST(Mesh, FfnWidthLimitsTp) {
  EXPECT_NE(refusal([] {
              Mesh{4, 1, 1}.check({32, 8, {1026}}, 4);
            }).find("degrees that do: 1, 2"),
            std::string::npos);
  EXPECT_EQ(refusal([] { Mesh{2, 1, 1}.check({32, 8, {1026}}, 2); }), "");
}

// B72, B73: cp divides what tp leaves of the query heads.
TEST(Mesh, RefusesCpBeyondTheQueryHeads) {
  for (int cp : {3, 5, 64}) {
    EXPECT_EQ(refusal([&] {
                Mesh{1, cp, 1}.check({32, 8, {}}, cp);
              }),
              concat("cp degree ", cp,
                     " does not divide the 32 query heads of a rank (32 over tp 1); degrees that "
                     "do: 1, 2, 4, 8, 16, 32"));
  }
  for (int cp : {16, 32}) EXPECT_EQ(refusal([&] { Mesh{1, cp, 1}.check({32, 8, {}}, cp); }), "");
  EXPECT_NE(refusal([] {
              Mesh{8, 8, 1}.check({32, 8, {}}, 64);
            }).find("degrees that do: 1, 2, 4"),
            std::string::npos);
}

TEST(Mesh, RefusesAWorldOfAnotherSize) {
  EXPECT_EQ(refusal([] {
              Mesh{2, 2, 1}.check({32, 8, {}}, 1);
            }),
            "tp 2 x cp 2 x cfg 1 needs 4 ranks, but 1 runs");
  EXPECT_EQ(refusal([] {
              Mesh{2, 1, 1}.check({32, 8, {}}, 4);
            }),
            "tp 2 x cp 1 x cfg 1 needs 2 ranks, but 4 run");
}

TEST(Mesh, HeadsOfAllTpRanksCoverTheCheckpoint) {
  for (int64_t kv : {1, 2, 4, 8}) {
    for (int64_t group : {1, 2, 3, 7, 8}) {
      for (int tp = 1; tp <= 8; ++tp) {
        const Mesh mesh{tp, 2, 2};
        if (kv % tp != 0) {
          EXPECT_THROW(mesh.heads(kv * group, kv, 0), Error);
          continue;
        }
        std::vector<int> readers(size_t(kv * group));
        for (int rank = 0; rank < tp; ++rank) {
          const HeadRange range = mesh.heads(kv * group, kv, rank);
          for (int64_t i = 0; i < range.q_count; ++i) {
            ++readers[size_t(range.q_begin + i)];
            // The rank's own ratio maps each query head to the same key/value head as the whole.
            const int64_t local = i / (range.q_count / range.kv_count);
            EXPECT_EQ(range.kv_begin + local, (range.q_begin + i) / group);
          }
          EXPECT_EQ(mesh.heads(kv * group, kv, rank + tp).q_begin, range.q_begin);
        }
        EXPECT_EQ(readers, std::vector<int>(size_t(kv * group), 1));
      }
    }
  }
}

// B72: for every split, query head i reads key/value head i / (H / KV), and the rank's ratio is
// whole.
TEST(HeadExchange, EveryQueryHeadReadsItsOwnGroup) {
  for (int64_t kv = 1; kv <= 8; ++kv) {
    for (int64_t group = 1; group <= 8; ++group) {
      const int64_t heads = kv * group;
      for (int ranks = 1; ranks <= 64; ++ranks) {
        if (heads % ranks != 0) {
          EXPECT_NE(refusal([&] { HeadExchange(heads, kv, ranks); }).find("degrees that do: 1"),
                    std::string::npos);
          continue;
        }
        const HeadExchange exchange(heads, kv, ranks);
        ASSERT_EQ(exchange.q_count() * ranks, heads);
        ASSERT_EQ(exchange.q_count() % exchange.kv_count(), 0);
        const int64_t ratio = exchange.q_count() / exchange.kv_count();
        for (int rank = 0; rank < ranks; ++rank) {
          for (int64_t i = 0; i < exchange.q_count(); ++i) {
            EXPECT_EQ(exchange.kv_head(rank, i / ratio), (rank * exchange.q_count() + i) / group)
                << heads << '/' << kv << " over " << ranks;
          }
        }
        EXPECT_EQ(exchange.splits_kv(), exchange.kv_count() * ranks == kv);
      }
    }
  }
}

TEST(HeadExchange, KnownSplits) {
  const HeadExchange released(32, 8, 4);  // 8 query, 2 key/value heads each
  EXPECT_EQ(released.kv_count(), 2);
  EXPECT_TRUE(released.splits_kv());
  const HeadExchange wide(32, 8, 16);  // fewer key/value heads than ranks
  EXPECT_EQ(wide.q_count(), 2);
  EXPECT_EQ(wide.kv_count(), 1);
  EXPECT_EQ(wide.kv_head(3, 0), 1);
  const HeadExchange cut(28, 7, 2);  // B72: rank 0 has half of the fourth group
  EXPECT_EQ(cut.q_count(), 14);
  EXPECT_EQ(cut.kv_count(), 7);
  EXPECT_EQ(cut.kv_head(0, 6), 3);
  EXPECT_EQ(cut.kv_head(1, 0), 3);
  EXPECT_EQ(cut.kv_head(1, 6), 6);
}

}  // namespace
}  // namespace orrery
