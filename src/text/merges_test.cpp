#include "text/merges.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>

namespace orrery {
namespace {

std::array<int32_t, 256> byte_ids() {
  std::array<int32_t, 256> ids;
  for (int i = 0; i < 256; ++i) ids[static_cast<size_t>(i)] = i;
  return ids;
}

std::vector<int64_t> encode(const std::vector<Merges::Rule>& rules, const std::string& piece) {
  std::vector<int64_t> ids;
  Merges(rules, byte_ids()).encode(piece, ids);
  return ids;
}

// By the definition, with no data structure to get wrong.
std::vector<int64_t> encode_plainly(const std::vector<Merges::Rule>& rules,
                                    const std::string& piece) {
  std::map<std::pair<int64_t, int64_t>, size_t> rank;
  for (size_t i = 0; i < rules.size(); ++i) rank[{rules[i].left, rules[i].right}] = i;
  std::vector<int64_t> ids;
  for (const char byte : piece) ids.push_back(static_cast<unsigned char>(byte));
  for (;;) {
    size_t best = rules.size();
    size_t at = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const auto found = rank.find({ids[i], ids[i + 1]});
      if (found != rank.end() && found->second < best) {
        best = found->second;
        at = i;
      }
    }
    if (best == rules.size()) return ids;
    ids[at] = rules[best].result;
    ids.erase(ids.begin() + static_cast<ptrdiff_t>(at) + 1);
  }
}

TEST(Merges, TheLowestRankGoesFirst) {
  const std::vector<Merges::Rule> rules = {{'b', 'c', 256}, {'a', 'b', 257}, {257, 'c', 258}};
  EXPECT_EQ(encode(rules, "abc"), (std::vector<int64_t>{'a', 256}));
  EXPECT_EQ(encode(rules, "ab"), (std::vector<int64_t>{257}));
  EXPECT_EQ(encode(rules, ""), std::vector<int64_t>{});
}

TEST(Merges, OfEqualsTheLeftmost) {
  const std::vector<Merges::Rule> rules = {{'a', 'a', 256}};
  EXPECT_EQ(encode(rules, "aaa"), (std::vector<int64_t>{256, 'a'}));
  const std::string odd(301, 'a');
  std::vector<int64_t> expected(150, 256);
  expected.push_back('a');
  EXPECT_EQ(encode(rules, odd), expected);
}

// The reference keeps the last of two entries for one pair.
TEST(Merges, OfTwoEntriesForAPairTheLaterCounts) {
  const std::vector<Merges::Rule> rules = {{'a', 'b', 256}, {'b', 'c', 257}, {'a', 'b', 256}};
  EXPECT_EQ(encode(rules, "abc"), (std::vector<int64_t>{'a', 257}));
}

TEST(Merges, ShortAndLongPiecesFollowTheDefinition) {
  std::mt19937 random(5);
  const auto below = [&](int32_t n) {
    return static_cast<int32_t>(random() % static_cast<uint32_t>(n));
  };
  for (int round = 0; round < 20; ++round) {
    std::vector<Merges::Rule> rules;
    std::vector<int32_t> ids = {'a', 'b', 'c'};
    for (int32_t next = 256; next < 256 + 40; ++next) {
      rules.push_back({ids[static_cast<size_t>(below(static_cast<int32_t>(ids.size())))],
                       ids[static_cast<size_t>(below(static_cast<int32_t>(ids.size())))], next});
      ids.push_back(next);
    }
    for (const int length : {1, 2, 3, 7, 31, 63, 64, 65, 66, 200, 700}) {
      std::string piece;
      for (int i = 0; i < length; ++i) piece += static_cast<char>('a' + below(3));
      EXPECT_EQ(encode(rules, piece), encode_plainly(rules, piece)) << piece;
    }
  }
}

}  // namespace
}  // namespace orrery
