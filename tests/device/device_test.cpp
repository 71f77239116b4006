// What the conformance suite does not reach on the CUDA backend: the other kernels behind an
// operation (widths, alignments, library engines, every attention), work in parts, replayed steps,
// staged transfers, refusals. Skipped by name without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>

#include "base/error.h"
#include "cuda/cuda_backend.h"
#include "reference/reference.h"

namespace orrery {
namespace {

// Relative error (norm of difference over norm of reference). f32: sums of a few thousand terms in
// another order. bf16: one rounding is at most 2^-8 of a value and 0.4 of that in the norm of many,
// more in that of few.
constexpr double kExact = 3e-6;
constexpr double kRounded = 3e-3;
constexpr double kRoundedTwice = 5e-3;

double tolerance(DType dtype) { return dtype == DType::f32 ? kExact : kRounded; }

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

  // The same tensor on both sides. Views cut from host() have their twin on the device.
  class Twin {
   public:
    Twin(Shape shape, DType dtype)
        : host_(allocate_host_tensor(shape, dtype)), device_(gpu().allocate_tensor(shape, dtype)) {}
    MutView host() const { return host_.view; }
    MutView device(const View& view) const {
      View twin = view;
      twin.data =
          static_cast<std::byte*>(device_.buffer.data()) +
          (static_cast<const std::byte*>(view.data) - static_cast<std::byte*>(host_.buffer.data()));
      twin.device = DeviceKind::cuda;
      return MutView::cast(twin);
    }
    MutView device() const { return device(host_.view); }
    void send() const { gpu().upload(device_.view, host_.view); }
    void fetch() const { gpu().download(host_.view, device_.view); }

   private:
    Tensor host_, device_;
  };

  Twin random(Shape shape, DType dtype, float scale = 1.0f, float shift = 0.0f) {
    Twin twin(shape, dtype);
    std::normal_distribution<float> normal;
    reference::Values values;
    for (int64_t i = 0; i < shape.numel(); ++i)
      values.push_back(scale * normal(generator_) + shift);
    if (dtype == DType::f16) {
      for (size_t i = 0; i < values.size(); ++i)
        twin.host().as<_Float16>()[i] = static_cast<_Float16>(values[i]);
    } else {
      reference::store(twin.host(), values);
    }
    twin.send();
    return twin;
  }

  // Poisoned: an element that nobody writes shows.
  Twin poisoned(Shape shape, DType dtype) {
    Twin twin(shape, dtype);
    std::memset(twin.host().mut(), 0xff, size_t(twin.host().bytes()));
    twin.send();
    return twin;
  }

  static double error(const reference::Values& got, const reference::Values& want) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      difference += (got[i] - want[i]) * (got[i] - want[i]);
      norm += want[i] * want[i];
    }
    return std::sqrt(difference) / std::max(std::sqrt(norm), 1e-30);
  }

  static void expect_close(const Twin& out, const View& view, const reference::Values& want,
                           double limit) {
    out.fetch();
    const reference::Values got = reference::values(view);
    ASSERT_EQ(got.size(), want.size());
    const double off = error(got, want);
    EXPECT_LE(off, limit);
    if (!(off <= limit)) {
      for (size_t i = 0, shown = 0; i < got.size() && shown < 4; ++i) {
        if (!(std::abs(got[i] - want[i]) <= limit * (std::abs(want[i]) + 1e-3) * 8)) {
          ADD_FAILURE() << "element " << i << " is " << got[i] << ", expected " << want[i];
          ++shown;
        }
      }
    }
  }
  static void expect_close(const Twin& out, const reference::Values& want, double limit) {
    expect_close(out, out.host(), want, limit);
  }

  std::mt19937 generator_{20260101};
  static inline Backend* backend_ = nullptr;
  static inline std::string why_not_;
};

constexpr DType kTypes[] = {DType::f32, DType::bf16};

// ---- elementwise and layout ---------------------------------------------------------------------

TEST_F(Device, CopyConvertsAndPermutes) {
  struct Case {
    const char* what;
    Shape from;
    std::function<View(View)> view;
  };
  const Case cases[] = {
      {"flat", {3, 50, 64}, [](View x) { return x; }},
      {"rows", {37, 96}, [](View x) { return x.slice(1, 16, 64); }},
      {"odd rows", {37, 97}, [](View x) { return x.slice(1, 3, 61); }},
      {"transpose",
       {70, 130},
       [](View x) {
         return x.permute({1, 0});
       }},
      {"batched transpose",
       {5, 33, 40, 3},
       [](View x) {
         return x.permute({0, 3, 2, 1});
       }},
      {"outer permute",
       {6, 5, 4, 16},
       [](View x) {
         return x.permute({2, 0, 1, 3});
       }},
      {"reversed",
       {3, 4, 5, 6},
       [](View x) {
         return x.permute({3, 2, 1, 0});
       }},
      {"broadcast", {9, 1, 24}, [](View x) { return x.expand(1, 7); }},
      {"broadcast column", {9, 1}, [](View x) { return x.expand(1, 40); }},
      {"rank 6",
       {2, 3, 2, 3, 2, 5},
       [](View x) {
         return x.permute({0, 2, 4, 1, 3, 5});
       }},
      {"one element", {1}, [](View x) { return x; }},
  };
  for (const Case& c : cases) {
    for (DType from : {DType::f32, DType::bf16, DType::f16}) {
      for (DType to : kTypes) {
        SCOPED_TRACE(concat(c.what, " ", name_of(from), " to ", name_of(to)));
        const Twin x = random(c.from, from);
        const View view = c.view(x.host());
        const Twin out = poisoned(view.shape, to);
        gpu().copy(out.device(), x.device(view));
        expect_close(out, reference::values(view), to == DType::bf16 && from != to ? kRounded : 0);
      }
    }
  }
}

TEST_F(Device, GatherRowsInManyLaunches) {
  std::vector<int64_t> ids;
  for (int i = 0; i < 1100; ++i) ids.push_back(int64_t(generator_() % 60));
  for (DType table_type : {DType::f32, DType::bf16}) {
    for (DType dtype : kTypes) {
      for (int64_t width : {24, 25}) {
        const Twin table = random({60, width}, table_type);
        const Twin out = poisoned({1100, width}, dtype);
        gpu().gather_rows(out.device(), table.device(), ids);
        expect_close(out, reference::gather_rows(table.host(), ids),
                     dtype == table_type ? 0 : kRounded);
      }
    }
  }
}

// ---- projections and norms
// ------------------------------------------------------------------------

TEST_F(Device, LinearAllTypesAndEpilogues) {
  struct Types {
    DType x, w, out, bias;
  };
  const Types types[] = {
      {DType::f32, DType::f32, DType::f32, DType::f32},
      {DType::bf16, DType::bf16, DType::bf16, DType::bf16},
      {DType::bf16, DType::bf16, DType::f32, DType::bf16},
      {DType::f32, DType::bf16, DType::f32, DType::bf16},
      {DType::f32, DType::f16, DType::f32, DType::f32},
      {DType::bf16, DType::f32, DType::bf16, DType::f32},
  };
  for (const Types& t : types) {
    for (const auto& [m, n, k] :
         {std::array<int64_t, 3>{96, 64, 128}, {1, 40, 33}, {37, 1, 24}, {53, 29, 7}, {5, 8, 1}}) {
      for (auto kind :
           {orrery::Activation::none, orrery::Activation::silu, orrery::Activation::relu2}) {
        for (int extras = 0; extras < 4; ++extras) {
          SCOPED_TRACE(concat(m, "x", n, "x", k, " ", name_of(t.x), " ", name_of(t.w), " ",
                              name_of(t.out), " activation ", int(kind), " extras ", extras));
          const Twin x = random({m, k}, t.x), w = random({n, k}, t.w), bias = random({n}, t.bias);
          const Twin residual = random({m, n}, t.out);
          const Twin out = poisoned({m, n}, t.out);
          LinearOptions host, device;
          host.activation = device.activation = kind;
          if (extras & 1) host.bias = bias.host(), device.bias = bias.device();
          if (extras & 2) host.residual = residual.host(), device.residual = residual.device();
          gpu().linear(out.device(), x.device(), w.device(), device);
          expect_close(out, reference::linear(x.host(), w.host(), host), tolerance(t.out));
        }
      }
    }
  }
}

TEST_F(Device, LinearStridedTransposedInPlace) {
  for (DType dtype : kTypes) {
    SCOPED_TRACE(name_of(dtype));
    const Twin x = random({40, 96}, dtype), w = random({64, 48}, dtype);
    const View rows = x.host().slice(1, 16, 64);
    {
      const Twin out = random({40, 80}, dtype);
      const View cut = out.host().slice(1, 8, 48);
      const View transposed = w.host().permute({1, 0});  // [48, 64]
      LinearOptions host, device;
      host.residual = cut;
      device.residual = out.device(cut);
      const reference::Values want = reference::linear(rows, transposed, host);
      gpu().linear(out.device(cut), x.device(rows), w.device(transposed), device);
      expect_close(out, cut, want, tolerance(dtype));
    }
    const View one = x.host().slice(0, 3, 1).slice(1, 0, 48).expand(0, 9);  // one row, nine times
    const Twin out = poisoned({9, 64}, dtype);
    gpu().linear(out.device(), x.device(one), w.device(), {});
    expect_close(out, reference::linear(one, w.host(), {}), tolerance(dtype));
  }
}

TEST_F(Device, LinearOfLargeSizesRoundsOnce) {
  // The fused epilogues of the library's large kernels; residuals that cancel would show a second
  // rounding.
  const int64_t m = 4096, n = 4096, k = 512;
  const Twin x = random({m, k}, DType::bf16), w = random({n, k}, DType::bf16),
             bias = random({n}, DType::bf16, 20);
  for (int extras = 1; extras < 4; ++extras) {
    Tensor out = gpu().allocate_tensor({m, n}, DType::bf16);
    Tensor residual = gpu().allocate_tensor({m, n}, DType::bf16);
    gpu().linear(residual.view, x.device(), w.device());
    gpu().lincomb(residual.view, {{-1.0f, residual.view}});
    LinearOptions options;
    if (extras & 1) options.bias = bias.device();
    if (extras & 2) options.residual = residual.view;
    gpu().linear(out.view, x.device(), w.device(), options);
    for (int64_t row : {int64_t{0}, int64_t{77}, int64_t{2048}, m - 1}) {
      const Twin got = poisoned({1, n}, DType::bf16), added = poisoned({1, n}, DType::bf16);
      gpu().copy(got.device(), out.view.slice(0, row, 1));
      gpu().copy(added.device(), residual.view.slice(0, row, 1));
      got.fetch();
      added.fetch();
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

TEST_F(Device, LinearInPartsOfRows) {
  // 3 parts of 256 MiB of f32 sums; checked at rows of each part.
  const int64_t m = 45000, n = 4096, k = 16;
  const Twin x = random({m, k}, DType::bf16), w = random({n, k}, DType::bf16);
  Tensor out = gpu().allocate_tensor({m, n}, DType::bf16);
  gpu().linear(out.view, x.device(), w.device(),
               {.bias = {}, .residual = {}, .activation = orrery::Activation::silu});
  for (int64_t row : {int64_t{0}, int64_t{16383}, int64_t{16384}, int64_t{32768}, m - 1}) {
    const Twin part = poisoned({1, n}, DType::bf16);
    gpu().copy(part.device(), out.view.slice(0, row, 1));
    LinearOptions options;
    options.activation = orrery::Activation::silu;
    expect_close(part, reference::linear(x.host().slice(0, row, 1), w.host(), options), kRounded);
  }
}

TEST_F(Device, RmsNormEveryKindAndWidth) {
  for (DType dtype : kTypes) {
    for (int64_t width : {16, 160, 1000, 1024, 2048, 4096, 5120, 9000, 33, 1027}) {
      for (auto kind : {NormKind::qwen, NormKind::nemotron, NormKind::channel}) {
        for (bool silu : {false, true}) {
          SCOPED_TRACE(
              concat(name_of(dtype), " width ", width, " kind ", int(kind), " silu ", silu));
          const Twin x = random({3, 5, width}, dtype, 2.0f), w = random({width}, dtype, 0.2f, 1.0f);
          const Norm norm{kind, 1e-5f, silu};
          const reference::Values want = reference::rms_norm(x.host(), w.host(), norm);
          gpu().rms_norm(x.device(), x.device(), w.device(), norm);
          expect_close(x, want, dtype == DType::f32 ? kExact : kRoundedTwice);
        }
      }
    }
  }
}

TEST_F(Device, RmsNormOfStridedRows) {
  const Twin x = random({4, 6, 5, 48}, DType::f32), w = random({32}, DType::bf16);
  const View view = x.host().slice(3, 8, 32).permute({1, 2, 0, 3});
  const Twin out = poisoned({6, 5, 4, 32}, DType::f32);
  gpu().rms_norm(out.device(), x.device(view), w.device(), {NormKind::nemotron, 1e-6f, false});
  expect_close(out, reference::rms_norm(view, w.host(), {NormKind::nemotron, 1e-6f, false}),
               kExact);
}

TEST_F(Device, QkNormRope) {
  for (DType dtype : kTypes) {
    for (int64_t d : {6, 64, 128, 256, 10}) {
      for (auto kind : {NormKind::qwen, NormKind::nemotron}) {
        for (bool weighted : {true, false}) {
          SCOPED_TRACE(
              concat(name_of(dtype), " d ", d, " kind ", int(kind), " weighted ", weighted));
          const int64_t s = 13, h = 3;
          const Twin x = random({s, 2 * h * d}, dtype), w = random({d}, dtype, 0.2f, 1.0f);
          const Twin cos = random({s, d / 2}, DType::f32), sin = random({s, d / 2}, DType::f32);
          const View heads = x.host().slice(1, h * d, h * d).reshape({s, h, d});
          const Twin buffer = poisoned({s + 4, h, d}, dtype);
          const View tail = buffer.host().slice(0, 4, s);
          const Norm norm{kind, 1e-6f, false};
          const View weight = weighted ? View(w.host()) : View{};
          gpu().qk_norm_rope(buffer.device(tail), x.device(heads),
                             weighted ? View(w.device()) : View{}, cos.device(), sin.device(),
                             norm);
          expect_close(buffer, tail,
                       reference::qk_norm_rope(heads, weight, cos.host(), sin.host(), norm),
                       dtype == DType::f32 ? kExact : kRoundedTwice);
        }
      }
    }
  }
}

// ---- attention
// --------------------------------------------------------------------------------------

// bf16 kernels round the probabilities to bf16 before the second product, as all fast ones do.
double attention_tolerance(DType dtype, const std::string& implementation) {
  if (dtype == DType::f32) return 5e-6;
  return implementation == "reference" ? kRounded : kRoundedTwice;
}

TEST_F(Device, AttentionDenseByEveryImplementation) {
  struct Case {
    int64_t sq, skv, heads, kv_heads, d;
    bool causal;
  };
  const Case cases[] = {
      {70, 70, 4, 2, 32, false},    {70, 70, 4, 2, 32, true},     {33, 100, 4, 1, 64, false},
      {128, 200, 8, 2, 128, false}, {200, 200, 8, 2, 128, true},  {33, 100, 2, 2, 64, true},
      {100, 33, 2, 2, 64, true},    {9, 20, 2, 1, 6, false},      {50, 60, 1, 1, 640, false},
      {5, 1, 2, 1, 16, false},      {300, 257, 4, 4, 128, false},
  };
  for (const Case& c : cases) {
    for (DType dtype : kTypes) {
      for (const char* name : {"", "native", "cudnn", "gemm", "reference"}) {
        SCOPED_TRACE(concat(name, " ", name_of(dtype), " ", c.sq, "x", c.skv, " heads ", c.heads,
                            "/", c.kv_heads, " d ", c.d, c.causal ? " causal" : ""));
        const Twin q = random({c.sq, c.heads, c.d}, dtype);
        const Twin kv = random({c.skv, 2, c.kv_heads, c.d}, dtype);
        const View k = kv.host().select(1, 0), v = kv.host().select(1, 1);
        const Twin out = poisoned({c.sq, c.heads, c.d}, dtype),
                   lse = poisoned({c.heads, c.sq}, DType::f32);
        AttentionPlan plan;
        plan.causal = c.causal;
        plan.scale = 1.0f / std::sqrt(float(c.d));
        plan.implementation = name;
        const reference::Attention want = reference::attention(q.host(), k, v, plan);
        plan.lse = lse.device();
        try {
          gpu().attention(out.device(), q.device(), kv.device(k), kv.device(v), plan);
        } catch (const Error& refusal) {
          EXPECT_EQ(refusal.kind(), ErrorKind::unsupported) << refusal.what();
          EXPECT_NE(std::string(name), "");
          EXPECT_NE(std::string(name), "reference");
          continue;
        }
        const std::string ran = gpu().last_attention();
        if (*name) {
          EXPECT_EQ(ran, name);
        }
        expect_close(out, want.out, attention_tolerance(dtype, ran));
        lse.fetch();
        const reference::Values got = reference::values(lse.host());
        for (size_t i = 0; i < got.size(); ++i) {
          if (std::isinf(want.lse[i])) {
            EXPECT_EQ(got[i], want.lse[i]);
          } else {
            ASSERT_NEAR(got[i], want.lse[i], dtype == DType::f32 ? 1e-5 : 2e-3);
          }
        }
      }
    }
  }
}

TEST_F(Device, AttentionWithBlockLists) {
  for (DType dtype : kTypes) {
    for (int64_t lists : {4, 1}) {
      for (const char* name : {"", "native", "reference"}) {
        SCOPED_TRACE(concat(name, " ", name_of(dtype), " lists ", lists));
        const int64_t sq = 200, skv = 330, rows = 4, blocks = 6;
        const Twin q = random({sq, 4, 128}, dtype), k = random({skv, 2, 128}, dtype),
                   v = random({skv, 2, 128}, dtype);
        const Twin indices({lists, rows, blocks}, DType::i32), counts({lists, rows}, DType::i32);
        for (int64_t row = 0; row < lists * rows; ++row) {
          std::vector<int32_t> order{0, 1, 2, 3, 4, 5};
          std::shuffle(order.begin(), order.end(), generator_);
          const int64_t count = 1 + int64_t(generator_() % 6);
          std::sort(order.begin(), order.begin() + count);
          std::copy(order.begin(), order.end(), indices.host().as<int32_t>() + row * blocks);
          counts.host().as<int32_t>()[row] = int32_t(count);
        }
        indices.send();
        counts.send();
        BlockMask mask{64, 64, indices.host(), counts.host()};
        AttentionPlan plan;
        plan.scale = 0.088f;
        plan.mask = &mask;
        plan.implementation = name;
        const reference::Attention want = reference::attention(q.host(), k.host(), v.host(), plan);
        const BlockMask device_mask{64, 64, indices.device(), counts.device()};
        plan.mask = &device_mask;
        const Twin out = poisoned({sq, 4, 128}, dtype);
        try {
          gpu().attention(out.device(), q.device(), k.device(), v.device(), plan);
        } catch (const Error& refusal) {
          EXPECT_EQ(refusal.kind(), ErrorKind::unsupported) << refusal.what();
          EXPECT_EQ(std::string(name), "native") << refusal.what();
          continue;
        }
        expect_close(out, want.out, attention_tolerance(dtype, gpu().last_attention()));
      }
    }
  }
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
  const Twin part = random({kLast, kHeads, kDim}, DType::bf16);
  const MutView last = q.view.slice(0, kRows - kLast, kLast),
                last_out = out.view.slice(0, kRows - kLast, kLast);
  const Twin k = random({kKeys, kKvHeads, kDim}, DType::bf16),
             v = random({kKeys, kKvHeads, kDim}, DType::bf16);
  const Twin weight = random({kDim}, DType::bf16),
             wide_weight = random({kHeads * kDim}, DType::bf16);
  const Twin want({kLast, kHeads, kDim}, DType::bf16), got({kLast, kHeads, kDim}, DType::bf16);
  const auto expect_same = [&](const char* op) {
    want.fetch();
    gpu().download(got.host(), last_out);
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

TEST_F(Device, SelectBlocks) {
  struct Case {
    int64_t sq, skv, heads, kv_heads, d, block_q, block_k;
    double sparsity;
    int64_t prefix, tail_keys, tail_queries;
  };
  const Case cases[] = {
      {1000, 1070, 4, 2, 32, 64, 64, 0.75, 70, 0, 0},
      {1000, 1070, 4, 2, 32, 64, 64, 0.9, 0, 40, 100},
      {700, 1300, 2, 1, 64, 128, 64, 0.8, 10, 0, 0},
      {700, 1300, 2, 1, 64, 64, 32, 0.75, 0, 0, 1},
      {300, 300, 2, 2, 16, 64, 64, 0.5, 300, 0, 0},
      {500, 600, 1, 1, 24, 16, 16, 0.6, 64, 5, 7},
  };
  for (const Case& c : cases) {
    for (DType dtype : kTypes) {
      SCOPED_TRACE(
          concat(name_of(dtype), " ", c.sq, "x", c.skv, " blocks ", c.block_q, "x", c.block_k));
      const Twin q = random({c.sq, c.heads, c.d}, dtype),
                 k = random({c.skv, c.kv_heads, c.d}, dtype);
      BlockSelection selection;
      selection.block_q = c.block_q;
      selection.block_k = c.block_k;
      selection.target_sparsity = c.sparsity;
      selection.protected_keys = c.prefix;
      selection.protected_tail_keys = c.tail_keys;
      selection.protected_tail_queries = c.tail_queries;
      selection.scale = 1.0f / std::sqrt(float(c.d));
      const int64_t rows = (c.sq + c.block_q - 1) / c.block_q,
                    blocks = (c.skv + c.block_k - 1) / c.block_k;
      const Twin indices({c.heads, rows, blocks + 3}, DType::i32),
          counts({c.heads, rows}, DType::i32);
      const Twin scores = poisoned({c.heads, rows, blocks}, DType::f32);
      const reference::Selection want = reference::select_blocks(q.host(), k.host(), selection);
      gpu().select_blocks(indices.device(), counts.device(), q.device(), k.device(), selection,
                          scores.device());
      expect_close(scores, want.scores, kExact);
      indices.fetch();
      counts.fetch();
      int different = 0;
      for (int64_t row = 0; row < c.heads * rows; ++row) {
        const int32_t count = counts.host().as<int32_t>()[row];
        const int32_t* list = indices.host().as<int32_t>() + row * (blocks + 3);
        ASSERT_EQ(size_t(count), want.indices[size_t(row)].size()) << "row " << row;
        if (!std::equal(list, list + count, want.indices[size_t(row)].begin())) ++different;
        EXPECT_TRUE(std::is_sorted(list, list + count));
      }
      // Scores closer than their rounding may swap at the cut.
      EXPECT_LE(different, 1);
    }
  }
}

// ---- convolution
// ------------------------------------------------------------------------------------

TEST_F(Device, Conv3d) {
  struct Case {
    const char* what;
    Shape x;
    int64_t cout;
    std::array<int64_t, 3> kernel;
    Conv3d conv;
  };
  const Case cases[] = {
      {"3x3x3 same", {3, 9, 10, 16}, 32, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}}},
      {"3x3x3 causal", {3, 9, 10, 16}, 16, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {2, 1, 1}, {0, 1, 1}}},
      {"3x3x3 cached", {5, 8, 8, 64}, 64, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {0, 1, 1}, {0, 1, 1}}},
      {"planes", {2, 12, 14, 24}, 16, {1, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {0, 1, 1}, {0, 1, 1}}},
      {"downsampling",
       {2, 12, 14, 16},
       16,
       {1, 3, 3},
       {{1, 2, 2}, {1, 1, 1}, {0, 0, 0}, {0, 1, 1}}},
      {"time", {5, 6, 7, 16}, 32, {3, 1, 1}, {{1, 1, 1}, {1, 1, 1}, {0, 0, 0}, {0, 0, 0}}},
      {"time by two", {5, 6, 7, 16}, 16, {3, 1, 1}, {{2, 1, 1}, {1, 1, 1}, {0, 0, 0}, {0, 0, 0}}},
      {"pointwise", {2, 6, 7, 20}, 12, {1, 1, 1}, {}},
      {"odd channels", {2, 7, 9, 12}, 7, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}}},
      {"dilated line", {1, 1, 50, 16}, 16, {1, 1, 7}, {{1, 1, 1}, {1, 1, 3}, {0, 0, 9}, {0, 0, 9}}},
      {"three channels",
       {1, 16, 16, 3},
       8,
       {1, 3, 3},
       {{1, 1, 1}, {1, 1, 1}, {0, 1, 1}, {0, 1, 1}}},
  };
  for (const Case& c : cases) {
    for (DType dtype : kTypes) {
      for (int extras = 0; extras < 4; ++extras) {
        const Twin x = random(c.x, dtype);
        const Twin w = random({c.cout, c.x[3], c.kernel[0], c.kernel[1], c.kernel[2]}, dtype, 0.1f);
        const Twin bias = random({c.cout}, dtype);
        Shape shape = {0, 0, 0, c.cout};
        for (int d = 0; d < 3; ++d) {
          const auto i = size_t(d);
          shape[d] = (c.x[d] + c.conv.pad_before[i] + c.conv.pad_after[i] -
                      c.conv.dilation[i] * (c.kernel[i] - 1) - 1) /
                         c.conv.stride[i] +
                     1;
        }
        const Twin residual = random(shape, dtype), out = poisoned(shape, dtype);
        const bool biased = extras & 1, added = extras & 2;
        gpu().conv3d(out.device(), x.device(), w.device(), biased ? View(bias.device()) : View{},
                     c.conv, added ? View(residual.device()) : View{});
        SCOPED_TRACE(concat(c.what, " ", name_of(dtype), " extras ", extras, " by ",
                            cuda::last_convolution(gpu())));
        expect_close(out,
                     reference::conv3d(x.host(), w.host(), biased ? View(bias.host()) : View{},
                                       c.conv, added ? View(residual.host()) : View{}),
                     tolerance(dtype));
        if (extras == 3)
          std::printf("conv3d %s %s: %s\n", c.what, std::string(name_of(dtype)).c_str(),
                      cuda::last_convolution(gpu()).c_str());
      }
    }
  }
}

TEST_F(Device, Conv3dOfStridedViewsAndMixedTypes) {
  const Conv3d conv{{1, 1, 1}, {1, 1, 1}, {0, 1, 1}, {0, 1, 1}};
  for (const auto& [x_type, w_type] :
       {std::pair{DType::f32, DType::bf16}, {DType::f32, DType::f16}, {DType::bf16, DType::f32}}) {
    SCOPED_TRACE(concat(name_of(x_type), " ", name_of(w_type)));
    const Twin x = random({4, 8, 9, 48}, x_type), w = random({16, 32, 3, 3, 3}, w_type, 0.1f);
    const View cut = x.host().slice(3, 16, 32);
    const Twin out = poisoned({2, 8, 9, 24}, x_type);
    const View to = out.host().slice(3, 8, 16);
    gpu().conv3d(out.device(to), x.device(cut), w.device(), {}, conv);
    expect_close(out, to, reference::conv3d(cut, w.host(), {}, conv, {}), tolerance(x_type));
  }
}

TEST_F(Device, ConvolutionForgetsFreedWeights) {
  // The second weights may land at the first ones' address: a stale reordered copy would show.
  const Twin x = random({1, 6, 6, 8}, DType::f32);
  const Conv3d conv{{1, 1, 1}, {1, 1, 1}, {0, 1, 1}, {0, 1, 1}};
  for (int turn = 0; turn < 3; ++turn) {
    const Twin w = random({8, 8, 1, 3, 3}, DType::f32);
    const Twin out = poisoned({1, 6, 6, 8}, DType::f32);
    gpu().conv3d(out.device(), x.device(), w.device(), {}, conv);
    expect_close(out, reference::conv3d(x.host(), w.host(), {}, conv, {}), kExact);
  }
}

// ---- transfers, replay, refusals
// --------------------------------------------------------------------

TEST_F(Device, TransfersOfManyChunks) {
  // 100 MiB and an odd rest: every worker reuses its buffers several times.
  const int64_t n = (int64_t{25} << 20) + 13;
  const Twin x(Shape{n}, DType::f32);
  auto* values = x.host().as<uint32_t>();
  for (int64_t i = 0; i < n; ++i) values[i] = uint32_t(i) * 2654435761u;
  x.send();
  std::memset(x.host().mut(), 0, size_t(n) * 4);
  x.fetch();
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
  const Twin sum({kCount}, DType::f32);
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
  const Twin table = random({4, 64}, DType::bf16), w = random({64, 64}, DType::bf16);
  const Twin x = random({4, 64}, DType::bf16);
  const Twin rows = poisoned({4, 64}, DType::bf16), out = poisoned({4, 64}, DType::bf16);
  int calls = 0;
  const auto step = [&] {
    ++calls;
    gpu().gather_rows(rows.device(), table.device(), ids);
    gpu().linear(out.device(), x.device(), w.device(), {.bias = {}, .residual = rows.device()});
  };
  for (int turn = 0; turn < 5; ++turn) {
    const Twin fresh = random({4, 64}, DType::bf16);
    gpu().copy(x.device(), fresh.device());
    gpu().fill(out.device(), NAN);
    gpu().replay("test step", step);
    LinearOptions options;
    const reference::Values gathered = reference::gather_rows(table.host(), ids);
    const Twin sum({4, 64}, DType::bf16);
    reference::store(sum.host(), gathered);
    options.residual = sum.host();
    expect_close(out, reference::linear(fresh.host(), w.host(), options), kRounded);
  }
  EXPECT_EQ(calls, 2);  // once as it is, once recorded
}

// Events around the parts of a recording would tell nothing.
TEST_F(Device, StepsThatATimelineWatchesRunAsTheyAre) {
  const Twin x = random({8}, DType::f32);
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
  const Twin x = random({8}, DType::f32);
  const auto step = [&] { x.send(); };
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
  const Twin x = random({16}, DType::f32);  // and the device is usable again
  expect_close(x, reference::values(x.host()), 0);
}

TEST_F(Device, RefusesDevicesThatAreNotThere) {
  EXPECT_THROW(cuda::make_cuda_backend({.device = 99}), Error);
  EXPECT_THROW(cuda::make_cuda_backend({.device = -1}), Error);
}

TEST_F(Device, ProfilingTimesTheDevice) {
  gpu().reset_stats();
  gpu().set_profiling(true);
  const Twin x = random({1024, 1024}, DType::f32);
  gpu().linear(poisoned({1024, 1024}, DType::f32).device(), x.device(), x.device(), {});
  gpu().set_profiling(false);
  EXPECT_GT(gpu().stats().find("linear")->second.seconds, 0);
}

}  // namespace
}  // namespace orrery
