#include <cmath>
#include <cstring>

#include "conformance/harness.h"

namespace orrery::conformance {
namespace {

ORRERY_CONFORMANCE(Elementwise);

constexpr DType kFloats[] = {DType::f32, DType::bf16};

struct CopyCase {
  const char* what;
  Shape shape;
  Layout in, out;
  std::vector<int> order;  // permutation of the input, empty: none
};

TEST_P(Elementwise, CopyConvertsAndMovesAnyLayout) {
  const CopyCase cases[] = {
      {"one element", {1}, Layout::contiguous, Layout::contiguous, {}},
      {"long row", {70001}, Layout::contiguous, Layout::contiguous, {}},
      {"rows into a pitch", {37, 65}, Layout::contiguous, Layout::pitched, {}},
      {"rows out of a pitch", {37, 65}, Layout::pitched, Layout::contiguous, {}},
      {"transpose", {129, 67}, Layout::contiguous, Layout::contiguous, {1, 0}},
      {"transpose of short rows", {3, 517}, Layout::pitched, Layout::contiguous, {1, 0}},
      {"channels last", {5, 3, 17, 19}, Layout::contiguous, Layout::pitched, {1, 2, 3, 0}},
      {"patches", {3, 4, 5, 2, 6, 2}, Layout::contiguous, Layout::contiguous, {1, 2, 4, 3, 5, 0}},
      {"odd rows", {37, 61}, Layout::odd, Layout::contiguous, {}},
      {"into odd rows", {37, 61}, Layout::contiguous, Layout::odd, {}},
      {"transposes", {5, 33, 40, 3}, Layout::contiguous, Layout::contiguous, {0, 3, 2, 1}},
      {"rows in another order", {6, 5, 4, 16}, Layout::contiguous, Layout::pitched, {2, 0, 1, 3}},
      {"reversed", {3, 4, 5, 6}, Layout::contiguous, Layout::contiguous, {3, 2, 1, 0}},
      {"pairs", {2, 3, 2, 3, 2, 5}, Layout::contiguous, Layout::contiguous, {0, 2, 4, 1, 3, 5}},
  };
  for (const CopyCase& c : cases) {
    for (DType from : {DType::f32, DType::bf16, DType::f16}) {
      for (DType to : kFloats) {
        SCOPED_TRACE(concat(c.what, " ", name_of(from), " to ", name_of(to)));
        TestTensor x(*backend_, c.shape, from, c.in);
        x.randomise(1);
        const auto permuted = [&](View view) {
          if (c.order.empty()) return view;
          View out = view;
          for (int i = 0; i < view.rank(); ++i) {
            out.shape[i] = view.dim(c.order[size_t(i)]);
            out.strides[i] = view.stride(c.order[size_t(i)]);
          }
          return out;
        };
        TestTensor out = poisoned(*backend_, permuted(x.host()).shape, to, c.out);
        backend_->copy(out.device(), permuted(x.device()));
        expect_close(out, reference::values(permuted(x.host())), 0);
      }
    }
  }
}

TEST_P(Elementwise, CopyBroadcasts) {
  TestTensor x(*backend_, {1, 40}, DType::f32);
  x.randomise(2);
  TestTensor column(*backend_, {33, 1}, DType::bf16);
  column.randomise(3);
  TestTensor rows = poisoned(*backend_, {33, 40}, DType::bf16, Layout::pitched);
  backend_->copy(rows.device(), View(x.device()).expand(0, 33));
  expect_close(rows, reference::values(x.host().expand(0, 33)), 0);
  TestTensor columns = poisoned(*backend_, {33, 40}, DType::f32);
  backend_->copy(columns.device(), View(column.device()).expand(1, 40));
  expect_close(columns, reference::values(column.host().expand(1, 40)), 0);
  TestTensor plane(*backend_, {9, 1, 24}, DType::f32);
  plane.randomise(4);
  TestTensor planes = poisoned(*backend_, {9, 7, 24}, DType::f32);
  backend_->copy(planes.device(), View(plane.device()).expand(1, 7));
  expect_close(planes, reference::values(plane.host().expand(1, 7)), 0);
}

TEST_P(Elementwise, CopyReadsHalf) {
  // 1, -2, the smallest subnormal, the largest number, 0.333, infinity, negative zero.
  const uint16_t bits[] = {0x3c00, 0xc000, 0x0001, 0x7bff, 0x3555, 0x7c00, 0x8000};
  const Shape shape{7};
  Tensor x = backend_->allocate_tensor(shape, DType::f16);
  backend_->upload(x.view, make_view(bits, shape, DType::f16));
  TestTensor out = poisoned(*backend_, shape, DType::f32);
  backend_->copy(out.device(), x.view);
  expect_close(out, reference::values(make_view(bits, shape, DType::f16)), 0);
  EXPECT_EQ(reference::values(out.host())[2], 0x1p-24);
  EXPECT_EQ(reference::values(out.host())[3], 65504);
}

TEST_P(Elementwise, CopyRoundsToNearestEvenAndKeepsNan) {
  TestTensor x(*backend_, {6}, DType::f32);
  x.assign({1.00390625, 1.01171875, NAN, INFINITY, 3.39e38, 3.4e38});
  TestTensor out = poisoned(*backend_, {6}, DType::bf16);
  backend_->copy(out.device(), x.device());
  // 1 + 2^-8 and 1 + 3 2^-8 lie half way and go to the even neighbours; the largest bf16
  // is 3.3895e38 and what is nearer to the next step becomes infinity.
  expect_close(out, {1.0, 1.015625, NAN, INFINITY, 3.3895313892515355e38, INFINITY}, 0);
}

TEST_P(Elementwise, FillWritesOnlyItsView) {
  for (DType dtype : kFloats) {
    for (Layout layout : {Layout::contiguous, Layout::pitched, Layout::outer_gaps}) {
      TestTensor out = poisoned(*backend_, {9, 5, 33}, dtype, layout);
      backend_->fill(out.device(), 0.7f);
      expect_close(out, reference::Values(9 * 5 * 33, double(0.7f)), 0);
    }
  }
}

TEST_P(Elementwise, LincombSumsUpToEightTerms) {
  for (DType dtype : kFloats) {
    for (size_t count : {1, 2, 3, 8}) {
      for (Layout layout : {Layout::contiguous, Layout::pitched}) {
        SCOPED_TRACE(count);
        std::vector<TestTensor> xs;
        std::vector<Term> terms, host_terms;
        reference::Values magnitude(7 * 131, 0.0);
        for (size_t i = 0; i < count; ++i) {
          // Terms of either type and layout may be mixed.
          xs.emplace_back(*backend_, Shape{7, 131}, i % 3 == 2 ? DType::bf16 : dtype,
                          i % 2 ? Layout::contiguous : layout);
          xs.back().randomise(10 + i);
        }
        for (size_t i = 0; i < count; ++i) {
          const float factor = 0.3f * float(i + 1) - 1.0f;
          terms.push_back({factor, xs[i].device()});
          host_terms.push_back({factor, xs[i].host()});
          const reference::Values x = reference::values(xs[i].host());
          for (size_t j = 0; j < x.size(); ++j) magnitude[j] += std::fabs(double(factor) * x[j]);
        }
        TestTensor out = poisoned(*backend_, {7, 131}, dtype, layout);
        backend_->lincomb(out.device(), terms);
        expect_close(out, reference::lincomb(host_terms), double(count), 1, magnitude);
      }
    }
  }
}

TEST_P(Elementwise, LincombMayUpdateATerm) {
  TestTensor x(*backend_, {3, 700}, DType::f32), y(*backend_, {3, 700}, DType::f32);
  x.randomise(20);
  y.randomise(21);
  const std::vector<Term> host{{2.0f, y.host()}, {-0.5f, x.host()}};
  const reference::Values want = reference::lincomb(host);
  reference::Values size = reference::values(x.host());
  const reference::Values ys = reference::values(y.host());
  for (size_t i = 0; i < size.size(); ++i) size[i] = std::fabs(size[i]) + 2 * std::fabs(ys[i]);
  backend_->lincomb(x.device(), {{2.0f, y.device()}, {-0.5f, x.device()}});
  expect_close(x, want, 3, 1, size);
}

TEST_P(Elementwise, LincombBroadcastsATerm) {
  TestTensor x(*backend_, {6, 50}, DType::f32), row(*backend_, {1, 50}, DType::f32);
  x.randomise(22);
  row.randomise(23);
  const std::vector<Term> host{{1.0f, x.host()}, {1.0f, row.host().expand(0, 6)}};
  TestTensor out = poisoned(*backend_, {6, 50}, DType::f32);
  backend_->lincomb(out.device(), {{1.0f, x.device()}, {1.0f, View(row.device()).expand(0, 6)}});
  expect_close(out, reference::lincomb(host), 0, 1);
}

TEST_P(Elementwise, AddRow) {
  for (DType dtype : kFloats) {
    TestTensor x(*backend_, {41, 77}, dtype, Layout::pitched), row(*backend_, {77}, DType::f32);
    x.randomise(30);
    row.randomise(31);
    const reference::Values want = reference::add_row(x.host(), row.host());
    backend_->add_row(x.device(), row.device());
    expect_close(x, want, 1);
  }
}

TEST_P(Elementwise, Activations) {
  for (DType dtype : kFloats) {
    for (Activation kind :
         {Activation::none, Activation::silu, Activation::relu2, Activation::silu_gate}) {
      for (int64_t width : {1, 5, 64, 1111}) {
        SCOPED_TRACE(int(kind));
        const bool gated = kind == Activation::silu_gate;
        TestTensor x(*backend_, {13, gated ? 2 * width : width}, dtype, Layout::pitched);
        x.randomise(40, 6);
        TestTensor out = poisoned(*backend_, {13, width}, dtype, Layout::pitched);
        backend_->activation(out.device(), x.device(), kind);
        // exp to about 1e-7 and a division.
        expect_close(out, reference::activation(x.host(), kind), 6);
      }
    }
  }
}

TEST_P(Elementwise, ActivationsAtTheEnds) {
  TestTensor x(*backend_, {1, 8}, DType::f32);
  x.assign({-1e30, -104, -88.5, -0.0, 0, 88.5, 3e38, NAN});
  TestTensor out = poisoned(*backend_, {1, 8}, DType::f32);
  backend_->activation(out.device(), x.device(), Activation::silu);
  ASSERT_TRUE(out.download());
  const reference::Values got = reference::values(out.host());
  EXPECT_NEAR(got[0], 0, 1e-30);
  EXPECT_NEAR(got[1], 0, 1e-30);
  EXPECT_NEAR(got[2], -88.5 * std::exp(-88.5), 1e-36);
  EXPECT_EQ(got[3], 0);
  EXPECT_EQ(got[4], 0);
  EXPECT_EQ(got[5], 88.5);
  EXPECT_EQ(float(got[6]), 3e38f);
  EXPECT_TRUE(std::isnan(got[7])) << "a NaN must not vanish (B14)";
}

TEST_P(Elementwise, ActivationInPlace) {
  TestTensor x(*backend_, {6, 700}, DType::bf16);
  x.randomise(41, 3);
  const reference::Values want = reference::activation(x.host(), Activation::silu);
  backend_->activation(x.device(), x.device(), Activation::silu);
  expect_close(x, want, 6);
}

TEST_P(Elementwise, ClampKeepsNan) {
  TestTensor x(*backend_, {3, 1001}, DType::f32);
  x.randomise(42);
  reference::Values want = reference::values(x.host());
  for (double& value : want) value = std::min(std::max(value, -0.5), 0.75);
  backend_->clamp(x.device(), -0.5f, 0.75f);
  expect_close(x, want, 0);
  TestTensor odd(*backend_, {4}, DType::f32);
  odd.assign({NAN, INFINITY, -INFINITY, 0.25});
  backend_->clamp(odd.device(), -1, 1);
  ASSERT_TRUE(odd.download());
  const float* got = odd.host().as<float>();
  EXPECT_TRUE(std::isnan(got[0]));
  EXPECT_EQ(got[1], 1);
  EXPECT_EQ(got[2], -1);
  EXPECT_EQ(got[3], 0.25f);
}

TEST_P(Elementwise, ToBytesRoundsHalfToEven) {
  // (2 n + 1) / 255 - 1 lies between levels n and n + 1.
  TestTensor x(*backend_, {9, 1}, DType::f32);
  x.assign({-1, 1, 0, -1.5, 7, NAN, INFINITY, -INFINITY, 1.0 / 255});
  Tensor out = backend_->allocate_tensor({9, 1}, DType::u8);
  backend_->to_bytes(out.view, x.device());
  std::vector<uint8_t> got(9);
  backend_->download(make_mut_view(got.data(), {9, 1}, DType::u8), out.view);
  EXPECT_EQ(got, (std::vector<uint8_t>{0, 255, 128, 0, 255, 0, 255, 0, 128}));

  TestTensor many(*backend_, {70001}, DType::f32);
  many.randomise(43, 0.6);
  out = backend_->allocate_tensor({70001}, DType::u8);
  backend_->to_bytes(out.view, many.device());
  got.resize(70001);
  backend_->download(make_mut_view(got.data(), {70001}, DType::u8), out.view);
  const float* values = many.host().as<float>();
  for (size_t i = 0; i < got.size(); ++i) {
    const float unit = std::min(std::max(values[i] * 0.5f + 0.5f, 0.0f), 1.0f);
    ASSERT_EQ(got[i], std::nearbyint(unit * 255.0f)) << values[i];
  }
}

TEST_P(Elementwise, AllFinite) {
  for (DType dtype : kFloats) {
    TestTensor x(*backend_, {70001}, dtype);
    x.randomise(44, 1e30);
    EXPECT_TRUE(backend_->all_finite(x.device()));
    for (double bad : {double(NAN), double(INFINITY), double(-INFINITY)}) {
      for (size_t at : {size_t{0}, size_t{40000}, size_t{70000}}) {
        reference::Values values(70001, 3e38);
        values[at] = bad;
        x.assign(values);
        EXPECT_FALSE(backend_->all_finite(x.device())) << bad << " at " << at;
      }
    }
  }
}

TEST_P(Elementwise, GatherRows) {
  for (DType table_type : kFloats) {
    for (DType dtype : kFloats) {
      // More rows than one launch of a device takes, of even and odd widths.
      for (const auto& [count, width] :
           {std::pair<int64_t, int64_t>{5, 600}, {1100, 24}, {1100, 25}}) {
        TestTensor table(*backend_, {19, width}, table_type, Layout::pitched);
        table.randomise(50);
        std::vector<int64_t> ids{3, 0, 18, 3, 7};
        for (int64_t i = 5; i < count; ++i) ids.push_back(i * i % 19);
        TestTensor out = poisoned(*backend_, {count, width}, dtype, Layout::pitched);
        backend_->gather_rows(out.device(), table.device(), ids);
        expect_close(out, reference::gather_rows(table.host(), ids), 0);
      }
    }
  }
}

// On a device, of a table that stays in host memory: unaligned, as in a mapped file.
TEST_P(Elementwise, GatherRowsOfAHostTable) {
  for (DType table_type : kFloats) {
    for (DType dtype : kFloats) {
      TestTensor table(*backend_, {19, 600}, table_type, Layout::pitched);
      table.randomise(50);
      const View& host = table.host();
      std::vector<std::byte> bytes(static_cast<size_t>(host.stride(0) * 19 * size_of(table_type)) +
                                   1);
      std::memcpy(
          bytes.data() + 1, host.data,
          bytes.size() - 1 - static_cast<size_t>((host.stride(0) - 600) * size_of(table_type)));
      View moved = host;
      if (backend_->device() != DeviceKind::cpu) moved.data = bytes.data() + 1;
      const std::vector<int64_t> ids{3, 0, 18, 3, 7};
      TestTensor out = poisoned(*backend_, {5, 600}, dtype, Layout::pitched);
      backend_->gather_rows(out.device(), moved, ids);
      expect_close(out, reference::gather_rows(table.host(), ids), 0);
    }
  }
}

TEST_P(Elementwise, Snake) {
  for (DType dtype : kFloats) {
    TestTensor x(*backend_, {57, 70}, dtype, Layout::pitched), alpha(*backend_, {70}, DType::f32),
        beta(*backend_, {70}, DType::f32);
    x.randomise(60, 3);
    alpha.randomise(61, 0.7);
    beta.randomise(62, 0.7);
    TestTensor out = poisoned(*backend_, {57, 70}, dtype, Layout::pitched);
    backend_->snake(out.device(), x.device(), alpha.device(), beta.device());
    // sin^2 turns a relative error of its argument y into one of |y|: exp(alpha) and the product
    // are each rounded, and the sum is scaled by 1 / exp(beta).
    const reference::Values xs = reference::values(x.host()), a = reference::values(alpha.host()),
                            b = reference::values(beta.host());
    reference::Values magnitude(xs.size());
    for (size_t i = 0; i < xs.size(); ++i) {
      magnitude[i] =
          std::fabs(xs[i]) + (1 + std::fabs(std::exp(a[i % 70]) * xs[i])) / std::exp(b[i % 70]);
    }
    expect_close(out, reference::snake(x.host(), alpha.host(), beta.host()), 4, 1, magnitude);
  }
}

TEST_P(Elementwise, SnakeFarFromZero) {
  TestTensor x(*backend_, {1, 4}, DType::f32), alpha(*backend_, {4}, DType::f32),
      beta(*backend_, {4}, DType::f32);
  x.assign({1e5, -3e6, 4000, 1});
  alpha.assign({0, 0, 0, 0});
  beta.assign(reference::Values(4, -14));  // makes the wave as large as its argument
  TestTensor out = poisoned(*backend_, {1, 4}, DType::f32);
  backend_->snake(out.device(), x.device(), alpha.device(), beta.device());
  reference::Values magnitude;
  for (double value : reference::values(x.host())) {
    magnitude.push_back(std::fabs(value) + std::exp(14.0));
  }
  expect_close(out, reference::snake(x.host(), alpha.host(), beta.host()), 8, 1, magnitude);
}

}  // namespace
}  // namespace orrery::conformance
