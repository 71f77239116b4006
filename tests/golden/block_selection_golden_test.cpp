// The block_topk selector and sparse attention against fp64 rows of an independent implementation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/cpu_backend.h"
#include "golden/golden.h"

namespace orrery {
namespace {

constexpr const char* kArea = "block_selection";

class BlockSelectionGolden : public testing::Test {
 protected:
  void SetUp() override {
    ORRERY_SKIP_WITHOUT(kArea);
    backend_ = cpu::make_cpu_backend();
    file_.emplace(Safetensors::open_file(golden::directory() / kArea / "tensors.safetensors"));
    tensors_.emplace(golden::directory() / kArea / "tensors.safetensors");
    cases_ = Json::load(golden::directory() / kArea / "case.json").at("cases");
  }

  // [1, S, heads, D] of the file as [S, heads, D] of the backend, in its stored type.
  Tensor input(const std::string& name) {
    const View stored = file_->view(name);
    EXPECT_EQ(stored.rank(), 4);
    EXPECT_EQ(stored.dim(0), 1) << name;
    const Tensor host = file_->read(name, DType::f32);
    Tensor tensor =
        backend_->allocate_tensor({stored.dim(1), stored.dim(2), stored.dim(3)}, stored.dtype);
    backend_->copy(tensor.view, host.view.select(0, 0));
    return tensor;
  }

  struct Case {
    std::string name;  // prefix of its tensors
    Tensor q, k, v;
    BlockSelection selection;
    int64_t kept = 0, blocks = 0, rows = 0;
  };

  Case load(const Json& json) {
    Case c;
    c.name = std::to_string(json.at("case").as_int());
    c.q = input(c.name + ".q");
    c.k = input(c.name + ".k");
    c.v = input(c.name + ".v");
    EXPECT_EQ(c.q.view.shape,
              (Shape{json.at("Sq").as_int(), json.at("Hq").as_int(), json.at("D").as_int()}));
    EXPECT_EQ(c.k.view.shape,
              (Shape{json.at("Sk").as_int(), json.at("Hk").as_int(), json.at("D").as_int()}));
    c.selection.block_q = json.at("block_q").as_int();
    c.selection.block_k = json.at("block_k").as_int();
    c.selection.target_sparsity = json.at("target_sparsity").as_double();
    c.selection.protected_keys = json.at("protected_prefix").as_int();
    c.selection.scale = float(1 / std::sqrt(double(json.at("D").as_int())));
    c.kept = json.at("kept").as_int();
    c.blocks = json.at("blocks").as_int();
    c.rows = (c.q.view.dim(0) + c.selection.block_q - 1) / c.selection.block_q;
    return c;
  }

  struct Lists {
    Tensor indices, counts, scores;
  };
  Lists select(const Case& c, bool with_scores) {
    const int64_t heads = c.q.view.dim(1);
    Lists lists{backend_->allocate_tensor({heads, c.rows, c.blocks}, DType::i32),
                backend_->allocate_tensor({heads, c.rows}, DType::i32),
                backend_->allocate_tensor({heads, c.rows, c.blocks}, DType::f32)};
    backend_->select_blocks(lists.indices.view, lists.counts.view, c.q.view, c.k.view, c.selection,
                            with_scores ? lists.scores.view : MutView{});
    return lists;
  }

  // |got - want| / |want| over the stored rows of an attention run.
  double row_error(const Case& c, const AttentionPlan& plan, const std::string& want) {
    Tensor out = backend_->allocate_tensor(c.q.view.shape, DType::f32);
    // In f32, so that the comparison sees the arithmetic and not the rounding of a bf16 result.
    const auto wide = [&](const Tensor& x) {
      Tensor copy = backend_->allocate_tensor(x.view.shape, DType::f32);
      backend_->copy(copy.view, x.view);
      return copy;
    };
    const Tensor q = wide(c.q), k = wide(c.k), v = wide(c.v);
    backend_->attention(out.view, q.view, k.view, v.view, plan);
    const int64_t width = out.view.dim(1) * out.view.dim(2);
    std::vector<float> got;
    for (int64_t row : tensors_->integers(c.name + ".rows")) {
      const float* begin = out.view.as<float>() + row * width;
      got.insert(got.end(), begin, begin + width);
    }
    return golden::relative_error(got, tensors_->floats(c.name + want));
  }

  std::unique_ptr<Backend> backend_;
  std::optional<Safetensors> file_;
  std::optional<golden::Tensors> tensors_;
  Json cases_;
};

// Scores are sums of at most a few hundred exponentials of f32 dot products: 1e-5 of a score of
// size 1 to 10 is some ten units in the last place.
TEST_F(BlockSelectionGolden, Scores) {
  for (const Json& json : cases_.items()) {
    const Case c = load(json);
    const Lists lists = select(c, true);
    const std::vector<float> want = tensors_->floats(c.name + ".scores");
    ASSERT_EQ(int64_t(want.size()), lists.scores.view.numel());
    const float* got = lists.scores.view.as<float>();
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_NEAR(got[i], want[i], 1e-5 * std::max(1.0f, std::fabs(want[i])))
          << "case " << c.name << " at " << i;
    }
  }
}

// The smallest gap between a kept and a dropped score is far above rounding: indices are equal.
TEST_F(BlockSelectionGolden, Indices) {
  for (const Json& json : cases_.items()) {
    const Case c = load(json);
    const std::vector<int64_t> want = tensors_->integers(c.name + ".indices");
    ASSERT_EQ(int64_t(want.size()), c.q.view.dim(1) * c.rows * c.kept);
    const int64_t candidates =
        c.blocks - (c.selection.protected_keys + c.selection.block_k - 1) / c.selection.block_k;
    EXPECT_EQ(c.selection.budget(candidates) + c.blocks - candidates, c.kept) << "case " << c.name;
    for (bool with_scores : {false, true}) {
      const Lists lists = select(c, with_scores);
      for (int64_t row = 0; row < c.q.view.dim(1) * c.rows; ++row) {
        ASSERT_EQ(lists.counts.view.as<int32_t>()[row], c.kept)
            << "case " << c.name << " row " << row;
        for (int64_t i = 0; i < c.kept; ++i) {
          ASSERT_EQ(lists.indices.view.as<int32_t>()[row * c.blocks + i],
                    want[size_t(row * c.kept + i)])
              << "case " << c.name << " row " << row << " entry " << i;
        }
      }
    }
  }
}

// f32 attention against fp64: 2e-5 is the agreement asked of whole models; one call is well inside.
// The backend's other implementations are held against a reference of their own
// (tests/conformance).
TEST_F(BlockSelectionGolden, AttentionRows) {
  for (const Json& json : cases_.items()) {
    const Case c = load(json);
    const Lists lists = select(c, false);
    const BlockMask mask{c.selection.block_q, c.selection.block_k, lists.indices.view,
                         lists.counts.view};
    AttentionPlan plan;
    plan.scale = c.selection.scale;
    EXPECT_LT(row_error(c, plan, ".dense_rows"), 2e-6) << "case " << c.name << " dense";
    plan.mask = &mask;
    EXPECT_LT(row_error(c, plan, ".sparse_rows"), 2e-6) << "case " << c.name << " sparse";
  }
}

}  // namespace
}  // namespace orrery
