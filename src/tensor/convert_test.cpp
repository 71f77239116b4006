#include "tensor/convert.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace orrery {
namespace {

TEST(Convert, RoundsOnceFromEveryFloat) {
  const std::vector<float> values{1.0f, 1.0f + 0x1p-8f, -3.5f, 0x1p-20f};
  std::vector<bf16> narrow(4);
  convert(make_mut_view(narrow.data(), {4}, DType::bf16),
          make_view(values.data(), {4}, DType::f32));
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(narrow[i].bits, to_bf16(values[i]).bits);
  std::vector<float> wide(4);
  convert(make_mut_view(wide.data(), {4}, DType::f32), make_view(narrow.data(), {4}, DType::bf16));
  EXPECT_EQ(wide[2], -3.5f);
  const std::vector<uint16_t> halves{0x3c00, 0xc300};
  convert(make_mut_view(wide.data(), {2}, DType::f32), make_view(halves.data(), {2}, DType::f16));
  EXPECT_EQ(wide[1], -3.5f);
  const std::vector<uint8_t> codes{0x38, 0xc6};
  convert(make_mut_view(wide.data(), {2}, DType::f32), make_view(codes.data(), {2}, DType::f8e4m3));
  EXPECT_EQ(wide[0], 1.0f);
  EXPECT_EQ(wide[1], -3.5f);
}

// As a column slice of a file's matrix lies: rows apart, at any address.
TEST(Convert, TakesMisalignedSlices) {
  std::vector<std::byte> memory(1 + 6 * sizeof(float));
  const float values[] = {0, 1, 2, 3, 4, 5};
  std::memcpy(memory.data() + 1, values, sizeof values);
  const View x = make_view(memory.data() + 1, {2, 3}, DType::f32).slice(1, 1, 2);
  for (DType dtype : {DType::f32, DType::bf16}) {
    std::vector<float> out(4);
    convert(make_mut_view(out.data(), {2, 2}, dtype), x);
    EXPECT_EQ(dtype == DType::f32 ? out[2] : to_float(reinterpret_cast<bf16*>(out.data())[2]), 4);
  }
}

TEST(Convert, RefusesOtherTypes) {
  int32_t one = 1;
  float out = 0;
  EXPECT_ANY_THROW(convert(make_mut_view(&out, {1}, DType::f32), make_view(&one, {1}, DType::i32)));
  EXPECT_ANY_THROW(
      convert(make_mut_view(&one, {1}, DType::f8e4m3), make_view(&out, {1}, DType::f32)));
}

}  // namespace
}  // namespace orrery
