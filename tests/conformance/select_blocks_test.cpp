#include <cmath>
#include <cstring>
#include <numeric>
#include <set>

#include "conformance/harness.h"

namespace orrery::conformance {
namespace {

ORRERY_CONFORMANCE(SelectBlocks);

// Runs the selector; lists come back per (head, row).
struct Selected {
  std::vector<std::vector<int32_t>> lists;
  reference::Values scores;
};

Selected run(Backend& backend, const TestTensor& q, const TestTensor& k,
             const BlockSelection& selection, bool with_scores, int64_t spare = 3) {
  const int64_t heads = q.host().dim(1);
  const int64_t rows = (q.host().dim(0) + selection.block_q - 1) / selection.block_q;
  const int64_t blocks = (k.host().dim(0) + selection.block_k - 1) / selection.block_k;
  const Shape list_shape{heads, rows, blocks + spare}, count_shape{heads, rows};
  Tensor ids = backend.allocate_tensor(list_shape, DType::i32);
  Tensor counts = backend.allocate_tensor(count_shape, DType::i32);
  Tensor host_ids = allocate_host_tensor(list_shape, DType::i32);
  Tensor host_counts = allocate_host_tensor(count_shape, DType::i32);
  TestTensor scores = poisoned(backend, {heads, rows, blocks}, DType::f32);
  backend.select_blocks(ids.view, counts.view, q.device(), k.device(), selection,
                        with_scores ? scores.device() : MutView{});
  backend.download(host_ids.view, ids.view);
  backend.download(host_counts.view, counts.view);
  EXPECT_TRUE(scores.download());
  Selected result;
  for (int64_t i = 0; i < heads * rows; ++i) {
    const int32_t* list = host_ids.view.as<int32_t>() + i * (blocks + spare);
    result.lists.emplace_back(list, list + host_counts.view.as<int32_t>()[i]);
    const auto& ids_of_row = result.lists.back();
    for (size_t j = 0; j < ids_of_row.size(); ++j) {
      EXPECT_TRUE(ids_of_row[j] >= 0 && ids_of_row[j] < blocks);
      if (j > 0) {
        EXPECT_LT(ids_of_row[j - 1], ids_of_row[j]);
      }
    }
  }
  if (with_scores) result.scores = reference::values(scores.host());
  return result;
}

struct SelectCase {
  const char* what;
  int64_t queries, keys, heads, kv_heads, d;
  BlockSelection selection;
};

BlockSelection selection_of(int64_t block_q, int64_t block_k, double sparsity, int64_t prefix = 0,
                            int64_t tail = 0, int64_t tail_queries = 0) {
  BlockSelection s;
  s.block_q = block_q;
  s.block_k = block_k;
  s.target_sparsity = sparsity;
  s.protected_keys = prefix;
  s.protected_tail_keys = tail;
  s.protected_tail_queries = tail_queries;
  s.scale = 0.25f;
  return s;
}

TEST_P(SelectBlocks, MatchesTheReference) {
  const SelectCase cases[] = {
      {"plain", 300, 1500, 2, 1, 32, selection_of(64, 64, 0.6)},
      {"text in front", 500, 1570, 4, 2, 16, selection_of(64, 64, 0.5, 70)},
      {"sound behind", 500, 1570, 2, 2, 16, selection_of(64, 32, 0.75, 70, 100, 100)},
      {"wide query blocks", 700, 900, 2, 2, 64, selection_of(256, 16, 0.8)},
      {"query blocks of one cell", 100, 2000, 2, 1, 24, selection_of(16, 128, 0.5)},
      {"huge blocks", 3000, 9000, 1, 1, 8, selection_of(2048, 512, 0.5)},
      {"everything protected", 100, 400, 1, 1, 8, selection_of(64, 64, 0.75, 400)},
      {"prefix and tail overlap", 100, 400, 1, 1, 8, selection_of(64, 64, 0.75, 300, 300)},
  };
  for (const SelectCase& c : cases) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(testing::Message() << c.what << " " << name_of(dtype));
      TestTensor q(*backend_, {c.queries, c.heads, c.d}, dtype, Layout::outer_gaps);
      TestTensor k(*backend_, {c.keys, c.kv_heads, c.d}, dtype, Layout::outer_gaps);
      q.randomise(1, 3);
      k.randomise(2, 3);
      const reference::Selection want = reference::select_blocks(q.host(), k.host(), c.selection);
      const Selected got = run(*backend_, q, k, c.selection, true);
      // Pooled values of about 1 in products over D: a few units of the score's size.
      ASSERT_EQ(got.scores.size(), want.scores.size());
      for (size_t i = 0; i < want.scores.size(); ++i) {
        ASSERT_NEAR(got.scores[i], want.scores[i], 1e-5 * (1 + std::fabs(want.scores[i])));
      }
      EXPECT_EQ(got.lists, want.indices);
      EXPECT_EQ(run(*backend_, q, k, c.selection, false).lists, want.indices) << "without scores";
    }
  }
}

// The budget rounds up to multiples of 8 and never exceeds what is there.
TEST_P(SelectBlocks, Budget) {
  EXPECT_EQ(selection_of(64, 64, 0.75).budget(0), 0);
  EXPECT_EQ(selection_of(64, 64, 0.75).budget(5), 5);
  EXPECT_EQ(selection_of(64, 64, 0.75).budget(32), 8);
  EXPECT_EQ(selection_of(64, 64, 0.75).budget(33), 16);
  EXPECT_EQ(selection_of(64, 64, 0.75).budget(292), 80);
  EXPECT_EQ(selection_of(64, 64, 0).budget(31), 31);
  EXPECT_EQ(selection_of(64, 64, 0.999).budget(100), 8);
}

TEST_P(SelectBlocks, ProtectedTailQueriesAreDense) {
  TestTensor q(*backend_, {320, 1, 16}, DType::f32), k(*backend_, {64 * 40, 1, 16}, DType::f32);
  q.randomise(3);
  k.randomise(4);
  // 65 trailing rows touch the last two of five blocks.
  const Selected got = run(*backend_, q, k, selection_of(64, 64, 0.9, 0, 0, 65), false);
  std::vector<size_t> sizes;
  for (const auto& list : got.lists) sizes.push_back(list.size());
  EXPECT_EQ(sizes, (std::vector<size_t>{8, 8, 8, 40, 40}));
}

TEST_P(SelectBlocks, TiesAreSpread) {
  TestTensor q(*backend_, {64, 1, 16}, DType::f32), k(*backend_, {64 * 100, 1, 16}, DType::f32);
  q.assign(reference::Values(64 * 16, 0.5));
  k.assign(reference::Values(6400 * 16, 0.5));
  const Selected got = run(*backend_, q, k, selection_of(64, 64, 0.75), false);
  ASSERT_EQ(got.lists[0].size(), 32u);
  // An even spread: every quarter of the video keeps its share within a factor of two.
  int quarters[4] = {};
  for (int32_t id : got.lists[0]) ++quarters[id / 25];
  for (int count : quarters)
    EXPECT_TRUE(count >= 4 && count <= 16) << count << " of 8 in a quarter";
  EXPECT_EQ(got.lists, run(*backend_, q, k, selection_of(64, 64, 0.75), false).lists);
}

TEST_P(SelectBlocks, NonFiniteRowsKeepTheFirstCandidates) {
  TestTensor q(*backend_, {128, 1, 16}, DType::f32), k(*backend_, {64 * 50, 1, 16}, DType::f32);
  q.randomise(5);
  k.randomise(6);
  reference::Values values = reference::values(q.host());
  values[70 * 16] = NAN;  // poisons the second query block's row only
  q.assign(values);
  const Selected got = run(*backend_, q, k, selection_of(64, 64, 0.9, 64), false);
  std::vector<int32_t> first(9);
  std::iota(first.begin(), first.end(), 0);
  EXPECT_EQ(got.lists[1], first);
  EXPECT_NE(got.lists[0], first);
}

// What every row keeps covers all selected blocks of one plan: the lists feed attention as they
// are.
TEST_P(SelectBlocks, AllKeptNeedsNoScores) {
  TestTensor q(*backend_, {70, 2, 16}, DType::f32), k(*backend_, {130, 1, 16}, DType::f32);
  reference::Values poison(70 * 32, NAN);
  q.assign(poison);
  k.randomise(7);
  for (const auto& list : run(*backend_, q, k, selection_of(64, 64, 0.75), false).lists) {
    EXPECT_EQ(list, (std::vector<int32_t>{0, 1, 2}));
  }
}

}  // namespace
}  // namespace orrery::conformance
