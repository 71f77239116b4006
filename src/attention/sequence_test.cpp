#include "attention/sequence.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace orrery {
namespace {

TEST(TokenOrder, RasterHasNoPermutation) {
  Sequence sequence;
  sequence.grid = {2, 3, 4};
  EXPECT_TRUE(sequence.permutation().empty());
  EXPECT_TRUE(sequence.inverse_permutation().empty());
}

TEST(TokenOrder, TilesFollowOneAnotherAndAreClipped) {
  Sequence sequence;
  sequence.grid = {1, 3, 5};
  sequence.order.tile = {2, 2, 2};
  // Rows of tiles: two rows of tokens, then the one that is left.
  EXPECT_EQ(sequence.permutation(),
            (std::vector<int64_t>{0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14}));
}

// Every grid and tile: each token once, and the inverse undoes it.
TEST(TokenOrder, IsABijectionForEveryGridAndTile) {
  for (int64_t t = 1; t <= 5; ++t) {
    for (int64_t h = 1; h <= 6; ++h) {
      for (int64_t w = 1; w <= 7; ++w) {
        for (const std::array<int64_t, 3> tile :
             {std::array<int64_t, 3>{4, 4, 4}, {1, 2, 3}, {2, 8, 1}, {5, 1, 1}, {1, 1, 7}}) {
          Sequence sequence;
          sequence.grid = {t, h, w};
          sequence.order.tile = tile;
          const auto stored = sequence.permutation(), inverse = sequence.inverse_permutation();
          ASSERT_EQ(int64_t(stored.size()), sequence.video_tokens());
          std::vector<int> hits(stored.size());
          for (size_t i = 0; i < stored.size(); ++i) {
            ASSERT_GE(stored[i], 0);
            ASSERT_LT(stored[i], sequence.video_tokens());
            ++hits[size_t(stored[i])];
            ASSERT_EQ(inverse[size_t(stored[i])], int64_t(i));
          }
          ASSERT_EQ(hits, std::vector<int>(stored.size(), 1));
        }
      }
    }
  }
}

// A tile of full extent in two axes is raster again.
TEST(TokenOrder, AFullFrameIsRaster) {
  Sequence sequence;
  sequence.grid = {3, 4, 5};
  sequence.order.tile = {1, 4, 5};
  const auto stored = sequence.permutation();
  for (size_t i = 0; i < stored.size(); ++i) EXPECT_EQ(stored[i], int64_t(i));
}

TEST(Sequence, CountsItsParts) {
  Sequence sequence;
  sequence.control_tokens = 7;
  sequence.grid = {2, 3, 4};
  sequence.sound_tokens = 5;
  sequence.action_tokens = 2;
  EXPECT_EQ(sequence.size(), 38);
  EXPECT_EQ(sequence.tail_tokens(), 7);
}

// B71: lengths that do not divide, and fewer tokens than ranks.
TEST(Sequence, SharesCoverItOnce) {
  for (int64_t tokens : {0, 1, 2, 7, 8, 97, 22177}) {
    Sequence sequence;
    sequence.sound_tokens = tokens;
    for (int ranks = 1; ranks <= 8; ++ranks) {
      int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const SequenceShare share = sequence.share(rank, ranks);
        EXPECT_EQ(share.begin, next);
        EXPECT_GE(share.rows, 0);
        EXPECT_EQ(share.padded_rows, (tokens + ranks - 1) / ranks);
        EXPECT_LE(share.rows, share.padded_rows);
        next += share.rows;
      }
      EXPECT_EQ(next, tokens);
    }
  }
  EXPECT_THROW(Sequence{}.share(2, 2), Error);
  EXPECT_THROW(Sequence{}.share(0, 0), Error);
}

}  // namespace
}  // namespace orrery
