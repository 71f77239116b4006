#include <cmath>
#include <cstring>
#include <numeric>
#include <set>

#include "base/error.h"
#include "conformance/harness.h"

namespace orrery::conformance {
namespace {

ORRERY_CONFORMANCE(SelectBlocks);

// Runs the selector; lists come back per (list, row).
struct Selected {
  std::vector<std::vector<int32_t>> lists;
  reference::Values scores;
};

Selected run(Backend& backend, const TestTensor& q, const TestTensor& k,
             const BlockSelection& selection, bool with_scores, int64_t spare = 3) {
  const int64_t lists = q.host().dim(1) / selection.heads_per_list;
  const int64_t rows = (q.host().dim(0) + selection.block_q - 1) / selection.block_q;
  const int64_t blocks = (k.host().dim(0) + selection.block_k - 1) / selection.block_k;
  const Shape list_shape{lists, rows, blocks + spare}, count_shape{lists, rows};
  Tensor ids = backend.allocate_tensor(list_shape, DType::i32);
  Tensor counts = backend.allocate_tensor(count_shape, DType::i32);
  Tensor host_ids = allocate_host_tensor(list_shape, DType::i32);
  Tensor host_counts = allocate_host_tensor(count_shape, DType::i32);
  TestTensor scores = poisoned(backend, {lists, rows, blocks}, DType::f32);
  backend.select_blocks(ids.view, counts.view, q.device(), k.device(), selection,
                        with_scores ? scores.device() : MutView{});
  backend.download(host_ids.view, ids.view);
  backend.download(host_counts.view, counts.view);
  EXPECT_TRUE(scores.download());
  Selected result;
  for (int64_t i = 0; i < lists * rows; ++i) {
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
                            int64_t tail = 0, int64_t tail_queries = 0, int64_t head_queries = 0) {
  BlockSelection s;
  s.block_q = block_q;
  s.block_k = block_k;
  s.target_sparsity = sparsity;
  s.protected_keys = prefix;
  s.protected_tail_keys = tail;
  s.protected_tail_queries = tail_queries;
  s.protected_head_queries = head_queries;
  s.scale = 0.25f;
  return s;
}

BlockSelection shared(BlockSelection selection, int64_t heads_per_list) {
  selection.heads_per_list = heads_per_list;
  return selection;
}

BlockSelection by_mass(BlockSelection selection, double mass) {
  selection.mass = mass;
  return selection;
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
      {"controls in front", 500, 1570, 2, 1, 64, selection_of(64, 64, 0.75, 70, 0, 0, 130)},
      {"controls and sound", 700, 1570, 2, 1, 64, selection_of(64, 64, 0.75, 199, 30, 30, 129)},
      {"every query protected", 300, 1570, 2, 1, 64, selection_of(64, 64, 0.75, 70, 9, 200, 120)},
      {"blocks of one row each", 40, 1000, 2, 2, 64, selection_of(64, 64, 0.5, 3)},
      {"two heads share", 300, 1500, 4, 1, 64, shared(selection_of(64, 64, 0.6), 2)},
      {"four heads share, sound behind", 500, 1570, 8, 2, 64,
       shared(selection_of(64, 64, 0.75, 70, 100, 100, 65), 4)},
      {"shared lists of wide query blocks", 500, 1501, 4, 2, 128,
       shared(selection_of(128, 64, 0.7, 1), 2)},
      {"shared lists of small blocks", 200, 700, 6, 2, 24,
       shared(selection_of(16, 32, 0.5, 20), 3)},
      {"by mass", 300, 1500, 2, 1, 64, by_mass(selection_of(64, 64, 0), 0.5)},
      {"by mass of small blocks", 200, 900, 2, 1, 24, by_mass(selection_of(16, 16, 0), 0.8)},
      {"by mass, all protected", 500, 1570, 4, 2, 128,
       by_mass(selection_of(64, 64, 0, 70, 100, 100, 65), 0.7)},
      {"by mass of two heads", 500, 1570, 4, 2, 64,
       by_mass(shared(selection_of(128, 64, 0, 70, 10, 10), 2), 0.6)},
      {"by a mass that the protected blocks hold", 100, 1000, 1, 1, 64,
       by_mass(selection_of(64, 64, 0, 900), 0.2)},
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
      // Pooled values of about 1 in products over D: a few units of the score's size, or of one
      // where approximate logarithms meet scores near zero.
      ASSERT_EQ(got.scores.size(), want.scores.size());
      for (size_t i = 0; i < want.scores.size(); ++i) {
        ASSERT_NEAR(got.scores[i], want.scores[i], 2e-5 * (1 + std::fabs(want.scores[i])));
      }
      EXPECT_EQ(got.lists, want.indices);
      EXPECT_EQ(run(*backend_, q, k, c.selection, false).lists, want.indices) << "without scores";
    }
  }
}

// Random shapes, blocks, sharing and protection, all at once. A tail of protected keys without
// protected queries, and the reverse, are as good as any.
TEST_P(SelectBlocks, RandomCasesMatchTheReference) {
  std::mt19937 engine(5);
  const auto pick = [&](std::initializer_list<int64_t> values) {
    return values.begin()[engine() % values.size()];
  };
  for (int turn = 0; turn < 12; ++turn) {
    const int64_t queries = 1 + int64_t(engine() % 400), keys = 1 + int64_t(engine() % 1800);
    const int64_t kv_heads = pick({1, 2}), group = pick({1, 2, 4}), d = pick({64, 128, 40});
    BlockSelection selection =
        selection_of(pick({64, 128}), pick({64, 128}), double(pick({25, 50, 75, 90})) / 100,
                     pick({0, 1, 64, 100, 1000}), pick({0, 0, 1, 64, 200}), pick({0, 0, 1, 100}),
                     pick({0, 0, 1, 64, 65}));
    selection.heads_per_list = group > 1 ? pick({1, 2, group}) : 1;
    if (turn % 3 == 0) selection.mass = double(pick({30, 60, 90})) / 100;
    const DType dtype = turn % 2 == 0 ? DType::bf16 : DType::f32;
    SCOPED_TRACE(testing::Message()
                 << "turn " << turn << ": " << queries << " x " << keys << ", " << group * kv_heads
                 << "/" << kv_heads << " heads of " << d << " " << name_of(dtype) << ", blocks "
                 << selection.block_q << " x " << selection.block_k << ", "
                 << selection.heads_per_list << " heads a list, mass " << selection.mass);
    TestTensor q(*backend_, {queries, group * kv_heads, d}, dtype, Layout::outer_gaps);
    TestTensor k(*backend_, {keys, kv_heads, d}, dtype, Layout::outer_gaps);
    q.randomise(10 + uint64_t(turn), 3);
    k.randomise(30 + uint64_t(turn), 3);
    const reference::Selection want = reference::select_blocks(q.host(), k.host(), selection);
    EXPECT_EQ(run(*backend_, q, k, selection, false).lists, want.indices);
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

// Controls in front: 65 leading rows touch the first two of five blocks.
TEST_P(SelectBlocks, ProtectedHeadQueriesAreDense) {
  for (int64_t d : {16, 64}) {
    for (int64_t sharing : {1, 2}) {
      for (DType dtype : {DType::f32, DType::bf16}) {
        TestTensor q(*backend_, {320, 2, d}, dtype), k(*backend_, {64 * 40, 1, d}, dtype);
        q.randomise(3);
        k.randomise(4);
        const BlockSelection selection = shared(selection_of(64, 64, 0.9, 0, 0, 1, 65), sharing);
        const Selected got = run(*backend_, q, k, selection, false);
        std::vector<size_t> sizes;
        for (const auto& list : got.lists) sizes.push_back(list.size());
        std::vector<size_t> want;
        for (int64_t list = 0; list < 2 / sharing; ++list) {
          want.insert(want.end(), {40, 40, 8, 8, 40});
        }
        EXPECT_EQ(sizes, want) << d << " " << sharing << " " << name_of(dtype);
      }
    }
  }
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

// The same with heads that share, where one head poisons the row, and by mass, where it keeps all.
TEST_P(SelectBlocks, NonFiniteRowsOfSharedListsAndOfMass) {
  for (int64_t d : {16, 64}) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(testing::Message() << d << " " << name_of(dtype));
      TestTensor q(*backend_, {128, 2, d}, dtype), k(*backend_, {64 * 50, 1, d}, dtype);
      q.randomise(5);
      k.randomise(6);
      reference::Values values = reference::values(q.host());
      values[size_t(70 * 2 * d + d)] = NAN;  // row 70 of the second head: the second query block
      q.assign(values);
      std::vector<int32_t> first(9), all(50);
      std::iota(first.begin(), first.end(), 0);
      std::iota(all.begin(), all.end(), 0);
      const Selected joint = run(*backend_, q, k, shared(selection_of(64, 64, 0.9, 64), 2), false);
      EXPECT_EQ(joint.lists[1], first);
      EXPECT_NE(joint.lists[0], first);
      const Selected mass = run(*backend_, q, k, by_mass(selection_of(64, 64, 0, 64), 0.3), false);
      EXPECT_EQ(mass.lists[3], all);
      for (int row : {0, 1, 2}) EXPECT_LT(mass.lists[size_t(row)].size(), 50u) << row;
    }
  }
}

TEST_P(SelectBlocks, TiesByMassAreSpread) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    TestTensor q(*backend_, {64, 1, 64}, dtype), k(*backend_, {64 * 16, 1, 64}, dtype);
    q.assign(reference::Values(64 * 64, 0.5));
    k.assign(reference::Values(64 * 16 * 64, 0.5));
    // 0.3 of 16 equal blocks: 5, in the order of id * 2654435769 modulo 2^32.
    EXPECT_EQ(run(*backend_, q, k, by_mass(selection_of(64, 64, 0), 0.3), false).lists[0],
              (std::vector<int32_t>{0, 2, 5, 10, 13}));
  }
}

TEST_P(SelectBlocks, RefusesWhatDoesNotFit) {
  TestTensor q(*backend_, {64, 6, 16}, DType::f32), k(*backend_, {64 * 20, 2, 16}, DType::f32);
  Tensor ids = backend_->allocate_tensor({6, 1, 20}, DType::i32);
  Tensor counts = backend_->allocate_tensor({6, 1}, DType::i32);
  const auto refusal = [&](const BlockSelection& selection) {
    try {
      backend_->select_blocks(ids.view, counts.view, q.device(), k.device(), selection);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_NE(refusal(shared(selection_of(64, 64, 0.5), 2)).find("must divide the 3 of a key/value"),
            std::string::npos);
  EXPECT_NE(refusal(by_mass(selection_of(64, 64, 0.5), 1.0)).find("mass 1 is not in [0, 1)"),
            std::string::npos);
  EXPECT_NE(refusal(shared(selection_of(64, 64, 0.5), 3)).find("indices is"), std::string::npos)
      << "six lists where two are wanted";
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
