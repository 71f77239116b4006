#include <cmath>

#include "conformance/harness.h"

namespace orrery::conformance {
namespace {

ORRERY_CONFORMANCE(Norms);

constexpr DType kFloats[] = {DType::f32, DType::bf16};

// In bf16 an intermediate that lies on a rounding boundary may fall to either side: one more unit
// in the last place.
double roundings(DType dtype) { return dtype == DType::bf16 ? 3 : 1; }

TEST_P(Norms, EveryKind) {
  for (NormKind kind : {NormKind::qwen, NormKind::nemotron, NormKind::channel}) {
    for (bool silu : {false, true}) {
      for (DType dtype : kFloats) {
        for (int64_t n : {1, 3, 12, 24, 96, 256, 512, 1024, 1030, 2048, 4096, 5120, 9000}) {
          SCOPED_TRACE(testing::Message()
                       << "kind " << int(kind) << " silu " << silu << " width " << n);
          TestTensor x(*backend_, {5, 7, n}, dtype, Layout::pitched),
              weight(*backend_, {n}, silu ? dtype : DType::f32);
          x.randomise(1, 2);
          weight.randomise(2);
          TestTensor out = poisoned(*backend_, {5, 7, n}, dtype, Layout::outer_gaps);
          const Norm norm{kind, 1e-5f, silu};
          backend_->rms_norm(out.device(), x.device(), weight.device(), norm);
          // The sum of squares loses at most sqrt(n) units; silu's slope is at most 1.1 and near
          // zero of the result the argument's error stays.
          reference::Values size =
              reference::rms_norm(x.host(), weight.host(), {kind, 1e-5f, false});
          for (double& value : size) value = std::fabs(value) + (silu ? 0.3 : 0);
          const double slope_error = silu && dtype == DType::bf16 ? 0x1p16 : 0;
          expect_close(out, reference::rms_norm(x.host(), weight.host(), norm),
                       8 + std::sqrt(double(n)) / 4 + slope_error, roundings(dtype), size);
        }
      }
    }
  }
}

TEST_P(Norms, EpsilonMatters) {
  // A wrong epsilon shows as 3e-5 on ordinary data; on small rows it is everything.
  TestTensor x(*backend_, {1, 4}, DType::f32), weight(*backend_, {4}, DType::f32);
  x.assign({1e-4, -1e-4, 1e-4, 1e-4});
  weight.assign({1, 1, 1, 1});
  TestTensor out = poisoned(*backend_, {1, 4}, DType::f32);
  backend_->rms_norm(out.device(), x.device(), weight.device(), {NormKind::qwen, 1e-6f, false});
  const double y = 1e-4 / std::sqrt(1e-8 + 1e-6);
  expect_close(out, {y, -y, y, y}, 4);
}

TEST_P(Norms, ChannelNormOfZeroIsZero) {
  TestTensor x(*backend_, {2, 24}, DType::f32), weight(*backend_, {24}, DType::f32);
  x.assign(reference::Values(48, 0.0));
  weight.randomise(3);
  TestTensor out = poisoned(*backend_, {2, 24}, DType::f32);
  backend_->rms_norm(out.device(), x.device(), weight.device(), {NormKind::channel, 0, false});
  expect_close(out, reference::Values(48, 0.0), 0);
}

TEST_P(Norms, InPlaceWithBf16Weight) {
  TestTensor x(*backend_, {33, 256}, DType::f32), weight(*backend_, {256}, DType::bf16);
  x.randomise(4);
  weight.randomise(5);
  const Norm norm;
  const reference::Values want = reference::rms_norm(x.host(), weight.host(), norm);
  backend_->rms_norm(x.device(), x.device(), weight.device(), norm);
  expect_close(x, want, 12);
}

TEST_P(Norms, OfPermutedRows) {
  TestTensor x(*backend_, {4, 6, 5, 48}, DType::f32), weight(*backend_, {32}, DType::bf16),
      out = poisoned(*backend_, {6, 5, 4, 32}, DType::f32);
  x.randomise(4);
  weight.randomise(5);
  const Norm norm{NormKind::nemotron, 1e-6f, false};
  const auto rows = [](const View& v) { return v.slice(3, 8, 32).permute({1, 2, 0, 3}); };
  backend_->rms_norm(out.device(), rows(x.device()), weight.device(), norm);
  expect_close(out, reference::rms_norm(rows(x.host()), weight.host(), norm), 12);
}

TEST_P(Norms, HeadNormAndRotation) {
  for (DType dtype : kFloats) {
    for (int64_t d : {2, 6, 10, 64, 128, 256, 1024}) {
      for (bool weighted : {true, false}) {
        for (NormKind kind : {NormKind::qwen, NormKind::nemotron}) {
          SCOPED_TRACE(testing::Message() << "head_dim " << d << " weighted " << weighted);
          TestTensor x(*backend_, {9, 3, d}, dtype, Layout::outer_gaps);
          TestTensor weight(*backend_, {d}, dtype), cos(*backend_, {9, d / 2}, DType::f32),
              sin(*backend_, {9, d / 2}, DType::f32);
          x.randomise(6);
          weight.randomise(7);
          reference::Values c, s;
          for (int64_t i = 0; i < 9 * d / 2; ++i) {
            c.push_back(std::cos(0.37 * double(i)));
            s.push_back(std::sin(0.37 * double(i)));
          }
          cos.assign(c);
          sin.assign(s);
          TestTensor out = poisoned(*backend_, {9, 3, d}, dtype, Layout::outer_gaps);
          const Norm norm{kind, 1e-6f, false};
          const View w = weighted ? View(weight.device()) : View{},
                     hw = weighted ? weight.host() : View{};
          backend_->qk_norm_rope(out.device(), x.device(), w, cos.device(), sin.device(), norm);
          const reference::Values want =
              reference::qk_norm_rope(x.host(), hw, cos.host(), sin.host(), norm);
          // Either product may dominate the other: magnitude is the pair's length. In bf16 the
          // normed value may round to a neighbour, a unit of the larger product.
          reference::Values size(want.size());
          for (size_t i = 0; i < want.size(); ++i) {
            const size_t j = i % size_t(d),
                         pair = j < size_t(d / 2) ? i + size_t(d / 2) : i - size_t(d / 2);
            size[i] = std::hypot(want[i], want[pair]);
          }
          const double neighbour = dtype == DType::bf16 ? 0x1.4p16 : 0;
          expect_close(out, want, 12 + std::sqrt(double(d)) / 4 + neighbour, roundings(dtype),
                       size);
        }
      }
    }
  }
}

TEST_P(Norms, RotationInPlace) {
  TestTensor x(*backend_, {4, 2, 8}, DType::f32), cos(*backend_, {4, 4}, DType::f32),
      sin(*backend_, {4, 4}, DType::f32);
  x.randomise(8);
  cos.assign(reference::Values(16, 0.0));
  sin.assign(reference::Values(16, 1.0));
  const reference::Values in = reference::values(x.host());
  backend_->qk_norm_rope(x.device(), x.device(), {}, cos.device(), sin.device(), {});
  reference::Values want(in.size());  // a quarter turn: [-x2 | x1]
  for (size_t i = 0; i < in.size(); ++i) want[i] = i % 8 < 4 ? -in[i + 4] : in[i - 4];
  expect_close(x, want, 0);
}

}  // namespace
}  // namespace orrery::conformance
