#include "tensor/quantise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace orrery {
namespace {

struct Matrix {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  MutOperand operand;

  Matrix(Shape shape, DType dtype, ScaleBlock block)
      : codes(static_cast<size_t>(shape.numel())),
        scales(static_cast<size_t>(block.shape_for(shape).numel()), 1.0f) {
    operand = {make_mut_view(codes.data(), shape, dtype),
               make_mut_view(scales.data(), block.shape_for(shape), DType::f32), block};
  }
};

// Of every granularity: the block's largest value becomes the type's largest, others are within
// half a step of their own size.
TEST(Quantise, EveryGranularity) {
  const Shape shape{7, 10};
  std::vector<float> values, back(70);
  for (int i = 0; i < 70; ++i) values.push_back(std::sin(float(i)) * std::exp2(float(i % 9 - 4)));
  const View x = make_view(values.data(), shape, DType::f32);
  for (DType dtype : {DType::f8e4m3, DType::i8}) {
    for (ScaleBlock block :
         {ScaleBlock{0, 0}, {1, 0}, {0, 1}, {3, 4}, {1, 4}, {7, 10}, {128, 128}}) {
      SCOPED_TRACE(::testing::Message()
                   << name_of(dtype) << ' ' << block.rows << " x " << block.columns);
      Matrix made(shape, dtype, block);
      quantise(made.operand, x, Scaling::amax);
      dequantise(make_mut_view(back.data(), shape, DType::f32), made.operand);
      for (int64_t r = 0; r < 7; ++r) {
        for (int64_t c = 0; c < 10; ++c) {
          const Operand one = Operand(made.operand);
          const int64_t i = block.rows == 0 ? 0 : r / block.rows;
          const int64_t j = block.columns == 0 ? 0 : c / block.columns;
          const float scale = one.scales.as<float>()[i * one.scales.stride(0) + j];
          const float value = values[size_t(r * 10 + c)];
          const float step =
              dtype == DType::i8 ? scale / 2 : std::fabs(value) / 16 + scale * 0x1p-10f;
          EXPECT_LE(std::fabs(back[size_t(r * 10 + c)] - value), step * 1.0001f);
          EXPECT_LE(std::fabs(value), scale * largest_of(dtype) * 1.0001f);
        }
      }
    }
  }
}

TEST(Quantise, GivenScalesSaturateAndTiesGoToEven) {
  const std::vector<float> values{1e6f, -INFINITY, NAN, 2.5f, 3.5f, -2.5f};
  const View x = make_view(values.data(), {1, 6}, DType::f32);
  Matrix eight({1, 6}, DType::i8, {});
  eight.scales[0] = 1;
  quantise(eight.operand, x, Scaling::given);
  const std::vector<int8_t> want{127, -127, 0, 2, 4, -2};
  for (size_t i = 0; i < want.size(); ++i) EXPECT_EQ(int8_t(eight.codes[i]), want[i]) << i;
  Matrix floats({1, 6}, DType::f8e4m3, {});
  floats.scales[0] = 0.5f;
  quantise(floats.operand, x, Scaling::given);
  EXPECT_EQ(floats.codes[0], 0x7e);
  EXPECT_EQ(floats.codes[1], 0xfe);
  EXPECT_TRUE(std::isnan(to_float(f8e4m3{floats.codes[2]})));
  EXPECT_EQ(to_float(f8e4m3{floats.codes[3]}), 5.0f);
  EXPECT_EQ(floats.scales[0], 0.5f);
}

TEST(Quantise, ZerosHaveTheScaleOne) {
  const std::vector<float> values(8, 0.0f);
  Matrix made({2, 4}, DType::f8e4m3, {1, 0});
  quantise(made.operand, make_view(values.data(), {2, 4}, DType::f32), Scaling::amax);
  EXPECT_EQ(made.scales, (std::vector<float>{1, 1}));
  EXPECT_EQ(made.codes, std::vector<uint8_t>(8));
}

TEST(Operand, SlicesTakeTheirScalesAlong) {
  Matrix made({6, 8}, DType::i8, {2, 4});
  for (size_t i = 0; i < made.scales.size(); ++i) made.scales[i] = float(i);
  const Operand rows = made.operand.slice(0, 2, 3);
  EXPECT_EQ(rows.shape, (Shape{3, 8}));
  EXPECT_EQ(rows.scales.shape, (Shape{2, 2}));
  EXPECT_EQ(rows.scales.as<float>()[0], 2.0f);
  const Operand columns = Operand(made.operand).slice(1, 4, 4);
  EXPECT_EQ(columns.scales.shape, (Shape{3, 1}));
  EXPECT_EQ(columns.scales.as<float>()[0], 1.0f);
  EXPECT_ANY_THROW(made.operand.slice(0, 1, 2));
  Matrix whole({6, 8}, DType::i8, {0, 0});
  EXPECT_EQ(Operand(whole.operand).slice(0, 5, 1).scales.shape, (Shape{1, 1}));
}

}  // namespace
}  // namespace orrery
