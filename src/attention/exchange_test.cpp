// Ranks that share the sequence must give the one-rank output bit for bit: after the exchange each
// runs the same arithmetic on whole sequences.
#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "attention/attention.h"
#include "attention/test_call.h"
#include "backend/dry_run.h"
#include "dist/thread_comm.h"

namespace orrery {
namespace {

using testing::block_sparse;
using testing::call;
using testing::CallData;
using testing::CallShape;
using testing::gen_by;
using testing::generate;
using testing::host_arena;
using testing::same_bits;

constexpr AttentionSite kGen{1, AttentionRole::gen};

constexpr size_t kArena = size_t{8} << 20;

std::unique_ptr<Backend> one_thread() {
  cpu::CpuOptions options;
  options.num_threads = 1;
  return cpu::make_cpu_backend(options);
}

std::vector<int> all(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::vector<float> one_rank(const AttentionStrategy& strategy, const CallData& data) {
  const auto backend = one_thread();
  Arena arena = host_arena();
  Attention attention(*backend, strategy, data.shape.sequence, data.shape.head_dim);
  attention.begin_step(0, 1);
  return call(attention, arena, data, kGen);
}

// The rows of all ranks joined. Padding rows and memory that nobody has written are full of NaN.
// Rows travel in parts of `part_rows` or more.
std::vector<float> many_ranks(const AttentionStrategy& strategy, const CallData& data, int ranks,
                              int64_t part_rows = std::numeric_limits<int64_t>::max()) {
  const CallShape& shape = data.shape;
  std::vector<std::vector<float>> parts(static_cast<size_t>(ranks));
  ThreadWorld world(ranks, part_rows);
  world.run([&](int rank) {
    const auto backend = one_thread();
    const auto comm = world.group(rank, all(ranks));
    const SequenceShare share = shape.sequence.share(rank, ranks);
    const auto mine = [&](View x) {
      Tensor part = allocate_host_tensor({share.padded_rows, x.dim(1), x.dim(2)}, DType::f32);
      std::fill_n(part.view.as<float>(), part.view.numel(), NAN);
      std::memcpy(part.view.mut(), x.slice(0, share.begin, share.rows).data,
                  size_t(share.rows * x.dim(1) * x.dim(2) * 4));
      return part;
    };
    const Tensor q = mine(data.q.view), k = mine(data.k.view), v = mine(data.v.view);
    Buffer memory = allocate_host(kArena);
    std::memset(memory.data(), 0xff, kArena);
    Arena arena(std::move(memory));
    Attention attention(*backend, strategy, shape.sequence, shape.head_dim, comm.get());
    attention.begin_step(0, 1);
    const View out =
        generate(attention, arena, q.view, k.view, v.view, data.und_k.view, data.und_v.view, kGen);
    const float* first = out.as<float>();
    parts[size_t(rank)].assign(first, first + share.rows * shape.heads * shape.head_dim);
  });
  std::vector<float> joined;
  for (const auto& part : parts) joined.insert(joined.end(), part.begin(), part.end());
  return joined;
}

struct Method {
  const char* name;
  std::string json;
};

std::vector<Method> methods() {
  return {
      {"dense native", R"("native")"},
      {"dense reference", R"("reference")"},
      {"topk native",
       block_sparse(R"({"name": "block_topk", "config": {"target_sparsity": 0.6}})")},
      {"topk reference",
       block_sparse(R"({"name": "block_topk", "config": {"target_sparsity": 0.6}})", "reference")},
      {"group topk", block_sparse(R"({"name": "block_topk", "config": {"target_sparsity": 0.6, )"
                                  R"("share_kv_group": true}})")},
      {"window", block_sparse(R"({"name": "sliding_tile", "config": {"window": [3, 1, 1]}})")},
      {"threshold", block_sparse(R"({"name": "threshold", "config": {"mass": 0.6}})")},
  };
}

// B71: lengths that ranks do not divide, sound and actions in the sequence, an empty prompt.
TEST(Exchange, EqualsOneRankBitForBit) {
  CallShape shape;
  shape.sequence.control_tokens = 3;
  shape.sequence.grid = {5, 7, 8};
  shape.sequence.sound_tokens = 4;
  shape.sequence.action_tokens = 2;  // 289 rows, 16 blocks of keys and the tail
  shape.heads = 12;
  shape.head_dim = 8;
  for (const Method& method : methods()) {
    const AttentionStrategy strategy = gen_by(method.json);
    for (int64_t kv_heads : {1, 2, 4, 6}) {
      shape.kv_heads = kv_heads;
      shape.text = kv_heads == 2 ? 0 : 11;
      const CallData data(shape);
      const std::vector<float> want = one_rank(strategy, data);
      for (int ranks : {1, 2, 3, 4}) {
        if (strategy.method(0, 1, AttentionRole::gen).needs_whole_groups() && kv_heads % ranks) {
          EXPECT_THROW(many_ranks(strategy, data, ranks), Error);
          continue;
        }
        EXPECT_TRUE(same_bits(many_ranks(strategy, data, ranks), want))
            << method.name << ", " << kv_heads << " KV heads, " << ranks << " ranks";
      }
    }
  }
}

// Parts of a share that travel one by one, the last of them shorter, a key/value head that two
// ranks read.
TEST(Exchange, PartsEqualTheWhole) {
  CallShape shape;
  shape.sequence.grid = {7, 11, 13};
  shape.sequence.sound_tokens = 6;  // 1007 rows: shares of 504 and 252
  shape.heads = 8;
  shape.head_dim = 8;
  shape.text = 5;
  for (int64_t kv_heads : {2, 4}) {
    shape.kv_heads = kv_heads;
    const CallData data(shape);
    for (const char* method : {R"("native")", R"("reference")"}) {
      const AttentionStrategy strategy = gen_by(method);
      const std::vector<float> want = one_rank(strategy, data);
      for (int ranks : {2, 4}) {
        for (int64_t part_rows : {64, 200}) {
          EXPECT_TRUE(same_bits(many_ranks(strategy, data, ranks, part_rows), want))
              << method << ", " << kv_heads << " KV heads, " << ranks << " ranks, parts of "
              << part_rows;
        }
      }
    }
  }
}

// B71: fewer tokens than ranks, so that some ranks have none.
TEST(Exchange, FewerTokensThanRanks) {
  CallShape shape;
  shape.sequence.grid = {1, 1, 2};
  shape.heads = 8;
  shape.text = 5;
  const CallData data(shape);
  const AttentionStrategy strategy = gen_by(R"("native")");
  const std::vector<float> want = one_rank(strategy, data);
  for (int ranks : {2, 4, 8}) {
    EXPECT_TRUE(same_bits(many_ranks(strategy, data, ranks), want)) << ranks;
  }
}

// B72: 28 query heads over 7 key/value heads on two ranks cut the fourth group apart.
TEST(Exchange, AGroupThatRanksCutApart) {
  CallShape shape;
  shape.sequence.grid = {1, 5, 7};
  shape.heads = 28;
  shape.kv_heads = 7;
  shape.head_dim = 8;
  shape.text = 3;
  const CallData data(shape);
  const AttentionStrategy strategy = gen_by(R"("native")");
  EXPECT_TRUE(same_bits(many_ranks(strategy, data, 2), one_rank(strategy, data)));
}

TEST(Exchange, RefusesHeadsThatRanksDoNotDivide) {
  CallShape shape;
  shape.sequence.grid = {1, 5, 7};
  shape.heads = 4;
  const CallData data(shape);
  try {
    many_ranks(gen_by(R"("native")"), data, 3);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("degrees that do: 1, 2, 4"), std::string::npos);
  }
}

// The text tower is whole on every rank: no exchange, so no other rank is needed.
TEST(Exchange, TextStaysWhole) {
  CallShape shape;
  shape.sequence.sound_tokens = 9;
  const CallData data(shape);
  const AttentionStrategy strategy = gen_by(R"("native")");
  std::vector<std::vector<float>> outputs(2);
  ThreadWorld world(2);
  world.run([&](int rank) {
    const auto backend = one_thread();
    const auto comm = world.group(rank, {0, 1});
    Arena arena = host_arena();
    Sequence sequence;
    sequence.grid = {4, 4, 4};
    Attention attention(*backend, strategy, sequence, 16, comm.get());
    outputs[size_t(rank)] = call(attention, arena, data, {0, AttentionRole::und});
  });
  const auto backend = one_thread();
  Arena arena = host_arena();
  Attention attention(*backend, strategy, shape.sequence, 16);
  const std::vector<float> want = call(attention, arena, data, {0, AttentionRole::und});
  EXPECT_TRUE(same_bits(outputs[0], want));
  EXPECT_TRUE(same_bits(outputs[1], want));
}

// Memory of one rank is known without the others.
TEST(Exchange, DryRunNeedsNoOtherRank) {
  ThreadWorld world(4);
  const auto comm = world.group(1, all(4));
  DryRunBackend dry(DeviceKind::cpu);
  Arena arena = Arena::measuring(DeviceKind::cpu);
  Sequence sequence;
  sequence.grid = {3, 5, 7};
  const AttentionStrategy strategy = gen_by(R"("native")");
  Attention attention(dry, strategy, sequence, 16, comm.get());
  const int64_t rows = sequence.share(1, 4).padded_rows;
  const MutView und = arena.make({6, 2, 16}, DType::f32);
  const MutView q = arena.make({rows, 8, 16}, DType::f32);
  const MutView kv = arena.make({rows, 2, 16}, DType::f32);
  generate(attention, arena, q, kv, kv, und, und, kGen);
  EXPECT_EQ(dry.stats().find("attention")->second.flops, 4.0 * 105 * 111 * 2 * 16);
}

}  // namespace
}  // namespace orrery
