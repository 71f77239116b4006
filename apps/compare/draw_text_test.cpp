#include "compare/draw_text.h"

#include <gtest/gtest.h>

#include <string>

namespace orrery {
namespace {

std::string picture(const Image& image) {
  std::string text;
  for (int64_t y = 0; y < image.height; ++y) {
    for (int64_t x = 0; x < image.width; ++x) {
      text += image.rgb[static_cast<size_t>((y * image.width + x) * 3)] ? '#' : '.';
    }
    text += '\n';
  }
  return text;
}

Image blank(int64_t height, int64_t width) {
  return {height, width, std::vector<uint8_t>(static_cast<size_t>(height * width * 3))};
}

TEST(DrawText, DrawsDots) {
  Image image = blank(7, 11);
  draw_text(image, 0, 0, 1, "L1");
  EXPECT_EQ(picture(image),
            "#.......#..\n"
            "#......##..\n"
            "#.......#..\n"
            "#.......#..\n"
            "#.......#..\n"
            "#.......#..\n"
            "#####..###.\n");
}

TEST(DrawText, SmallLettersAreCapitalsAndUnknownCharactersBoxes) {
  Image small = blank(8, 12), capital = blank(8, 12);
  draw_text(small, 0, 0, 1, "q~");
  draw_text(capital, 0, 0, 1, "Q\xc3");
  EXPECT_EQ(picture(small), picture(capital));
  EXPECT_EQ(picture(small).substr(6, 5), "#####");
}

TEST(DrawText, ScalesColoursAndIsCutOffAtTheBorder) {
  Image image = blank(3, 4);
  draw_text(image, -2, -1, 2, "E", {1, 2, 3});
  // Dot rows 0 and 1 of E, each two pixels high; the picture begins at dot (0.5, 1).
  EXPECT_EQ(picture(image), "####\n....\n....\n");
  EXPECT_EQ(image.rgb[0], 1);
  EXPECT_EQ(image.rgb[1], 2);
  EXPECT_EQ(image.rgb[2], 3);
}

}  // namespace
}  // namespace orrery
