#include "attention/method.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "attention/block_rule.h"
#include "attention/test_call.h"
#include "backend/dry_run.h"

namespace orrery {
namespace {

using testing::CallData;
using testing::CallShape;

BlockSparseOptions blocks(int64_t q, int64_t k, int reuse = 1) {
  BlockSparseOptions options;
  options.block_q = q;
  options.block_k = k;
  options.reuse_steps = reuse;
  options.kernel = {"native", "native"};
  return options;
}

// Plans and runs one call, with keys [text | controls | video | tail] as the facade lays them out.
struct PlannedCall {
  PlannedCall(const AttentionMethod& method, const CallData& data) : shape(data.shape) {
    const int64_t keys = shape.text + shape.sequence.size();
    k = allocate_host_tensor({keys, shape.kv_heads, shape.head_dim}, DType::f32);
    v = allocate_host_tensor(k.view.shape, DType::f32);
    for (const auto& [whole, und, gen] : {std::tuple{k.view, data.und_k.view, data.k.view},
                                          {v.view, data.und_v.view, data.v.view}}) {
      std::memcpy(whole.mut(), und.data, size_t(und.bytes()));
      std::memcpy(whole.slice(0, shape.text, shape.sequence.size()).mut(), gen.data,
                  size_t(gen.bytes()));
    }
    q = data.q.view;
    scale = float(1 / std::sqrt(double(shape.head_dim)));
    planned = method.plan(
        {{}, {}, shape.text, scale, q, k.view, shape.sequence, *backend, arena, selections});
    if (planned.mask) {
      planned.plan.mask = &*planned.mask;
      for (int64_t list = 0; list < planned.mask->counts.numel(); ++list) {
        const int32_t* first =
            planned.mask->indices.as<int32_t>() + list * planned.mask->indices.dim(2);
        lists.emplace_back(first, first + planned.mask->counts.as<int32_t>()[list]);
      }
    }
    out = arena.make(q.shape, DType::f32);
    backend->attention(out, q, k.view, v.view, planned.plan);
  }

  const std::vector<int32_t>& list(int64_t head, int64_t row) const {
    const BlockMask& mask = *planned.mask;
    return lists[size_t(head / mask.heads_per_list(shape.heads) * mask.indices.dim(1) + row)];
  }

  // |out - exact| / |exact| in double precision over the chosen blocks of every `stride`-th row.
  double error(int64_t stride = 1) const {
    double difference = 0, norm = 0;
    const int64_t keys = k.view.dim(0), d = shape.head_dim;
    for (int64_t head = 0; head < shape.heads; ++head) {
      const int64_t kv = head / (shape.heads / shape.kv_heads);
      for (int64_t row = head % stride; row < q.dim(0); row += stride) {
        std::vector<int64_t> seen;
        for (int64_t key = 0; key < keys; ++key) {
          const auto has = [&](const std::vector<int32_t>& l) {
            return std::binary_search(l.begin(), l.end(), int32_t(key / planned.mask->block_k));
          };
          if (!planned.mask || has(list(head, row / planned.mask->block_q))) seen.push_back(key);
        }
        std::vector<double> weights;
        double sum = 0;
        for (int64_t key : seen) {
          double dot = 0;
          for (int64_t i = 0; i < d; ++i) {
            dot += double(q.as<float>()[(row * shape.heads + head) * d + i]) *
                   double(k.view.as<float>()[(key * shape.kv_heads + kv) * d + i]);
          }
          weights.push_back(std::exp(dot * double(scale)));
          sum += weights.back();
        }
        for (int64_t i = 0; i < d; ++i) {
          double exact = 0;
          for (size_t n = 0; n < seen.size(); ++n) {
            exact += weights[n] / sum *
                     double(v.view.as<float>()[(seen[n] * shape.kv_heads + kv) * d + i]);
          }
          const double delta = double(out.as<float>()[(row * shape.heads + head) * d + i]) - exact;
          difference += delta * delta;
          norm += exact * exact;
        }
      }
    }
    return std::sqrt(difference / norm);
  }

  // The contract of lists: sorted, unique, in range, at least one; protected blocks are kept and
  // dense rows complete; `kept_blocks` is what the lists hold.
  void check_contract() const {
    ASSERT_TRUE(planned.mask.has_value());
    const BlockMask& mask = *planned.mask;
    const AttentionCall call{{},       {},    shape.text, scale, q, k.view, shape.sequence,
                             *backend, arena, selections};
    BlockSparseOptions options;
    options.block_q = mask.block_q;
    options.block_k = mask.block_k;
    const BlockGrid grid = rule_of(call, options).grid(q.dim(0), k.view.dim(0));
    EXPECT_EQ(planned.all_blocks, shape.heads * grid.rows * grid.blocks);
    int64_t kept = 0;
    for (int64_t head = 0; head < shape.heads; ++head) {
      for (int64_t row = 0; row < grid.rows; ++row) {
        const std::vector<int32_t>& l = list(head, row);
        kept += int64_t(l.size());
        ASSERT_FALSE(l.empty());
        EXPECT_TRUE(std::is_sorted(l.begin(), l.end()));
        EXPECT_EQ(std::adjacent_find(l.begin(), l.end()), l.end());
        EXPECT_GE(l.front(), 0);
        EXPECT_LT(l.back(), grid.blocks);
        const std::set<int32_t> in(l.begin(), l.end());
        for (int32_t block = 0; block < grid.blocks; ++block) {
          const int64_t begin = block * mask.block_k;
          const int64_t end = std::min(begin + mask.block_k, k.view.dim(0));
          const bool is_protected = begin < shape.text + shape.sequence.control_tokens ||
                                    end > k.view.dim(0) - shape.sequence.tail_tokens();
          const bool dense_row = row * mask.block_q < shape.sequence.control_tokens ||
                                 std::min((row + 1) * mask.block_q, q.dim(0)) >
                                     q.dim(0) - shape.sequence.tail_tokens();
          if (is_protected || dense_row) {
            EXPECT_TRUE(in.count(block)) << row << ' ' << block;
          }
        }
      }
    }
    EXPECT_EQ(kept_blocks(), kept);
  }

  int64_t kept_blocks() const { return kept_blocks_of(planned, shape.heads, *backend); }

  CallShape shape;
  std::unique_ptr<Backend> backend = cpu::make_cpu_backend();
  mutable Arena arena = testing::host_arena();
  mutable SelectionCache selections;
  Tensor k, v;
  View q;
  float scale = 0;
  PlannedAttention planned;
  std::vector<std::vector<int32_t>> lists;
  MutView out;
};

// f32 against double: sums of up to 5000 products.
constexpr double kTolerance = 2e-5;

CallShape shape_of(std::array<int64_t, 3> grid, int64_t text, int64_t controls = 0,
                   int64_t sound = 0, int64_t action = 0) {
  CallShape shape;
  shape.sequence.grid = grid;
  shape.sequence.control_tokens = controls;
  shape.sequence.sound_tokens = sound;
  shape.sequence.action_tokens = action;
  shape.text = text;
  return shape;
}

// Spec, block_topk rule 3: protected blocks, plus the budget of the rest.
TEST(BlockTopk, KeepsProtectedBlocksAndTheBudget) {
  // 37 text and 3 control keys touch 3 blocks of 16; 5 sound and 4 action rows touch the last 2.
  const CallData data(shape_of({8, 7, 9}, 37, 3, 5, 4));
  const PlannedCall call(*make_block_topk(blocks(16, 16), 0.75), data);
  call.check_contract();
  const int64_t keys = 37 + 3 + 504 + 9;      // 553: 35 blocks
  const int64_t tail = 35 - (keys - 9) / 16;  // block 34 only
  const int64_t candidates = 35 - 3 - tail;
  ASSERT_EQ(tail, 1);
  // min(N, 8 ceil(ceil(N / 4) / 8)) = 8 of 31.
  EXPECT_EQ(candidates, 31);
  // 33 query blocks; the first (controls) and the last two (tail rows from 507 on) are dense.
  const int64_t rows = (3 + 504 + 9 + 15) / 16;
  EXPECT_EQ(call.kept_blocks(), 4 * (3 * 35 + (rows - 3) * (3 + 1 + 8)));
  EXPECT_LT(call.error(), kTolerance);
}

// B63: key lengths that end within a block; B64: query and key lengths are independent.
TEST(BlockSparse, RaggedTailsEqualTheExactSum) {
  for (int64_t remainder : {0, 1, 32, 63}) {
    // 1280 video keys behind the text: 20 blocks of 64 and the remainder.
    const CallData data(shape_of({4, 16, 20}, remainder));
    for (const auto& method :
         {make_block_topk(blocks(64, 64), 0.9), make_threshold(blocks(64, 64), 0.5),
          make_sliding_tile(blocks(64, 64), {1, 1, 1})}) {
      const PlannedCall call(*method, data);
      call.check_contract();
      EXPECT_LT(call.kept_blocks(), call.planned.all_blocks) << method->description();
      EXPECT_LT(call.error(7), kTolerance) << method->description() << ' ' << remainder;
    }
  }
}

// B64: a grid that no tile divides, a single frame, text in front.
TEST(BlockSparse, TilesThatNeedClippingInEveryAxis) {
  for (const std::array<int64_t, 3> grid : {std::array<int64_t, 3>{5, 23, 40}, {1, 23, 40}}) {
    CallShape shape = shape_of(grid, 21);
    shape.heads = 2;
    shape.kv_heads = 1;
    shape.sequence.order.tile = {4, 4, 4};
    const CallData data(shape);
    for (const auto& method :
         {make_block_topk(blocks(64, 64), 0.75), make_sliding_tile(blocks(64, 64), {1, 3, 3})}) {
      const PlannedCall call(*method, data);
      call.check_contract();
      EXPECT_LT(call.error(97), kTolerance) << method->description();
    }
  }
}

// Nothing to choose: no mask, no scores, and the records say that every block was kept.
TEST(BlockSparse, AllKeptNeedsNoSelection) {
  const CallData small(shape_of({1, 4, 16}, 10));  // 5 blocks of 16: within the budget's 8
  const CallData large(shape_of({4, 8, 16}, 10));
  const CallData guarded(shape_of({1, 4, 4}, 30, 0, 300));
  for (const auto& [method, data] : {std::pair{make_block_topk(blocks(16, 16), 0.75), &small},
                                     {make_block_topk(blocks(16, 16), 0.0), &large},
                                     {make_threshold(blocks(16, 16), 1.0), &large},
                                     {make_sliding_tile(blocks(16, 16), {9, 9, 9}), &large},
                                     {make_block_topk(blocks(512, 16), 0.9), &guarded}}) {
    const PlannedCall call(*method, *data);
    EXPECT_FALSE(call.planned.mask.has_value()) << method->description();
    EXPECT_EQ(call.kept_blocks(), call.planned.all_blocks);
    EXPECT_GT(call.planned.all_blocks, 0);
    EXPECT_EQ(call.backend->stats().count("attention_sparse"), 0u);
    if (data == &large && call.planned.plan.mask == nullptr) {
      EXPECT_EQ(call.backend->stats().count("select_blocks"), 0u) << method->description();
    }
  }
}

// B58: no keys and no queries at all.
TEST(BlockSparse, EmptySequences) {
  const CallData data(shape_of({0, 0, 0}, 0));
  for (const auto& method :
       {make_block_topk(blocks(16, 16), 0.75), make_threshold(blocks(16, 16), 0.5),
        make_sliding_tile(blocks(16, 16), {1, 1, 1})}) {
    const PlannedCall call(*method, data);
    EXPECT_FALSE(call.planned.mask.has_value());
    EXPECT_EQ(call.planned.all_blocks, 0);
  }
}

BlockSparseOptions shared(BlockSparseOptions options) {
  options.share_kv_group = true;
  return options;
}

// One list per key/value head. With one query head per group it is the list of that head.
TEST(SharedLists, HeadsOfAGroupUseOneList) {
  CallShape shape = shape_of({6, 8, 8}, 21, 0, 0, 3);
  shape.heads = 6;
  const CallData data(shape);
  for (const auto& [joint, own] : {std::pair{make_block_topk(shared(blocks(16, 16)), 0.75),
                                             make_block_topk(blocks(16, 16), 0.75)},
                                   std::pair{make_threshold(shared(blocks(16, 16)), 0.5),
                                             make_threshold(blocks(16, 16), 0.5)}}) {
    SCOPED_TRACE(joint->description());
    EXPECT_TRUE(joint->needs_whole_groups());
    EXPECT_NE(joint->description().find("one list per key/value head"), std::string::npos);
    const PlannedCall call(*joint, data);
    call.check_contract();
    EXPECT_LT(call.error(), kTolerance);
    EXPECT_EQ(call.planned.mask->indices.dim(0), 2) << "as many lists as key/value heads";
    const PlannedCall per_head(*own, data);
    int64_t differing = 0;
    for (int64_t row = 0; row < call.planned.mask->indices.dim(1); ++row) {
      differing += call.list(0, row) != per_head.list(0, row);
    }
    EXPECT_GT(differing, 0);
  }
  const PlannedCall call(*make_block_topk(shared(blocks(16, 16)), 0.75), data);
  const PlannedCall per_head(*make_block_topk(blocks(16, 16), 0.75), data);
  EXPECT_EQ(call.kept_blocks(), per_head.kept_blocks());

  shape.kv_heads = 6;
  const CallData single(shape);
  const PlannedCall grouped(*make_block_topk(shared(blocks(16, 16)), 0.75), single);
  const PlannedCall plain(*make_block_topk(blocks(16, 16), 0.75), single);
  EXPECT_EQ(grouped.lists, plain.lists);
}

// A head counts by where it looks, not by how large its scores are: a constant that one head's
// scores have more than another's (here: all its queries point along a direction that all keys
// share) does not make it decide.
TEST(SharedLists, AConstantInOneHeadsScoresDoesNotMatter) {
  CallShape shape = shape_of({16, 4, 4}, 0);
  shape.heads = 2;
  shape.kv_heads = 1;
  CallData data(shape);
  for (int64_t i = 0; i < 256; ++i) {
    data.k.view.as<float>()[i * 16] = 1;
    for (int64_t head = 0; head < 2; ++head) data.q.view.as<float>()[(i * 2 + head) * 16] = 0;
  }
  const PlannedCall before(*make_block_topk(shared(blocks(16, 16)), 0.6), data);
  for (int64_t i = 0; i < 256; ++i) data.q.view.as<float>()[(i * 2 + 1) * 16] = 40;  // + 10 nats
  const PlannedCall after(*make_block_topk(shared(blocks(16, 16)), 0.6), data);
  EXPECT_EQ(before.lists, after.lists);
}

// What the shared list is for: of all lists of its length it holds the most of the heads' shares.
TEST(SharedLists, KeepTheMostOfTheHeadsShares) {
  CallShape shape = shape_of({6, 8, 8}, 0);
  shape.heads = 4;
  shape.kv_heads = 2;
  const CallData data(shape);
  const PlannedCall call(*make_block_topk(shared(blocks(16, 16)), 0.75), data);
  BlockSelection rule;
  rule.block_q = rule.block_k = 16;
  rule.scale = call.scale;
  const int64_t rows = 24, count = 24;
  const MutView scores = call.arena.make({4, rows, count}, DType::f32);
  const MutView indices = call.arena.make({4, rows, count}, DType::i32);
  const MutView counts = call.arena.make({4, rows}, DType::i32);
  call.backend->select_blocks(indices, counts, call.q, call.k.view, rule, scores);
  for (int64_t group = 0; group < 2; ++group) {
    for (int64_t row = 0; row < rows; ++row) {
      std::vector<double> share(size_t(count), 0.0);
      for (int64_t head = 2 * group; head < 2 * group + 2; ++head) {
        const float* score = scores.as<float>() + (head * rows + row) * count;
        double total = 0;
        for (int64_t b = 0; b < count; ++b) total += std::exp(double(score[b]));
        for (int64_t b = 0; b < count; ++b) share[size_t(b)] += std::exp(double(score[b])) / total;
      }
      double held = 0, best = 0;
      for (int32_t b : call.list(2 * group, row)) held += share[size_t(b)];
      std::sort(share.begin(), share.end(), std::greater<>());
      for (size_t b = 0; b < call.list(2 * group, row).size(); ++b) best += share[b];
      EXPECT_NEAR(held, best, 1e-6) << "group " << group << ", row " << row;
    }
  }
}

// The fewest blocks that reach the share: without its weakest candidate a row falls short.
TEST(Threshold, KeepsTheFewestBlocksThatReachTheMass) {
  const CallShape shape = shape_of({6, 8, 8}, 21, 0, 0, 3);
  const CallData data(shape);
  double previous = 0;
  for (double mass : {0.3, 0.8}) {
    const PlannedCall call(*make_threshold(blocks(32, 16), mass), data);
    call.check_contract();
    EXPECT_LT(call.error(), kTolerance);
    EXPECT_GT(double(call.kept_blocks()), previous);
    previous = double(call.kept_blocks());

    const BlockMask& mask = *call.planned.mask;
    const int64_t rows = mask.indices.dim(1), count = mask.indices.dim(2);
    const MutView scores = call.arena.make({shape.heads, rows, count}, DType::f32);
    const MutView indices = call.arena.make({shape.heads, rows, count}, DType::i32);
    const MutView counts = call.arena.make({shape.heads, rows}, DType::i32);
    BlockSelection rule;
    rule.block_q = 32;
    rule.block_k = 16;
    rule.scale = call.scale;
    call.backend->select_blocks(indices, counts, call.q, call.k.view, rule, scores);
    for (int64_t head = 0; head < shape.heads; ++head) {
      for (int64_t row = 0; row + 1 < rows; ++row) {  // the last row is dense
        const float* score = scores.as<float>() + (head * rows + row) * count;
        double total = 0, kept = 0, weakest = INFINITY;
        for (int64_t b = 0; b < count; ++b) total += std::exp(double(score[b]));
        for (int32_t b : call.list(head, row)) {
          kept += std::exp(double(score[b]));
          const bool is_protected = b < 2 || b == count - 1;
          if (!is_protected) weakest = std::min(weakest, std::exp(double(score[b])));
        }
        EXPECT_GE(kept, mass * total * (1 - 1e-9));
        if (std::isfinite(weakest)) {
          EXPECT_LT(kept - weakest, mass * total);
        }
      }
    }
  }
}

TEST(Threshold, ARowThatCannotBeScoredKeepsEverything) {
  CallData data(shape_of({8, 4, 8}, 0));
  data.q.view.as<float>()[0] = NAN;  // head 0, row 0
  const PlannedCall call(*make_threshold(blocks(16, 16), 0.3), data);
  EXPECT_EQ(call.list(0, 0).size(), 16u);
  EXPECT_LT(call.list(1, 0).size(), 16u);
}

// Equal keys: those whose id times 2654435769 modulo 2^32 is smallest win, not the start of the
// video: 0, 13, 5, 10 and 2 of 16.
TEST(Threshold, TiesAreSpread) {
  CallData data(shape_of({16, 4, 4}, 0));
  std::fill_n(data.k.view.as<float>(), data.k.view.numel(), 0.5f);
  const PlannedCall call(*make_threshold(blocks(16, 16), 0.3), data);  // 5 of 16
  EXPECT_EQ(call.list(0, 8), (std::vector<int32_t>{0, 2, 5, 10, 13}));
}

// Nothing is chosen on the host: a device's calls look the same, and none reads memory.
TEST(BlockSparse, PlansOnADevice) {
  DryRunBackend device(DeviceKind::cuda);
  Arena arena = Arena::measuring(DeviceKind::cuda);
  SelectionCache selections;
  Sequence sequence;
  sequence.grid = {8, 8, 8};
  const MutView q = arena.make({512, 4, 16}, DType::bf16),
                k = arena.make({512, 2, 16}, DType::bf16);
  for (const auto& method :
       {make_block_topk(blocks(16, 16), 0.5), make_block_topk(shared(blocks(16, 16)), 0.5),
        make_threshold(blocks(16, 16), 0.5), make_threshold(shared(blocks(16, 16)), 0.5),
        make_sliding_tile(blocks(16, 16), {3, 3, 3})}) {
    device.reset_stats();
    const PlannedAttention planned =
        method->plan({{}, {}, 0, 0.25f, q, k, sequence, device, arena, selections});
    ASSERT_TRUE(planned.mask.has_value()) << method->description();
    EXPECT_EQ(planned.mask->indices.device, DeviceKind::cuda);
    EXPECT_EQ(device.stats().count("download"), 0u) << method->description();
  }
}

// Against a search over all pairs of tokens.
TEST(SlidingTile, KeepsTheBlocksOfTheWindow) {
  for (const std::array<int64_t, 3> tile : {std::array<int64_t, 3>{1, 1, 1}, {2, 3, 2}}) {
    for (const std::array<int64_t, 3> window : {std::array<int64_t, 3>{1, 1, 1}, {3, 1, 3}}) {
      CallShape shape = shape_of({5, 7, 6}, 9, 5, 0, 4);
      shape.sequence.order.tile = tile;
      const CallData data(shape);
      const PlannedCall call(*make_sliding_tile(blocks(16, 16), window), data);
      call.check_contract();
      EXPECT_EQ(call.planned.mask->indices.dim(0), 1) << "all heads share one list";
      EXPECT_LT(call.error(), kTolerance);

      // Raster order: the tile is a frame.
      const auto unit = shape.sequence.order.raster() ? std::array<int64_t, 3>{1, 7, 6} : tile;
      const auto stored = shape.sequence.permutation();
      const auto tile_of = [&](int64_t token) {
        const int64_t raster = stored.empty() ? token : stored[size_t(token)];
        return std::array<int64_t, 3>{raster / 42 / unit[0], raster / 6 % 7 / unit[1],
                                      raster % 6 / unit[2]};
      };
      const std::array<int64_t, 3> grid{5, 7, 6};
      const auto sees = [&](int64_t a, int64_t b) {
        for (size_t axis = 0; axis < 3; ++axis) {
          const int64_t tiles = (grid[axis] + unit[axis] - 1) / unit[axis];
          const int64_t size = std::min(window[axis], tiles);
          int64_t first = tile_of(a)[axis] - window[axis] / 2;
          first = std::max<int64_t>(0, std::min(first, tiles - size));
          if (tile_of(b)[axis] < first || tile_of(b)[axis] >= first + size) return false;
        }
        return true;
      };
      for (int64_t row = 1; row + 1 < call.planned.mask->indices.dim(1); ++row) {
        std::set<int32_t> want{0};                 // text and controls
        want.insert(int32_t((9 + 5 + 210) / 16));  // actions
        for (int64_t a = row * 16 - 5; a < std::min<int64_t>(row * 16 + 11, 210); ++a) {
          for (int64_t b = 0; b < 210; ++b) {
            if (sees(a, b)) want.insert(int32_t((14 + b) / 16));
          }
        }
        if ((row + 1) * 16 > 215) continue;  // touches an action row: dense
        EXPECT_EQ(std::set<int32_t>(call.list(0, row).begin(), call.list(0, row).end()), want)
            << "row " << row;
      }
    }
  }
}

}  // namespace
}  // namespace orrery
