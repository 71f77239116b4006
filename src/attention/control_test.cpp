// Several control streams, each attended on its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "attention/attention.h"
#include "attention/test_call.h"
#include "expect_error.h"

namespace orrery {
namespace {

using testing::call;
using testing::CallData;
using testing::CallShape;
using testing::host_arena;

constexpr AttentionSite kWeighted{1, AttentionRole::gen_multi_control};
constexpr int64_t kEach = 2 * 3 * 4;  // tokens of one control

CallShape streams(int64_t count) {
  CallShape shape;
  shape.sequence.grid = {2, 3, 4};
  shape.sequence.control_tokens = count * kEach;
  shape.sequence.action_tokens = 3;
  shape.text = 5;
  return shape;
}

// The rows of stream i and of everything behind the streams.
CallData only(const CallData& data, int64_t count, int64_t i) {
  CallData part(streams(1));
  const auto pick = [&](const Tensor& from, Tensor& to) {
    const int64_t row = from.view.dim(1) * from.view.dim(2),
                  rest = from.view.dim(0) - count * kEach;
    std::copy_n(from.view.as<float>() + i * kEach * row, kEach * row, to.view.as<float>());
    std::copy_n(from.view.as<float>() + count * kEach * row, rest * row,
                to.view.as<float>() + kEach * row);
  };
  pick(data.q, part.q), pick(data.k, part.k), pick(data.v, part.v);
  for (auto [from, to] : {std::pair{&data.und_k, &part.und_k}, {&data.und_v, &part.und_v}}) {
    std::copy_n(from->view.as<float>(), from->view.numel(), to->view.as<float>());
  }
  return part;
}

class ControlStreams : public ::testing::Test {
 protected:
  std::vector<float> run(const AttentionStrategy& strategy, const CallData& data,
                         std::vector<float> weights, const AttentionSite& site = kWeighted) {
    Attention attention(*backend_, strategy, data.shape.sequence, data.shape.head_dim);
    if (!weights.empty()) attention.set_control_weights(std::move(weights));
    attention.set_recording(true);
    attention.begin_step(0, 1);
    std::vector<float> out = call(attention, arena_, data, site);
    records_ = attention.records();
    return out;
  }
  std::unique_ptr<Backend> backend_ = cpu::make_cpu_backend();
  Arena arena_ = host_arena();
  AttentionStrategy dense_ = AttentionStrategy::dense(testing::inventory());
  std::vector<DispatchRecord> records_;
};

// The weighted sum (docs/modes.md, Transfer), put together from calls with one stream each.
TEST_F(ControlStreams, AreWeighedWhereTheyMeet) {
  for (const std::vector<float>& weights :
       {std::vector<float>{0.25f, 0.75f}, {0, 1}, {0.5f, 0.2f, 0.3f}}) {
    const auto count = static_cast<int64_t>(weights.size());
    const CallData data(streams(count));
    const int64_t row = data.q.view.dim(1) * data.q.view.dim(2), size = data.shape.sequence.size();
    std::vector<float> want(static_cast<size_t>(size * row));
    for (int64_t i = 0; i < count; ++i) {
      const std::vector<float> one = run(dense_, only(data, count, i), {});
      std::copy_n(one.begin(), kEach * row, want.begin() + i * kEach * row);
      for (int64_t j = 0; j < (size - count * kEach) * row; ++j) {
        want[static_cast<size_t>(count * kEach * row + j)] +=
            weights[static_cast<size_t>(i)] * one[static_cast<size_t>(kEach * row + j)];
      }
    }
    const std::vector<float> got = run(dense_, data, weights);
    EXPECT_EQ(records_.size(), static_cast<size_t>(count));
    // The same calls; only the sum is rounded differently.
    for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-6f) << i;
  }
}

// Jointly every stream sees every other one: with one stream there is no other.
TEST_F(ControlStreams, OneIsJoint) {
  const CallData one(streams(1)), two(streams(2));
  EXPECT_EQ(run(dense_, one, {1.0f}), run(dense_, one, {}, {1, AttentionRole::gen}));
  EXPECT_NE(run(dense_, two, {0.5f, 0.5f}), run(dense_, two, {}, {1, AttentionRole::gen}));
}

// B44: extreme weights give different results.
TEST_F(ControlStreams, WeightsReachTheResult) {
  const CallData data(streams(2));
  EXPECT_NE(run(dense_, data, {1, 0}), run(dense_, data, {0, 1}));
}

// Blocks that one stream chose are not those of another, whether or not they are kept for later
// steps.
TEST_F(ControlStreams, ChooseTheirBlocksSeparately) {
  for (int reuse : {1, 2}) {
    const std::string method = testing::block_sparse(
        concat(R"({"name": "block_topk", "config": {"target_sparsity": 0.5}, "reuse_steps": )",
               reuse, "}"),
        "native", 16, 16);
    const AttentionStrategy strategy =
        testing::strategy_of(R"({"per_role": {"cosmos3.gen_multi_control": )" + method + "}}");
    const CallData data(streams(2));
    const std::vector<float> got = run(strategy, data, {0.5f, 0.5f});
    const int64_t row = data.q.view.dim(1) * data.q.view.dim(2);
    for (int64_t i = 0; i < 2; ++i) {
      const std::vector<float> one = run(strategy, only(data, 2, i), {1.0f});
      EXPECT_TRUE(std::equal(one.begin(), one.begin() + kEach * row, got.begin() + i * kEach * row))
          << i << reuse;
    }
  }
}

TEST_F(ControlStreams, RefusesWeightsThatDoNotSumToOne) {
  Attention attention(*backend_, dense_, streams(2).sequence, 16);
  expect_error(ErrorKind::invalid_argument, {"sum to 2"}, [&] {
    attention.set_control_weights({1, 1});
  });
  expect_error(ErrorKind::invalid_argument, {"-1"}, [&] {
    attention.set_control_weights({2, -1});
  });
  expect_error(ErrorKind::invalid_argument, {"5 weighted streams"}, [&] {
    attention.set_control_weights({0.2f, 0.2f, 0.2f, 0.2f, 0.2f});
  });
  EXPECT_EQ(attention.generation_role(), AttentionRole::gen);
  attention.set_control_weights({0.5f, 0.5f});
  EXPECT_EQ(attention.generation_role(), AttentionRole::gen_multi_control);
}

}  // namespace
}  // namespace orrery
