// Every method of a strategy on the CUDA backend: outputs are those of double precision over the
// lists that the contract asks for, step after step, run as they are, recorded and replayed.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <optional>

#include "attention/attention.h"
#include "attention/test_call.h"
#include "base/error.h"
#include "conformance/harness.h"
#include "cuda/cuda_backend.h"
#include "reference/reference.h"

namespace orrery {
namespace {

using conformance::TestTensor;
using testing::block_sparse;

constexpr int64_t kText = 37, kControls = 20, kSound = 12, kHeads = 4, kKvHeads = 2, kHeadDim = 64;
constexpr int kSteps = 6;
// One rounding of the output to bf16, and the weights to bf16 before the second product.
constexpr double kTolerance = 5e-3;

struct Method {
  const char* name;
  std::string json;
  std::optional<BlockSelection> rule;  // none: lists that do not depend on the data
  int reuse = 1;
};

BlockSelection rule(int64_t block_q, int64_t block_k, int64_t heads_per_list, double mass = 0) {
  BlockSelection s;
  s.block_q = block_q;
  s.block_k = block_k;
  s.heads_per_list = heads_per_list;
  s.target_sparsity = 0.75;
  s.mass = mass;
  s.protected_keys = kText + kControls;
  s.protected_head_queries = kControls;
  s.protected_tail_keys = s.protected_tail_queries = kSound;
  s.scale = 0.125f;
  return s;
}

std::vector<Method> methods() {
  const std::string topk = R"({"name": "block_topk"})";
  const std::string shared = R"({"name": "block_topk", "config": {"share_kv_group": true}})";
  return {
      {"block_topk 64x64", block_sparse(topk, "native", 64, 64), rule(64, 64, 1)},
      {"block_topk 128x64", block_sparse(topk, "native", 128, 64), rule(128, 64, 1)},
      {"block_topk 16x32", block_sparse(topk, "FLASH_ATTN", 16, 32), rule(16, 32, 1)},
      {"shared 64x64", block_sparse(shared, "native", 64, 64), rule(64, 64, 2)},
      {"shared 128x64", block_sparse(shared, "native", 128, 64), rule(128, 64, 2)},
      {"shared 16x32", block_sparse(shared, "FLASH_ATTN", 16, 32), rule(16, 32, 2)},
      {"threshold",
       block_sparse(R"({"name": "threshold", "config": {"mass": 0.6}})", "native", 64, 64),
       rule(64, 64, 1, 0.6)},
      {"threshold, shared",
       block_sparse(R"({"name": "threshold", "config": {"mass": 0.6, "share_kv_group": true}})",
                    "native", 64, 64),
       rule(64, 64, 2, 0.6)},
      {"reused", block_sparse(R"({"name": "block_topk", "reuse_steps": 2})", "native", 64, 64),
       rule(64, 64, 1), 2},
      {"sliding_tile",
       block_sparse(R"({"name": "sliding_tile", "config": {"window": [1, 1, 1]}})", "native", 64,
                    64),
       std::nullopt},
  };
}

// Block lists on the host.
struct HostLists {
  HostLists(const BlockSelection& s, const std::vector<std::vector<int32_t>>& lists, int64_t rows,
            int64_t blocks)
      : HostLists(s.block_q, s.block_k, {static_cast<int64_t>(lists.size()) / rows, rows, blocks}) {
    for (size_t i = 0; i < lists.size(); ++i) {
      std::copy(lists[i].begin(), lists[i].end(),
                indices.view.as<int32_t>() + static_cast<int64_t>(i) * blocks);
      counts.view.as<int32_t>()[i] = static_cast<int32_t>(lists[i].size());
    }
  }
  HostLists(Backend& backend, const BlockMask& device)
      : HostLists(device.block_q, device.block_k, device.indices.shape) {
    backend.download(indices.view, device.indices);
    backend.download(counts.view, device.counts);
  }
  HostLists(int64_t block_q, int64_t block_k, Shape shape)
      : indices(allocate_host_tensor(shape, DType::i32)),
        counts(allocate_host_tensor({shape[0], shape[1]}, DType::i32)),
        mask{block_q, block_k, indices.view, counts.view} {}
  int64_t kept() const {
    int64_t sum = 0;
    for (int64_t i = 0; i < counts.view.numel(); ++i) sum += counts.view.as<int32_t>()[i];
    return sum * mask.heads_per_list(kHeads);
  }
  Tensor indices, counts;
  BlockMask mask;
};

class Strategies : public ::testing::Test {
 protected:
  void SetUp() override {
    try {
      gpu_ = cuda::make_cuda_backend();
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
    sequence_.grid = {4, 16, 12};
    sequence_.control_tokens = kControls;
    sequence_.sound_tokens = kSound;
    arena_.emplace(gpu_->allocate(size_t{64} << 20));
    q_ = TestTensor(*gpu_, {queries(), kHeads, kHeadDim}, DType::bf16);
    k_ = TestTensor(*gpu_, {kText + queries(), kKvHeads, kHeadDim}, DType::bf16);
    v_ = TestTensor(*gpu_, {kText + queries(), kKvHeads, kHeadDim}, DType::bf16);
    out_ = conformance::poisoned(*gpu_, {queries(), kHeads, kHeadDim}, DType::bf16);
  }

  int64_t queries() const { return sequence_.size(); }

  void new_inputs(uint64_t seed) {
    q_.randomise(seed, 2);
    k_.randomise(seed + 1, 2);
    v_.randomise(seed + 2);
  }

  void run(Attention& attention) {
    const Arena::Scope scope(*arena_);
    AttentionInputs in = attention.inputs(*arena_, kHeads, View(k_.device()).slice(0, 0, kText),
                                          View(v_.device()).slice(0, 0, kText));
    gpu_->copy(in.q.front().rows, q_.device());
    gpu_->copy(in.k.front().rows, k_.device().slice(0, kText, queries()));
    gpu_->copy(in.v.front().rows, v_.device().slice(0, kText, queries()));
    attention.run(*arena_, in, {1, AttentionRole::gen});
    gpu_->copy(out_.device(), in.out);
  }

  // The lists that the contract asks for, of the inputs as they are.
  HostLists expected_lists(const Method& method, const AttentionStrategy& strategy) {
    if (!method.rule) {
      const Arena::Scope scope(*arena_);
      SelectionCache selections;
      const PlannedAttention planned = strategy.method(0, 1, AttentionRole::gen)
                                           .plan({{1, AttentionRole::gen},
                                                  {},
                                                  kText,
                                                  0.125f,
                                                  q_.device(),
                                                  k_.device(),
                                                  sequence_,
                                                  *gpu_,
                                                  *arena_,
                                                  selections});
      return HostLists(*gpu_, planned.mask.value());
    }
    const BlockGrid grid = method.rule->grid(queries(), kText + queries());
    return HostLists(*method.rule,
                     reference::select_blocks(q_.host(), k_.host(), *method.rule).indices,
                     grid.rows, grid.blocks);
  }

  double error(const HostLists& lists) {
    AttentionPlan plan;
    plan.scale = 0.125f;
    plan.mask = &lists.mask;
    const reference::Values want = reference::attention(q_.host(), k_.host(), v_.host(), plan).out;
    EXPECT_TRUE(out_.download());
    const reference::Values got = reference::values(out_.host());
    return reference::relative_error(got, want);
  }

  std::unique_ptr<Backend> gpu_;
  Sequence sequence_;
  std::optional<Arena> arena_;
  TestTensor q_, k_, v_, out_;
};

TEST_F(Strategies, EveryMethodIsTheContractsStepAfterStep) {
  for (const Method& method : methods()) {
    SCOPED_TRACE(method.name);
    const AttentionStrategy strategy = testing::gen_by(method.json);
    Attention attention(*gpu_, strategy, sequence_, kHeadDim);
    std::optional<HostLists> lists;
    // As they are, recorded, replayed; where lists are used again, as they are.
    for (int step = 0; step < kSteps; ++step) {
      new_inputs(100 + 10 * static_cast<uint64_t>(step));
      if (step % method.reuse == 0) lists.emplace(expected_lists(method, strategy));
      attention.begin_step(step, kSteps);
      attention.replay(method.name, [&] { run(attention); });
      EXPECT_LT(error(*lists), kTolerance) << "step " << step;
    }
  }
}

// Warm-up leaves the memory of lists where a recording of its steps will look for them.
TEST_F(Strategies, WarmUpThenReplay) {
  for (const Method& method : methods()) {
    if (method.rule && method.reuse == 1) continue;
    SCOPED_TRACE(method.name);
    const AttentionStrategy strategy = testing::gen_by(method.json);
    Attention attention(*gpu_, strategy, sequence_, kHeadDim);
    new_inputs(7);
    attention.begin_layout(0);
    const auto step = [&] {
      attention.replay(concat("warm ", method.name), [&] { run(attention); });
    };
    step();
    std::optional<HostLists> lists;
    for (int i = 0; i < 4; ++i) {
      new_inputs(20 + 10 * static_cast<uint64_t>(i));
      if (i % method.reuse == 0) lists.emplace(expected_lists(method, strategy));
      attention.begin_step(i, 4);
      step();
      EXPECT_LT(error(*lists), kTolerance) << "step " << i;
    }
  }
}

// What the report says was kept is what the lists hold, also where the host does not choose.
TEST_F(Strategies, RecordsCountTheListsOfTheDevice) {
  for (const Method& method : methods()) {
    SCOPED_TRACE(method.name);
    const AttentionStrategy strategy = testing::gen_by(method.json);
    Attention attention(*gpu_, strategy, sequence_, kHeadDim);
    attention.set_recording(true);
    attention.begin_step(0, 1);
    new_inputs(3);
    run(attention);
    const DispatchRecord& record = attention.records().at(0);
    const HostLists lists = expected_lists(method, strategy);
    EXPECT_EQ(record.kept_blocks, lists.kept());
    EXPECT_LT(record.kept_blocks, record.all_blocks);
  }
}

}  // namespace
}  // namespace orrery
