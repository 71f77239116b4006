#include <cmath>

#include "conformance/harness.h"

namespace orrery::conformance {
namespace {

ORRERY_CONFORMANCE(Convolution);

struct ConvCase {
  const char* what;
  Shape x;  // [D, H, W, Cin]
  int64_t cout;
  std::array<int64_t, 3> kernel;
  Conv3d conv;
};

const ConvCase kCases[] = {
    {"causal 3x3x3, 24 channels",
     {3, 9, 35, 24},
     24,
     {3, 3, 3},
     {{1, 1, 1}, {1, 1, 1}, {2, 1, 1}, {0, 1, 1}}},
    {"causal 3x3x3 with cached frames",
     {4, 6, 7, 8},
     16,
     {3, 3, 3},
     {{1, 1, 1}, {1, 1, 1}, {0, 1, 1}, {0, 1, 1}}},
    {"odd channels", {2, 5, 6, 3}, 4, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {2, 1, 1}, {0, 1, 1}}},
    {"twelve to three", {1, 8, 40, 12}, 3, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {2, 1, 1}, {0, 1, 1}}},
    {"one channel", {1, 4, 4, 1}, 1, {1, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {0, 1, 1}, {0, 1, 1}}},
    {"pointwise", {2, 5, 17, 48}, 96, {1, 1, 1}, {}},
    {"pointwise, many channels", {1, 3, 5, 400}, 330, {1, 1, 1}, {}},
    {"time only", {5, 4, 6, 16}, 32, {3, 1, 1}, {{1, 1, 1}, {1, 1, 1}, {2, 0, 0}, {0, 0, 0}}},
    {"time only, stride 2",
     {5, 4, 6, 16},
     16,
     {3, 1, 1},
     {{2, 1, 1}, {1, 1, 1}, {0, 0, 0}, {0, 0, 0}}},
    {"3x3 per frame", {2, 12, 33, 40}, 40, {1, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {0, 1, 1}, {0, 1, 1}}},
    {"stride 2, padded right and bottom",
     {2, 10, 12, 24},
     24,
     {1, 3, 3},
     {{1, 2, 2}, {1, 1, 1}, {0, 0, 0}, {0, 1, 1}}},
    {"1-D", {1, 1, 301, 20}, 28, {1, 1, 7}, {{1, 1, 1}, {1, 1, 1}, {0, 0, 3}, {0, 0, 3}}},
    {"1-D dilated", {1, 1, 301, 20}, 28, {1, 1, 7}, {{1, 1, 1}, {1, 1, 9}, {0, 0, 27}, {0, 0, 27}}},
    {"dilated everywhere",
     {6, 7, 8, 5},
     9,
     {2, 2, 3},
     {{1, 2, 1}, {3, 2, 2}, {1, 1, 2}, {2, 1, 2}}},
    {"channels deeper than a slice",
     {1, 3, 4, 150},
     20,
     {1, 3, 3},
     {{1, 1, 1}, {1, 1, 1}, {0, 1, 1}, {0, 1, 1}}},
    {"kernel larger than the input",
     {1, 2, 2, 8},
     8,
     {3, 5, 5},
     {{1, 1, 1}, {1, 1, 1}, {2, 2, 2}, {0, 2, 2}}},
    {"far padding", {1, 2, 2, 8}, 8, {1, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 5, 4}, {1, 3, 6}}},
};

TEST_P(Convolution, EveryShape) {
  for (const ConvCase& c : kCases) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      for (Layout layout : {Layout::contiguous, Layout::pitched, Layout::outer_gaps}) {
        SCOPED_TRACE(testing::Message()
                     << c.what << " " << name_of(dtype) << " layout " << int(layout));
        TestTensor x(*backend_, c.x, dtype, layout);
        TestTensor w(*backend_, {c.cout, c.x[3], c.kernel[0], c.kernel[1], c.kernel[2]},
                     layout == Layout::pitched ? DType::bf16 : dtype);
        TestTensor bias(*backend_, {c.cout}, dtype);
        x.randomise(1);
        w.randomise(2, 0.3);
        bias.randomise(3);
        Shape shape{0, 0, 0, c.cout};
        for (int i = 0; i < 3; ++i) {
          const auto a = size_t(i);
          shape[i] = (c.x[i] + c.conv.pad_before[a] + c.conv.pad_after[a] -
                      c.conv.dilation[a] * (c.kernel[a] - 1) - 1) /
                         c.conv.stride[a] +
                     1;
        }
        TestTensor residual(*backend_, shape, dtype, layout);
        residual.randomise(4);
        TestTensor out = poisoned(*backend_, shape, dtype, layout);
        const bool full = layout != Layout::contiguous;
        const View b = full ? View(bias.device()) : View{},
                   r = full ? View(residual.device()) : View{};
        const View hb = full ? bias.host() : View{}, hr = full ? residual.host() : View{};
        backend_->conv3d(out.device(), x.device(), w.device(), b, c.conv, r);
        reference::Values size = reference::conv3d(absolute(*backend_, x).host(),
                                                   absolute(*backend_, w).host(), {}, c.conv, {});
        for (double& value : size) value += 4;
        const double depth = double(w.host().numel() / c.cout);
        expect_close(out, reference::conv3d(x.host(), w.host(), hb, c.conv, hr),
                     2 + std::sqrt(depth), 1, size);
      }
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
