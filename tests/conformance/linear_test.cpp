#include <cmath>

#include "conformance/harness.h"

namespace orrery::conformance {
namespace {

ORRERY_CONFORMANCE(Linear);

TEST_P(Linear, ProductsOfEverySizeTypeAndLayout) {
  for (const LinearCase& c : linear_cases(Scale::test)) {
    SCOPED_TRACE(c.name);
    TestTensors tensors(*backend_);
    const LinearArgs device = arguments(c, tensors.on_device()),
                     host = arguments(c, tensors.on_host()),
                     sizes = arguments(c, tensors.in_absolute_values());
    backend_->linear(device.out, device.x, device.w);
    expect_close(tensors.out(), reference::linear(host.x, host.w, {}), 2 + std::sqrt(double(c.k)),
                 1, reference::linear(sizes.x, sizes.w, {}));
  }
}

TEST_P(Linear, Gated) {
  for (const GatedLinearCase& c : gated_linear_cases(Scale::test)) {
    SCOPED_TRACE(c.name());
    TestTensors tensors(*backend_);
    const GatedLinearArgs device = arguments(c, tensors.on_device()),
                          host = arguments(c, tensors.on_host()),
                          sizes = arguments(c, tensors.in_absolute_values());
    backend_->gated_linear(device.out, device.x, device.w);
    const reference::Values both = reference::linear(host.x, host.w, {}),
                            size = reference::linear(sizes.x, sizes.w, {});
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
    expect_close(tensors.out(), want, 18 + std::sqrt(double(c.k)), 1, magnitude);
  }
}

TEST_P(Linear, EpiloguesOfEveryType) {
  struct Types {
    DType x, w, out, bias;
  };
  constexpr DType f32 = DType::f32, half = DType::bf16;
  for (const Types& t : {Types{f32, f32, f32, f32}, Types{half, half, half, half},
                         Types{half, half, f32, half}, Types{f32, half, f32, half},
                         Types{f32, DType::f16, f32, f32}, Types{half, f32, half, f32}}) {
    for (const auto& [m, n, k] :
         {std::array<int64_t, 3>{96, 64, 128}, {1, 40, 33}, {37, 1, 24}, {53, 29, 7}, {5, 8, 1}}) {
      TestTensor x(*backend_, {m, k}, t.x), w(*backend_, {n, k}, t.w), bias(*backend_, {n}, t.bias),
          residual(*backend_, {m, n}, t.out, Layout::pitched);
      x.randomise(3);
      w.randomise(4);
      bias.randomise(5);
      residual.randomise(6);
      for (Activation kind : {Activation::none, Activation::silu, Activation::relu2}) {
        for (int extras = 0; extras < 4; ++extras) {
          SCOPED_TRACE(concat(m, " x ", n, " x ", k, " ", name_of(t.x), " ", name_of(t.w), " ",
                              name_of(t.out), " activation ", int(kind), " extras ", extras));
          LinearOptions options, host;
          options.activation = host.activation = kind;
          if (extras & 1) options.bias = bias.device(), host.bias = bias.host();
          if (extras & 2) options.residual = residual.device(), host.residual = residual.host();
          TestTensor out = poisoned(*backend_, {m, n}, t.out, Layout::pitched);
          backend_->linear(out.device(), x.device(), w.device(), options);
          expect_within(out, reference::linear(x.host(), w.host(), host), tolerance(t.out));
        }
      }
    }
  }
}

TEST_P(Linear, ResidualMayBeTheOutput) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (bool transposed : {false, true}) {
      SCOPED_TRACE(concat(name_of(dtype), transposed ? " transposed" : ""));
      TestTensor x(*backend_, {40, 300}, dtype, Layout::pitched),
          w(*backend_, transposed ? Shape{300, 700} : Shape{700, 300}, DType::bf16),
          bias(*backend_, {700}, DType::f32), out(*backend_, {40, 700}, dtype, Layout::pitched);
      x.randomise(7);
      w.randomise(8, 0.1);
      bias.randomise(10);
      out.randomise(9);
      const auto weight = [&](const View& v) { return transposed ? v.permute({1, 0}) : v; };
      const LinearOptions host{bias.host(), out.host()}, options{bias.device(), out.device()};
      const reference::Values want = reference::linear(x.host(), weight(w.host()), host);
      backend_->linear(out.device(), x.device(), weight(w.device()), options);
      expect_close(out, want, 20, 1, reference::Values(want.size(), 4.0));
    }
  }
}

// One row, nine times.
TEST_P(Linear, ABroadcastRow) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    TestTensor x(*backend_, {1, 48}, dtype), w(*backend_, {64, 48}, dtype),
        out = poisoned(*backend_, {9, 64}, dtype);
    x.randomise(11);
    w.randomise(12);
    backend_->linear(out.device(), View(x.device()).expand(0, 9), w.device());
    expect_within(out, reference::linear(x.host().expand(0, 9), w.host(), {}), tolerance(dtype));
  }
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
