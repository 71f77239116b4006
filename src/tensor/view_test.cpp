#include "tensor/view.h"

#include <gtest/gtest.h>

#include <numeric>
#include <utility>
#include <vector>

#include "expect_error.h"

namespace orrery {
namespace {

// A [dims...] view whose elements count up from 0.
class ViewTest : public testing::Test {
 protected:
  View count(Shape shape) {
    values_.resize(static_cast<size_t>(shape.numel()));
    std::iota(values_.begin(), values_.end(), 0.0f);
    return make_view(values_.data(), shape, DType::f32);
  }
  // The elements of a view in row-major order.
  static std::vector<float> elements(const View& view) {
    std::vector<float> out;
    if (view.numel() == 0) return out;
    Shape at = view.shape;
    for (int d = 0; d < at.rank(); ++d) at[d] = 0;
    while (true) {
      int64_t offset = 0;
      for (int d = 0; d < at.rank(); ++d) offset += at[d] * view.stride(d);
      out.push_back(view.as<float>()[offset]);
      int d = at.rank() - 1;
      while (d >= 0 && ++at[d] == view.dim(d)) at[d--] = 0;
      if (d < 0) return out;
    }
  }
  using Floats = std::vector<float>;

  std::vector<float> values_;
};

TEST(Shape, HoldsUpToSixDimensions) {
  Shape shape{2, 3};
  EXPECT_EQ(shape.rank(), 2);
  EXPECT_EQ(shape.numel(), 6);
  shape.push_back(0);
  EXPECT_EQ(shape.numel(), 0);
  EXPECT_EQ(Shape{}.numel(), 1);
  EXPECT_TRUE((Shape{2, 3}) == (Shape{2, 3}));
  EXPECT_FALSE((Shape{2, 3}) == (Shape{2, 3, 1}));
  EXPECT_FALSE((Shape{2, 3}) == (Shape{3, 2}));
  EXPECT_EQ(concat(Shape{2, 3, 4}, Shape{}), "[2, 3, 4][]");
  Shape full{1, 1, 1, 1, 1, 1};
  expect_error(ErrorKind::invalid_argument, {"more than 6 dimensions"}, [&] { full.push_back(1); });
}

TEST_F(ViewTest, IsRowMajor) {
  const View view = count({2, 3, 4});
  EXPECT_EQ(view.strides, (Shape{12, 4, 1}));
  EXPECT_TRUE(view.contiguous());
  EXPECT_EQ(view.bytes(), 96);
  EXPECT_EQ(view.dim(-1), 4);
  EXPECT_EQ(view.stride(-3), 12);
  EXPECT_FALSE(static_cast<bool>(View{}));
}

TEST_F(ViewTest, Slices) {
  const View view = count({3, 4});
  EXPECT_EQ(elements(view.slice(0, 1, 2)), (Floats{4, 5, 6, 7, 8, 9, 10, 11}));
  const View columns = view.slice(-1, 1, 2);
  EXPECT_EQ(elements(columns), (Floats{1, 2, 5, 6, 9, 10}));
  EXPECT_FALSE(columns.contiguous());
  EXPECT_TRUE(columns.rows_contiguous());
  EXPECT_EQ(view.slice(1, 4, 0).numel(), 0);
  for (const auto& range : {std::pair{0, 5}, {-1, 2}, {4, 1}, {0, -1}}) {
    expect_error(ErrorKind::invalid_argument, {"slice", "[3, 4]"},
                 [&] { view.slice(1, range.first, range.second); });
  }
  expect_error(ErrorKind::invalid_argument, {"dimension 2"}, [&] { view.slice(2, 0, 1); });
}

TEST_F(ViewTest, Selects) {
  const View view = count({2, 3, 2});
  EXPECT_EQ(elements(view.select(1, 2)), (Floats{4, 5, 10, 11}));
  EXPECT_EQ(view.select(1, 2).shape, (Shape{2, 2}));
  EXPECT_EQ(view.select(0, 1).select(0, 0).select(0, 1).shape, Shape{});
  expect_error(ErrorKind::invalid_argument, {"slice"}, [&] { view.select(0, 2); });
}

TEST_F(ViewTest, Permutes) {
  const View view = count({2, 3}).permute({1, 0});
  EXPECT_EQ(elements(view), (Floats{0, 3, 1, 4, 2, 5}));
  EXPECT_FALSE(view.contiguous());
  EXPECT_FALSE(view.rows_contiguous());
  expect_error(ErrorKind::invalid_argument, {"permute"}, [&] { view.permute({0}); });
  expect_error(ErrorKind::invalid_argument, {"permute", "axis 2"}, [&] { view.permute({0, 2}); });
}

TEST_F(ViewTest, ReshapesContiguous) {
  const View view = count({4, 6});
  EXPECT_EQ(view.reshape({2, 2, -1}).shape, (Shape{2, 2, 6}));
  EXPECT_EQ(elements(view.reshape({-1})), elements(view));
  EXPECT_EQ(count({0, 3}).reshape({3, 0, 5}).numel(), 0);
  EXPECT_EQ(count({1}).reshape({}).rank(), 0);
  expect_error(ErrorKind::invalid_argument, {"reshape", "24 elements"}, [&] {
    view.reshape({5, -1});
  });
  expect_error(ErrorKind::invalid_argument, {"reshape"}, [&] { view.reshape({4, 5}); });
}

TEST_F(ViewTest, ReshapesStridedWithoutACopy) {
  const View columns = count({4, 6}).slice(1, 1, 4);  // rows 6 apart
  EXPECT_EQ(elements(columns.reshape({2, 2, 2, 2})), elements(columns));
  EXPECT_EQ(elements(columns.reshape({4, 1, 4, 1})), elements(columns));
  const View turned = count({2, 3, 4}).permute({2, 0, 1});
  EXPECT_EQ(elements(turned.reshape({4, 6})), elements(turned));
  EXPECT_EQ(elements(turned.reshape({2, 2, 6})), elements(turned));
  expect_error(ErrorKind::invalid_argument, {"without a copy"}, [&] { columns.reshape({16}); });
  expect_error(ErrorKind::invalid_argument, {"without a copy"}, [&] { turned.reshape({8, 3}); });
}

TEST_F(ViewTest, ReshapeSeesThroughDimensionsOfSizeOne) {
  const View columns = count({3, 5}).slice(1, 0, 2);
  const View apart = columns.unsqueeze(1);  // [3, 1, 2], rows still 5 apart
  EXPECT_EQ(elements(apart.reshape({3, 2})), elements(columns));
  expect_error(ErrorKind::invalid_argument, {"without a copy"}, [&] { apart.reshape({6}); });
  const View first = count({3, 5}).slice(1, 2, 1);  // [3, 1]
  EXPECT_EQ(elements(first.reshape({3})), (Floats{2, 7, 12}));
  EXPECT_EQ(elements(first.reshape({1, 3, 1})), (Floats{2, 7, 12}));
}

TEST_F(ViewTest, ExpandsAndUnsqueezes) {
  const View row = count({3}).unsqueeze(0).expand(0, 2);
  EXPECT_EQ(row.shape, (Shape{2, 3}));
  EXPECT_EQ(elements(row), (Floats{0, 1, 2, 0, 1, 2}));
  EXPECT_FALSE(row.contiguous());
  EXPECT_EQ(count({3}).unsqueeze(1).shape, (Shape{3, 1}));
  EXPECT_TRUE(count({2, 3}).unsqueeze(1).contiguous());
  expect_error(ErrorKind::invalid_argument, {"expand", "not 1"}, [&] { count({2}).expand(0, 3); });
  expect_error(ErrorKind::invalid_argument, {"unsqueeze"}, [&] { count({2}).unsqueeze(2); });
  expect_error(ErrorKind::invalid_argument, {"unsqueeze"}, [&] { count({2}).unsqueeze(-1); });
}

TEST_F(ViewTest, WritableViewsKeepTheirTypeThroughSlicing) {
  float data[6] = {};
  const MutView view = make_mut_view(data, {2, 3}, DType::f32);
  view.slice(1, 1, 1).select(0, 1).as<float>()[0] = 7;
  view.permute({1, 0}).select(0, 2).as<float>()[0] = 8;
  EXPECT_EQ((std::vector<float>(data, data + 6)), (Floats{0, 0, 8, 0, 7, 0}));
}

}  // namespace
}  // namespace orrery
