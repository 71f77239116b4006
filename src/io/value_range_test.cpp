#include "io/value_range.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "tensor/dtype.h"

namespace orrery {
namespace {

std::vector<float> normals(size_t n, float deviation) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> values(n);
  for (float& value : values) value = normal(random);
  return values;
}

// One flipped exponent bit stands out in a tensor of any size, though it alone makes up the whole
// root mean square.
TEST(ValueRange, OneDamagedValueIsFound) {
  for (const int64_t n :
       {int64_t{40}, int64_t{8192}, int64_t{8193}, int64_t{20000}, int64_t{300000}}) {
    std::vector<float> values = normals(static_cast<size_t>(n), 0.02f);
    const View view = make_view(values.data(), {n / 4, 4}, DType::f32);
    const ValueRange sound = value_range(view);
    EXPECT_TRUE(sound.is_likely()) << n;
    EXPECT_NEAR(sound.typical, 0.02, 0.01) << n;
    values[static_cast<size_t>(n / 2 + 1)] = -5e36f;
    const ValueRange damaged = value_range(view);
    EXPECT_FALSE(damaged.is_likely()) << n;
    EXPECT_NEAR(damaged.typical, 0.02, 0.01) << n;
    EXPECT_EQ(damaged.largest, double(5e36f));
    const Shape place{n / 2 / 4, (n / 2 + 1) % 4};
    EXPECT_EQ(damaged.at, place) << n;
    EXPECT_NE(damaged.unlikely().find("5e+36 at "), std::string::npos) << damaged.unlikely();
  }
}

TEST(ValueRange, StoredTypesAndTrainedOutliers) {
  std::vector<float> values = normals(50000, 0.02f);
  values[777] = 100;  // 5000 times the deviation: an outlier, no damage
  std::vector<bf16> narrow;
  std::vector<f16> half;
  for (float value : values) {
    narrow.push_back(to_bf16(value));
    half.push_back({static_cast<uint16_t>(value > 50 ? 0x5640 : 0x251f)});  // 100, 0.02
  }
  EXPECT_TRUE(value_range(make_view(values.data(), {50000}, DType::f32)).is_likely());
  EXPECT_TRUE(value_range(make_view(narrow.data(), {50000}, DType::bf16)).is_likely());
  const ValueRange of_half = value_range(make_view(half.data(), {50000}, DType::f16));
  EXPECT_TRUE(of_half.is_likely());
  EXPECT_EQ(of_half.largest, 100);
  values[777] = 1000;
  EXPECT_FALSE(value_range(make_view(values.data(), {50000}, DType::f32)).is_likely());
  // Zeros have no usual size.
  std::vector<float> zeros(20000);
  zeros[3] = 1;
  EXPECT_TRUE(value_range(make_view(zeros.data(), {20000}, DType::f32)).is_likely());
}

}  // namespace
}  // namespace orrery
