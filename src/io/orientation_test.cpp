#include "io/orientation.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace orrery {
namespace {

// One byte per pixel in the red channel.
Image letters(int64_t height, int64_t width, const std::string& text) {
  Image image{height, width, {}};
  for (const char c : text) image.rgb.insert(image.rgb.end(), {uint8_t(c), 1, 2});
  return image;
}

std::string read(const Image& image) {
  std::string text;
  for (size_t i = 0; i < image.rgb.size(); i += 3) text += char(image.rgb[i]);
  return text;
}

// Little-endian EXIF with one directory of two entries.
std::vector<uint8_t> exif(uint8_t orientation) {
  return {'I',  'I',  42, 0, 8, 0, 0, 0, 2,           0,        //
          0x00, 0x01, 4,  0, 1, 0, 0, 0, 9,           9, 0, 0,  // some other tag
          0x12, 0x01, 3,  0, 1, 0, 0, 0, orientation, 0, 0, 0};
}

TEST(Orientation, EveryExifValue) {
  // Stored 2 x 3:  a b c / d e f. What each value shows.
  const std::vector<std::string> shown = {"abcdef", "cbafed", "fedcba", "defabc",
                                          "adbecf", "daebfc", "fcebda", "cfbead"};
  for (uint8_t value = 1; value <= 8; ++value) {
    const Image image = upright(letters(2, 3, "abcdef"), exif_orientation(exif(value)));
    EXPECT_EQ(read(image), shown[value - 1u]) << int(value);
    EXPECT_EQ(image.height, value < 5 ? 2 : 3);
    EXPECT_EQ(image.width, value < 5 ? 3 : 2);
  }
}

TEST(Orientation, BigEndianExif) {
  const std::vector<uint8_t> bytes = {'M',  'M', 0, 42, 0, 0, 0, 8, 0, 1, 0x01,
                                      0x12, 0,   3, 0,  0, 0, 1, 0, 6, 0, 0};
  EXPECT_EQ(exif_orientation(bytes), (Orientation{true, true, false}));
}

TEST(Orientation, DamagedExifIsUpright) {
  for (size_t size = 0; size < exif(6).size(); ++size) {
    const auto bytes = exif(6);
    const Orientation orientation = exif_orientation({bytes.data(), size});
    // The value itself is complete two bytes before the end.
    EXPECT_EQ(orientation == Orientation{}, size < bytes.size() - 2) << size;
  }
  EXPECT_EQ(exif_orientation(exif(0)), Orientation{});
  EXPECT_EQ(exif_orientation(exif(9)), Orientation{});
  const std::vector<uint8_t> far = {'I', 'I', 42, 0, 255, 255, 255, 255};
  EXPECT_EQ(exif_orientation(far), Orientation{});
}

TEST(Orientation, DisplayMatrices) {
  constexpr int32_t one = 1 << 16;
  const auto turned = [](int32_t a, int32_t b, int32_t c, int32_t d) {
    return matrix_orientation({a, b, 0, c, d, 0, 0, 0, 1 << 30});
  };
  EXPECT_EQ(turned(one, 0, 0, one), Orientation{});
  EXPECT_EQ(turned(-one, 0, 0, -one), (Orientation{false, true, true}));
  EXPECT_EQ(turned(0, one, -one, 0), (Orientation{true, true, false}));  // a quarter clockwise
  EXPECT_EQ(turned(0, -one, one, 0), (Orientation{true, false, true}));
  EXPECT_EQ(turned(-one, 0, 0, one), (Orientation{false, true, false}));  // mirrored
  EXPECT_FALSE(turned(one, one, -one, one).has_value());
  EXPECT_FALSE(turned(0, 0, 0, 0).has_value());
}

}  // namespace
}  // namespace orrery
