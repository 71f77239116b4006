#include <cmath>

#include "conformance/harness.h"

namespace orrery::conformance {
namespace {

ORRERY_CONFORMANCE(Linear);

struct LinearCase {
  int64_t m, n, k;
  DType x, w, out;
  Layout layout;
  bool transposed;  // w is a view of [K, N]
};

TEST_P(Linear, ProductsOfEverySizeTypeAndLayout) {
  std::vector<LinearCase> cases;
  constexpr DType f32 = DType::f32, half = DType::bf16;
  const int64_t sizes[][3] = {{1, 1, 1},     {1, 300, 257}, {5, 7, 3},     {6, 16, 64},
                              {7, 24, 33},   {96, 48, 96},  {97, 40, 256}, {100, 264, 70},
                              {13, 5, 1000}, {200, 17, 512}};
  for (const auto& s : sizes) {
    cases.push_back({s[0], s[1], s[2], f32, f32, f32, Layout::contiguous, false});
    cases.push_back({s[0], s[1], s[2], f32, half, f32, Layout::pitched, false});
    cases.push_back({s[0], s[1], s[2], half, half, half, Layout::pitched, false});
    cases.push_back({s[0], s[1], s[2], f32, half, f32, Layout::contiguous, true});
    cases.push_back({s[0], s[1], s[2], f32, f32, half, Layout::contiguous, true});
  }
  for (const LinearCase& c : cases) {
    SCOPED_TRACE(testing::Message()
                 << c.m << " x " << c.n << " x " << c.k << " x " << name_of(c.x) << " w "
                 << name_of(c.w) << " out " << name_of(c.out) << " layout " << int(c.layout)
                 << (c.transposed ? " transposed" : ""));
    TestTensor x(*backend_, {c.m, c.k}, c.x, c.layout);
    TestTensor w(*backend_, c.transposed ? Shape{c.k, c.n} : Shape{c.n, c.k}, c.w, c.layout);
    x.randomise(1);
    w.randomise(2);
    const auto weight = [&](const View& v) { return c.transposed ? v.permute({1, 0}) : v; };
    TestTensor out = poisoned(*backend_, {c.m, c.n}, c.out, c.layout);
    backend_->linear(out.device(), x.device(), weight(w.device()));
    const reference::Values size =
        reference::linear(absolute(*backend_, x).host(), weight(absolute(*backend_, w).host()), {});
    expect_close(out, reference::linear(x.host(), weight(w.host()), {}), 2 + std::sqrt(double(c.k)),
                 1, size);
  }
}

TEST_P(Linear, Gated) {
  struct Case {
    int64_t m, n, k;
    DType dtype;
    Layout layout;
  };
  for (const Case& c : {Case{300, 256, 192, DType::bf16, Layout::contiguous},
                        {257, 128, 64, DType::bf16, Layout::outer_gaps},
                        {513, 384, 128, DType::bf16, Layout::pitched},
                        {40, 128, 64, DType::bf16, Layout::contiguous},
                        {259, 100, 72, DType::bf16, Layout::contiguous},
                        {33, 48, 20, DType::f32, Layout::pitched}}) {
    SCOPED_TRACE(testing::Message() << c.m << " x " << c.n << " x " << c.k << " "
                                    << name_of(c.dtype) << " layout " << int(c.layout));
    TestTensor x(*backend_, {c.m, c.k}, c.dtype, c.layout),
        w(*backend_, {2 * c.n, c.k}, c.dtype, c.layout),
        out = poisoned(*backend_, {c.m, c.n}, c.dtype, c.layout);
    x.randomise(21);
    w.randomise(22, 0.2);
    backend_->gated_linear(out.device(), x.device(), w.device());
    const reference::Values both = reference::linear(x.host(), w.host(), {}),
                            size = reference::linear(absolute(*backend_, x).host(),
                                                     absolute(*backend_, w).host(), {});
    reference::Values want, magnitude;
    for (int64_t i = 0; i < c.m; ++i) {
      for (int64_t j = 0; j < c.n; ++j) {
        const auto at = size_t(2 * c.n * i + j);
        const double gate = both[at], up = both[at + size_t(c.n)];
        want.push_back(gate / (1 + std::exp(-gate)) * up);
        // An error of either factor counts as much as the other is large; silu is no steeper
        // than 1.1.
        magnitude.push_back(1.1 * size[at] * (std::fabs(up) + 1) +
                            size[at + size_t(c.n)] * (std::fabs(gate) + 1));
      }
    }
    // exp and division of an approximate kind: 2^-20.
    expect_close(out, want, 18 + std::sqrt(double(c.k)), 1, magnitude);
  }
}

TEST_P(Linear, Epilogues) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (Activation kind : {Activation::none, Activation::silu, Activation::relu2}) {
      for (bool with_bias : {false, true}) {
        for (bool with_residual : {false, true}) {
          SCOPED_TRACE(testing::Message()
                       << name_of(dtype) << int(kind) << with_bias << with_residual);
          TestTensor x(*backend_, {50, 64}, dtype), w(*backend_, {37, 64}, DType::bf16),
              bias(*backend_, {37}, DType::bf16),
              residual(*backend_, {50, 37}, dtype, Layout::pitched);
          x.randomise(3);
          w.randomise(4, 0.2);
          bias.randomise(5);
          residual.randomise(6);
          LinearOptions options, host;
          options.activation = host.activation = kind;
          if (with_bias) options.bias = bias.device(), host.bias = bias.host();
          if (with_residual) options.residual = residual.device(), host.residual = residual.host();
          TestTensor out = poisoned(*backend_, {50, 37}, dtype, Layout::pitched);
          backend_->linear(out.device(), x.device(), w.device(), options);
          // Before the activation values reach about 10, so relu2 multiplies errors by 20.
          const reference::Values size(50 * 37, 20.0);
          expect_close(out, reference::linear(x.host(), w.host(), host),
                       kind == Activation::relu2 ? 160 : 10, 1, size);
        }
      }
    }
  }
}

TEST_P(Linear, ResidualMayBeTheOutput) {
  TestTensor x(*backend_, {40, 300}, DType::f32), w(*backend_, {700, 300}, DType::bf16),
      bias(*backend_, {700}, DType::f32), out(*backend_, {40, 700}, DType::f32, Layout::pitched);
  x.randomise(7);
  w.randomise(8, 0.1);
  bias.randomise(10);
  out.randomise(9);
  LinearOptions host;
  host.bias = bias.host();
  host.residual = out.host();
  const reference::Values want = reference::linear(x.host(), w.host(), host);
  LinearOptions options;
  options.bias = bias.device();
  options.residual = out.device();
  backend_->linear(out.device(), x.device(), w.device(), options);
  expect_close(out, want, 20, 1, reference::Values(want.size(), 4.0));
}

TEST_P(Linear, NoDepthLeavesBiasAndResidual) {
  TestTensor bias(*backend_, {3}, DType::f32), out = poisoned(*backend_, {2, 3}, DType::f32);
  bias.assign({1, 2, 3});
  TestTensor x(*backend_, {2, 0}, DType::f32), w(*backend_, {3, 0}, DType::f32);
  LinearOptions options;
  options.bias = bias.device();
  backend_->linear(out.device(), x.device(), w.device(), options);
  expect_close(out, {1, 2, 3, 1, 2, 3}, 0);
}

// The reference alone promises that a row's result does not depend on the rows beside it: ranks
// that cut rows are compared through it.
TEST_P(Linear, RowsDoNotDependOnTheirNeighbours) {
  if (candidate().name.find("reference") == std::string::npos)
    GTEST_SKIP() << "libraries choose kernels by row count";
  TestTensor x(*backend_, {131, 700}, DType::f32), w(*backend_, {90, 700}, DType::bf16);
  x.randomise(10);
  w.randomise(11);
  TestTensor all = poisoned(*backend_, {131, 90}, DType::f32);
  backend_->linear(all.device(), x.device(), w.device());
  ASSERT_TRUE(all.download());
  const reference::Values whole = reference::values(all.host());
  for (int64_t row : {int64_t{0}, int64_t{77}, int64_t{130}}) {
    TestTensor one = poisoned(*backend_, {1, 90}, DType::f32);
    backend_->linear(one.device(), View(x.device()).slice(0, row, 1), w.device());
    ASSERT_TRUE(one.download());
    const reference::Values got = reference::values(one.host());
    for (size_t i = 0; i < 90; ++i) ASSERT_EQ(got[i], whole[size_t(row) * 90 + i]);
  }
}

}  // namespace
}  // namespace orrery::conformance
