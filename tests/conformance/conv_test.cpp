#include <cmath>

#include "conformance/harness.h"

namespace orrery::conformance {
namespace {

ORRERY_CONFORMANCE(Convolution);

TEST_P(Convolution, EveryShape) {
  for (const ConvCase& c : conv_cases(Scale::test)) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      for (Layout layout : {Layout::contiguous, Layout::pitched, Layout::outer_gaps}) {
        SCOPED_TRACE(concat(c.name, " ", name_of(dtype), " layout ", int(layout)));
        const bool full = layout != Layout::contiguous;
        const ConvVariant variant{dtype, layout == Layout::pitched ? DType::bf16 : dtype, layout,
                                  full, full};
        TestTensors tensors(*backend_);
        const Conv3dArgs device = arguments(c, variant, tensors.on_device()),
                         host = arguments(c, variant, tensors.on_host()),
                         sizes = arguments(c, variant, tensors.in_absolute_values());
        backend_->conv3d(device.out, device.x, device.w, device.bias, c.conv, device.residual);
        reference::Values size = reference::conv3d(sizes.x, sizes.w, {}, c.conv, {});
        for (double& value : size) value += 4;
        expect_close(tensors.out(),
                     reference::conv3d(host.x, host.w, host.bias, c.conv, host.residual),
                     2 + std::sqrt(c.depth()), 1, size);
      }
    }
  }
}

// Each extra by itself, of weights in any type.
TEST_P(Convolution, BiasOrResidualAndMixedTypes) {
  const ConvCase c{"", {4, 8, 9, 32}, 16, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {0, 1, 1}, {0, 1, 1}}};
  for (const auto& [x, w] : {std::pair{DType::f32, DType::f32},
                             {DType::bf16, DType::bf16},
                             {DType::f32, DType::f16},
                             {DType::bf16, DType::f32}}) {
    for (int extras = 0; extras < 4; ++extras) {
      SCOPED_TRACE(concat(name_of(x), " ", name_of(w), " extras ", extras));
      const ConvVariant variant{x, w, Layout::pitched, (extras & 1) != 0, (extras & 2) != 0};
      TestTensors tensors(*backend_);
      const Conv3dArgs device = arguments(c, variant, tensors.on_device()),
                       host = arguments(c, variant, tensors.on_host());
      backend_->conv3d(device.out, device.x, device.w, device.bias, c.conv, device.residual);
      expect_within(tensors.out(),
                    reference::conv3d(host.x, host.w, host.bias, c.conv, host.residual),
                    tolerance(x));
    }
  }
}

// Backends may convolve pairs of frames by way of sums of frames and taps. Of small integers all
// those are exact in bf16, so the result is the rounded exact one, whatever the way.
TEST_P(Convolution, PairsOfFramesAreExactInIntegers) {
  struct Case {
    Shape x;
    int64_t cout;
    std::array<int64_t, 3> before, after;
  };
  for (const Case& c : {Case{{4, 9, 17, 64}, 128, {0, 1, 1}, {0, 1, 1}},
                        {{5, 17, 9, 64}, 128, {0, 1, 1}, {0, 1, 1}},
                        {{1, 6, 7, 64}, 256, {2, 1, 1}, {0, 1, 1}},
                        {{2, 10, 16, 128}, 128, {2, 0, 1}, {0, 0, 1}},
                        {{6, 3, 33, 192}, 128, {1, 1, 0}, {1, 1, 0}}}) {
    SCOPED_TRACE(testing::Message() << c.x << " to " << c.cout);
    const auto integers = [&](TestTensor& t, int64_t step, int64_t most) {
      reference::Values values(size_t(t.host().numel()));
      for (size_t i = 0; i < values.size(); ++i)
        values[i] = double((int64_t(i) * step + int64_t(i) / 97) % (2 * most + 1) - most);
      t.assign(values);
    };
    TestTensor x(*backend_, c.x, DType::bf16), w(*backend_, {c.cout, c.x[3], 3, 3, 3}, DType::bf16),
        bias(*backend_, {c.cout}, DType::bf16);
    integers(x, 7919, 4);
    integers(w, 104729, 2);
    integers(bias, 31, 9);
    Shape shape{0, 0, 0, c.cout};
    for (int i = 0; i < 3; ++i) shape[i] = c.x[i] + c.before[size_t(i)] + c.after[size_t(i)] - 2;
    TestTensor residual(*backend_, shape, DType::bf16),
        out = poisoned(*backend_, shape, DType::bf16);
    integers(residual, 53, 100);
    const Conv3d conv{{1, 1, 1}, {1, 1, 1}, c.before, c.after};
    backend_->conv3d(out.device(), x.device(), w.device(), bias.device(), conv, residual.device());
    const reference::Values want =
        reference::conv3d(x.host(), w.host(), bias.host(), conv, residual.host());
    expect_close(out, want, 0, 1, want);
  }
}

// With the rest of a buffer around the output, and in place of the residual.
TEST_P(Convolution, PairsOfFramesInsideABuffer) {
  TestTensor x(*backend_, {7, 9, 17, 64}, DType::bf16),
      w(*backend_, {128, 64, 3, 3, 3}, DType::bf16),
      out(*backend_, {5, 9, 17, 128}, DType::bf16, Layout::outer_gaps);
  x.randomise(13);
  w.randomise(14, 0.05);
  out.randomise(15);
  const Conv3d conv{{1, 1, 1}, {1, 1, 1}, {0, 1, 1}, {0, 1, 1}};
  const reference::Values want = reference::conv3d(x.host(), w.host(), {}, conv, out.host());
  backend_->conv3d(out.device(), x.device(), w.device(), {}, conv, out.device());
  // Sums of frames and of taps may have been rounded: two roundings of 2^-9 in each of 1728
  // products of about 0.05 sqrt(2) sqrt(3) / 2 each way, not correlated, so that a deviation is
  // 2^-9 sqrt(2 * 4 * 64 * 9) * 0.06 = 0.008; six of them.
  reference::Values allowed(want.size(), 6 * 0.008 * 0x1p24);
  expect_close(out, want, 1, 1, allowed);
}

TEST_P(Convolution, ResidualMayBeTheOutput) {
  TestTensor x(*backend_, {2, 4, 5, 24}, DType::f32), w(*backend_, {24, 24, 1, 3, 3}, DType::f32),
      out(*backend_, {2, 4, 5, 24}, DType::f32);
  x.randomise(5);
  w.randomise(6, 0.1);
  out.randomise(7);
  const Conv3d conv{{1, 1, 1}, {1, 1, 1}, {0, 1, 1}, {0, 1, 1}};
  const reference::Values want = reference::conv3d(x.host(), w.host(), {}, conv, out.host());
  backend_->conv3d(out.device(), x.device(), w.device(), {}, conv, out.device());
  expect_close(out, want, 20, 1, reference::Values(want.size(), 6.0));
}

// The zeros of the padding must not be read from memory that holds something else.
TEST_P(Convolution, PaddingIsZeroBesideNan) {
  TestTensor x(*backend_, {1, 1, 5, 8}, DType::f32, Layout::pitched),
      w(*backend_, {8, 8, 3, 3, 3}, DType::f32);
  x.randomise(8);
  w.randomise(9);
  const Conv3d conv{{1, 1, 1}, {1, 1, 1}, {2, 1, 1}, {0, 1, 1}};
  TestTensor out = poisoned(*backend_, {1, 1, 5, 8}, DType::f32);
  backend_->conv3d(out.device(), x.device(), w.device(), {}, conv);
  const reference::Values want = reference::conv3d(x.host(), w.host(), {}, conv, {});
  expect_close(out, want, 20, 1, reference::Values(want.size(), 24.0));
}

TEST_P(Convolution, Transposed) {
  struct Case {
    int64_t length, cin, cout, taps, stride, padding;
  };
  for (const Case& c : {Case{9, 6, 10, 4, 2, 1},
                        {31, 16, 24, 10, 5, 3},
                        {7, 3, 5, 8, 4, 2},
                        {120, 32, 16, 16, 8, 4},
                        {5, 4, 4, 3, 1, 1},
                        {6, 2, 3, 2, 4, 0}}) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(testing::Message() << "taps " << c.taps << " stride " << c.stride);
      TestTensor x(*backend_, {c.length, c.cin}, dtype, Layout::pitched),
          w(*backend_, {c.cin, c.cout, c.taps}, dtype), bias(*backend_, {c.cout}, DType::f32);
      x.randomise(10);
      w.randomise(11, 0.5);
      bias.randomise(12);
      TestTensor out = poisoned(*backend_, {c.length * c.stride, c.cout}, dtype, Layout::pitched);
      backend_->conv_transpose1d(out.device(), x.device(), w.device(), bias.device(), c.stride,
                                 c.padding);
      const reference::Values want =
          reference::conv_transpose1d(x.host(), w.host(), bias.host(), c.stride, c.padding);
      expect_close(out, want, 12, 1, reference::Values(want.size(), double(c.cin)));
    }
  }
}

}  // namespace
}  // namespace orrery::conformance
