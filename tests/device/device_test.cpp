// What only the CUDA backend has, beside the conformance suite: sizes that a CPU takes too long
// for, work in parts, staged transfers, replayed steps, refusals. Skipped by name without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>

#include "base/error.h"
#include "conformance/harness.h"
#include "cuda/cuda_backend.h"

namespace orrery {
namespace {

using conformance::expect_close;
using conformance::expect_within;
using conformance::poisoned;
using conformance::TestTensor;

class Device : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    try {
      backend_ = cuda::make_cuda_backend().release();
    } catch (const Error& error) {
      why_not_ = error.what();
    }
  }
  static void TearDownTestSuite() {
    delete backend_;
    backend_ = nullptr;
  }
  void SetUp() override {
    if (!backend_) GTEST_SKIP() << why_not_;
  }

  static Backend& gpu() { return *backend_; }
  // Normal numbers, another seed each time.
  TestTensor random(Shape shape, DType dtype, double size = 1) {
    TestTensor tensor(gpu(), shape, dtype);
    tensor.randomise(++seed_, size);
    return tensor;
  }
  // A row of a matrix that is too large to be fetched.
  static TestTensor row_of(const View& matrix, int64_t row) {
    TestTensor one = poisoned(gpu(), {1, matrix.dim(1)}, matrix.dtype);
    gpu().copy(one.device(), matrix.slice(0, row, 1));
    EXPECT_TRUE(one.download());
    return one;
  }

  uint64_t seed_ = 0;
  static inline Backend* backend_ = nullptr;
  static inline std::string why_not_;
};

// The fused epilogues of the library's large kernels; residuals that cancel would show a second
// rounding.
TEST_F(Device, LinearOfLargeSizesRoundsOnce) {
  const int64_t m = 4096, n = 4096, k = 512;
  const TestTensor x = random({m, k}, DType::bf16), w = random({n, k}, DType::bf16),
                   bias = random({n}, DType::bf16, 20);
  for (int extras = 1; extras < 4; ++extras) {
    const Tensor out = gpu().allocate_tensor({m, n}, DType::bf16),
                 residual = gpu().allocate_tensor({m, n}, DType::bf16);
    gpu().linear(residual.view, x.device(), w.device());
    gpu().lincomb(residual.view, {{-1.0f, residual.view}});
    LinearOptions options;
    if (extras & 1) options.bias = bias.device();
    if (extras & 2) options.residual = residual.view;
    EXPECT_EQ(gpu().linear(out.view, x.device(), w.device(), options).name, "cublaslt");
    for (int64_t row : {int64_t{0}, int64_t{77}, int64_t{2048}, m - 1}) {
      const TestTensor got = row_of(out.view, row), added = row_of(residual.view, row);
      LinearOptions host;
      if (extras & 1) host.bias = bias.host();
      if (extras & 2) host.residual = added.host();
      const reference::Values want = reference::linear(x.host().slice(0, row, 1), w.host(), host);
      const reference::Values values = reference::values(got.host());
      double worst = 0;
      for (size_t i = 0; i < want.size(); ++i) {
        // Half a unit in the last place, and sums of 512 products of about 23 in f32.
        worst = std::max(worst, std::abs(values[i] - want[i]) - 0x1p-8 * std::abs(want[i]) - 1e-3);
      }
      EXPECT_LE(worst, 0) << "row " << row << " extras " << extras;
    }
  }
}

// 3 parts of 256 MiB of f32 sums; checked at rows of each part.
TEST_F(Device, LinearInPartsOfRows) {
  const int64_t m = 45000, n = 4096, k = 16;
  const TestTensor x = random({m, k}, DType::bf16), w = random({n, k}, DType::bf16);
  const Tensor out = gpu().allocate_tensor({m, n}, DType::bf16);
  LinearOptions options;
  options.activation = Activation::silu;
  gpu().linear(out.view, x.device(), w.device(), options);
  for (int64_t row : {int64_t{0}, int64_t{16383}, int64_t{16384}, int64_t{32768}, m - 1}) {
    TestTensor part = row_of(out.view, row);
    expect_within(part, reference::linear(x.host().slice(0, row, 1), w.host(), options),
                  conformance::kRounded);
  }
}

// The report can say which of a list ran: at these sizes each of them does.
TEST_F(Device, ImplementationsNameThemselves) {
  const auto product = [&](DType x_type, DType w_type, bool has_bias) {
    const TestTensor x = random({64, 64}, x_type), w = random({64, 64}, w_type),
                     bias = random({64}, x_type), out = poisoned(gpu(), {64, 64}, x_type);
    LinearOptions options;
    if (has_bias) options.bias = bias.device();
    return gpu().linear(out.device(), x.device(), w.device(), options);
  };
  EXPECT_EQ(product(DType::bf16, DType::bf16, false).name, "cublaslt");
  const Ran rounded = product(DType::bf16, DType::bf16, true);
  EXPECT_EQ(rounded.name, "cublaslt, epilogue");
  EXPECT_NE(rounded.declined.find("cublaslt: would round a small result"), std::string::npos)
      << rounded.declined;
  EXPECT_EQ(product(DType::bf16, DType::f32, false).name, "cublaslt, widened");

  const auto convolution = [&](Shape x_shape, std::array<int64_t, 3> kernel, const Conv3d& conv) {
    const conformance::ConvCase c{"", x_shape, 128, kernel, conv};
    const TestTensor x = random(x_shape, DType::bf16),
                     w = random({128, x_shape[3], kernel[0], kernel[1], kernel[2]}, DType::bf16),
                     out = poisoned(gpu(), c.out(), DType::bf16);
    return gpu().conv3d(out.device(), x.device(), w.device(), {}, conv).name;
  };
  const Conv3d spatial{{1, 1, 1}, {1, 1, 1}, {0, 1, 1}, {0, 1, 1}};
  EXPECT_EQ(convolution({2, 8, 8, 64}, {1, 1, 1}, {}), "gemm");
  EXPECT_EQ(convolution({4, 8, 8, 64}, {3, 1, 1}, {}), "gemm of columns");
  EXPECT_EQ(convolution({2, 16, 16, 64}, {1, 3, 3}, spatial), "cudnn");

  gpu().reset_stats();
  const TestTensor q = random({64, 2, 12}, DType::f32),
                   out = poisoned(gpu(), {64, 2, 12}, DType::f32);
  AttentionPlan plan;
  plan.scale = 0.2f;
  const Ran ran = gpu().attention(out.device(), q.device(), q.device(), q.device(), plan);
  EXPECT_EQ(ran.name, "reference");
  EXPECT_NE(ran.declined.find("native: takes bf16 only"), std::string::npos) << ran.declined;
  EXPECT_EQ(gpu().stats().find("attention")->second.implementations.at("reference").calls, 1);
}

// B59: offsets past 2^31 elements. The last rows of a long sequence are what the same rows give
// alone.
TEST_F(Device, LongSequencesUse64BitOffsets) {
  constexpr int64_t kRows = 262144 + 64, kHeads = 64, kKvHeads = 8, kDim = 128, kLast = 64,
                    kKeys = 256;
  const Shape shape{kRows, kHeads, kDim};
  ASSERT_GT(shape.numel(), int64_t{1} << 31);
  const Tensor q = gpu().allocate_tensor(shape, DType::bf16),
               out = gpu().allocate_tensor(shape, DType::bf16);
  gpu().fill(q.view, 0);
  const TestTensor part = random({kLast, kHeads, kDim}, DType::bf16);
  const MutView last = q.view.slice(0, kRows - kLast, kLast),
                last_out = out.view.slice(0, kRows - kLast, kLast);
  const TestTensor k = random({kKeys, kKvHeads, kDim}, DType::bf16),
                   v = random({kKeys, kKvHeads, kDim}, DType::bf16);
  const TestTensor weight = random({kDim}, DType::bf16),
                   wide_weight = random({kHeads * kDim}, DType::bf16);
  TestTensor want(gpu(), {kLast, kHeads, kDim}, DType::bf16),
      got(gpu(), {kLast, kHeads, kDim}, DType::bf16);
  const auto expect_same = [&](const char* op) {
    gpu().copy(got.device(), last_out);
    EXPECT_TRUE(want.download());
    EXPECT_TRUE(got.download());
    EXPECT_EQ(std::memcmp(got.host().data, want.host().data, size_t(got.host().bytes())), 0) << op;
  };

  gpu().copy(last, part.device());
  AttentionPlan plan;
  plan.scale = 0.0883883f;
  gpu().attention(out.view, q.view, k.device(), v.device(), plan);
  gpu().attention(want.device(), part.device(), k.device(), v.device(), plan);
  expect_same("attention");

  const Tensor angles = gpu().allocate_tensor({kRows, kDim / 2}, DType::f32);
  gpu().fill(angles.view, 0.5f);
  const View few = angles.view.slice(0, 0, kLast);
  gpu().qk_norm_rope(out.view, q.view, weight.device(), angles.view, angles.view, {});
  gpu().qk_norm_rope(want.device(), part.device(), weight.device(), few, few, {});
  expect_same("qk_norm_rope");

  const auto rows = [](const View& x) { return x.reshape({-1, kHeads * kDim}); };
  gpu().rms_norm(MutView::cast(rows(out.view)), rows(q.view), wide_weight.device(), {});
  gpu().rms_norm(MutView::cast(rows(want.device())), rows(part.device()), wide_weight.device(), {});
  expect_same("rms_norm");

  gpu().lincomb(out.view, {{2.0f, q.view}, {-0.5f, q.view}});
  gpu().lincomb(want.device(), {{2.0f, part.device()}, {-0.5f, part.device()}});
  expect_same("lincomb");

  gpu().activation(MutView::cast(rows(out.view)), rows(q.view), Activation::silu);
  gpu().activation(MutView::cast(rows(want.device())), rows(part.device()), Activation::silu);
  expect_same("activation");
}

// The second weights may land at the first ones' address: a stale reordered copy would show.
TEST_F(Device, ConvolutionForgetsFreedWeights) {
  const TestTensor x = random({1, 6, 6, 8}, DType::f32);
  const Conv3d conv{{1, 1, 1}, {1, 1, 1}, {0, 1, 1}, {0, 1, 1}};
  for (int turn = 0; turn < 3; ++turn) {
    const TestTensor w = random({8, 8, 1, 3, 3}, DType::f32);
    TestTensor out = poisoned(gpu(), {1, 6, 6, 8}, DType::f32);
    gpu().conv3d(out.device(), x.device(), w.device(), {}, conv);
    expect_within(out, reference::conv3d(x.host(), w.host(), {}, conv, {}), conformance::kExact);
  }
}

TEST_F(Device, TransfersOfManyChunks) {
  // 100 MiB and an odd rest: every worker reuses its buffers several times.
  const int64_t n = (int64_t{25} << 20) + 13;
  const Tensor host = allocate_host_tensor({n}, DType::f32),
               device = gpu().allocate_tensor({n}, DType::f32);
  auto* values = host.view.as<uint32_t>();
  for (int64_t i = 0; i < n; ++i) values[i] = uint32_t(i) * 2654435761u;
  gpu().upload(device.view, host.view);
  std::memset(host.view.mut(), 0, size_t(n) * 4);
  gpu().download(host.view, device.view);
  int64_t wrong = 0;
  for (int64_t i = 0; i < n; ++i) wrong += values[i] != uint32_t(i) * 2654435761u;
  EXPECT_EQ(wrong, 0);
}

// Layers that take turns: two places, the next layer on its way while this one is used.
TEST_F(Device, UploadsBesideCallsKeepTheirOrder) {
  constexpr int64_t kCount = int64_t{8} << 20;
  constexpr int kLayers = 5, kTurns = 4;
  std::vector<Buffer> hosts;
  for (int layer = 0; layer < kLayers; ++layer) {
    hosts.push_back(gpu().allocate_pinned(size_t(kCount) * 4));
    std::fill_n(static_cast<float*>(hosts.back().data()), kCount, float(layer + 1));
  }
  const Tensor places[2] = {gpu().allocate_tensor({kCount}, DType::f32),
                            gpu().allocate_tensor({kCount}, DType::f32)};
  const int lanes[2] = {gpu().make_lane(), gpu().make_lane()};
  TestTensor sum = poisoned(gpu(), {kCount}, DType::f32);
  gpu().fill(sum.device(), 0);
  const auto bring = [&](int turn) {
    const View host = make_view(hosts[size_t(turn % kLayers)].data(), {kCount}, DType::f32);
    gpu().upload_beside(lanes[turn % 2], places[turn % 2].view, host);
  };
  double want = 0;
  bring(0);
  for (int turn = 0; turn < kTurns * kLayers; ++turn) {
    gpu().await_upload(lanes[turn % 2]);
    bring(turn + 1);
    // Reads the place many times: a copy that came too early would show.
    for (int i = 0; i < 8; ++i) {
      gpu().lincomb(sum.device(), {{1.0f, sum.device()}, {1.0f, places[turn % 2].view}});
      want += turn % kLayers + 1;
    }
  }
  expect_close(sum, reference::Values(size_t(kCount), want), 0);
}

TEST_F(Device, MemoryIsCounted) {
  const MemoryState before = gpu().memory();
  EXPECT_GT(before.total, before.free);
  const size_t more = size_t(before.peak) + (size_t{64} << 20);
  {
    const Buffer buffer = gpu().allocate(more);
    EXPECT_GE(gpu().memory().peak, int64_t(more));
    EXPECT_LE(gpu().memory().free, before.free);
  }
  EXPECT_GE(gpu().memory().peak, int64_t(more));
}

TEST_F(Device, ReplayRunsTheStepAgainOnNewInputs) {
  const std::vector<int64_t> ids{3, 1, 2, 0};
  const TestTensor table = random({4, 64}, DType::bf16), w = random({64, 64}, DType::bf16),
                   x = random({4, 64}, DType::bf16);
  TestTensor rows = poisoned(gpu(), {4, 64}, DType::bf16),
             out = poisoned(gpu(), {4, 64}, DType::bf16);
  gpu().reset_stats();
  int calls = 0;
  const auto step = [&] {
    ++calls;
    gpu().gather_rows(rows.device(), table.device(), ids);
    gpu().linear(out.device(), x.device(), w.device(), {.bias = {}, .residual = rows.device()});
  };
  for (int turn = 0; turn < 5; ++turn) {
    const TestTensor fresh = random({4, 64}, DType::bf16);
    gpu().copy(x.device(), fresh.device());
    gpu().fill(out.device(), NAN);
    gpu().replay("test step", step);
    TestTensor sum(gpu(), {4, 64}, DType::bf16);
    sum.assign(reference::gather_rows(table.host(), ids));
    LinearOptions options;
    options.residual = sum.host();
    expect_within(out, reference::linear(fresh.host(), w.host(), options), conformance::kRounded);
  }
  EXPECT_EQ(calls, 2);  // once as it is, once recorded
  // A launched recording counts as what was recorded.
  const OpStats& stats = gpu().stats().find("linear")->second;
  EXPECT_EQ(stats.calls, 5);
  EXPECT_EQ(stats.implementations.at("cublaslt, epilogue").calls, 5);
}

// Events around the parts of a recording would tell nothing.
TEST_F(Device, StepsThatATimelineWatchesRunAsTheyAre) {
  const TestTensor x = random({8}, DType::f32);
  int calls = 0;
  const auto step = [&] {
    ++calls;
    gpu().fill(x.device(), 2.0f);
  };
  const std::unique_ptr<Timeline> timeline = cuda::make_timeline(gpu());
  gpu().set_observer(timeline.get());
  for (int turn = 0; turn < 3; ++turn) gpu().replay("watched step", step);
  gpu().set_observer(nullptr);
  EXPECT_EQ(calls, 3);
  const std::vector<Timeline::Span> spans = timeline->spans();
  ASSERT_EQ(spans.size(), 3u);
  for (const Timeline::Span& span : spans) {
    EXPECT_EQ(span.name, "fill");
    EXPECT_EQ(span.lane, "compute");
    EXPECT_LE(span.begin_ms, span.end_ms);
  }
}

TEST_F(Device, ReplayRefusesWhatTouchesTheHost) {
  TestTensor x = random({8}, DType::f32);
  const auto step = [&] { x.upload(); };
  gpu().replay("uploading step", step);
  try {
    gpu().replay("uploading step", step);
    FAIL() << "recorded an upload";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("upload"), std::string::npos) << error.what();
  }
  gpu().fill(x.device(), 2.0f);  // the stream is usable again
  expect_close(x, reference::Values(8, 2.0), 0);
}

TEST_F(Device, OutOfMemoryNamesTheNumbers) {
  const cuda::DeviceMemory memory = cuda::device_memory();
  EXPECT_GT(memory.free, 0u);
  EXPECT_GE(memory.total, memory.free);
  try {
    gpu().allocate(memory.total * 2);
    FAIL() << "allocated twice the device's memory";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::out_of_memory);
    EXPECT_NE(std::string(error.what()).find("GiB are free"), std::string::npos) << error.what();
  }
  TestTensor x = random({16}, DType::f32);  // and the device is usable again
  expect_close(x, reference::values(x.host()), 0);
}

TEST_F(Device, RefusesDevicesThatAreNotThere) {
  EXPECT_THROW(cuda::make_cuda_backend({.device = 99}), Error);
  EXPECT_THROW(cuda::make_cuda_backend({.device = -1}), Error);
}

TEST_F(Device, ProfilingTimesTheDevice) {
  gpu().reset_stats();
  gpu().set_profiling(true);
  const TestTensor x = random({1024, 1024}, DType::f32),
                   out = poisoned(gpu(), {1024, 1024}, DType::f32);
  EXPECT_GT(gpu().linear(out.device(), x.device(), x.device()).seconds, 0);
  gpu().set_profiling(false);
  EXPECT_GT(gpu().stats().find("linear")->second.seconds, 0);
}

}  // namespace
}  // namespace orrery
