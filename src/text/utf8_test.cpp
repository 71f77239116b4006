#include "text/utf8.h"

#include <gtest/gtest.h>

#include "base/json.h"
#include "text/normal_form.h"

namespace orrery {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

std::string replaced(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += kReplacement;
  return text;
}

// B28: bytes that are no text are replaced by a stated rule.
TEST(Utf8, EachMaximalInvalidPartIsReplacedOnce) {
  EXPECT_EQ(valid_utf8("\xFF\xC0"), replaced(2));
  EXPECT_EQ(valid_utf8("\xE4\xB8"), replaced(1));  // truncated
  EXPECT_EQ(valid_utf8("\xF0\x9F\x98"
                       "a"),
            replaced(1) + "a");                            // truncated, then text
  EXPECT_EQ(valid_utf8("\xE0\x80\x80"), replaced(3));      // overlong
  EXPECT_EQ(valid_utf8("\xED\xA0\x80"), replaced(3));      // a surrogate
  EXPECT_EQ(valid_utf8("\xF4\x90\x80\x80"), replaced(4));  // past U+10FFFF
  EXPECT_EQ(valid_utf8("\x80z\xC3"), replaced(1) + "z" + replaced(1));
  EXPECT_EQ(valid_utf8("\xC3\xC3\xA9"), replaced(1) + "\xC3\xA9");
}

TEST(Utf8, ValidTextIsKept) {
  const std::string text(
      "a\0\x7F\xC2\x80\xDF\xBF\xE0\xA0\x80\xED\x9F\xBF\xEF\xBF\xBF\xF0\x90\x80\x80\xF4\x8F\xBF\xBF",
      24);
  EXPECT_EQ(valid_utf8(text), text);
}

TEST(Utf8, CodePointsThereAndBack) {
  for (const char32_t c :
       {0x0u, 0x7Fu, 0x80u, 0x7FFu, 0x800u, 0xD7FFu, 0xE000u, 0xFFFFu, 0x10000u, 0x10FFFFu}) {
    std::string text = "x";
    append_utf8(text, c);
    EXPECT_TRUE(is_utf8(text));
    size_t position = 1;
    EXPECT_EQ(next_code_point(text, position), c);
    EXPECT_EQ(position, text.size());
    EXPECT_EQ(count_code_points(text), 2u);
  }
}

TEST(Utf8, StripsWhatPythonStrips) {
  EXPECT_EQ(strip_front("\x1C \xC2\x85\xE3\x80\x80 a "), "a ");
  EXPECT_EQ(strip_back(" a\xE2\x80\x83\xC2\xA0\n\t"), " a");
  EXPECT_EQ(strip_back("\xE2\x80\x8B"), "\xE2\x80\x8B");   // U+200B is not white space
  EXPECT_EQ(strip_front("\xE1\xA0\x8E"), "\xE1\xA0\x8E");  // nor is U+180E
  EXPECT_EQ(strip_back(" \n "), "");
}

TEST(NormalForm, ComposesAndReorders) {
  EXPECT_EQ(nfc("e\u0301"), "\u00e9");
  EXPECT_EQ(nfc("\u00e9"), "\u00e9");
  EXPECT_EQ(nfc("a\u0301\u0327b"), "\u00e1\u0327b");
  EXPECT_EQ(nfc("a\u0327\u0301"), "\u00e1\u0327");
  EXPECT_EQ(nfc("\u1112\u1161\u11ab"), "\ud55c");    // jamo
  EXPECT_EQ(nfc("\ud558\u11ab"), "\ud55c");          // a syllable and a final
  EXPECT_EQ(nfc("\u304b\u3099"), "\u304c");          // kana and its mark
  EXPECT_EQ(nfc("\u212b"), "\u00c5");                // a singleton
  EXPECT_EQ(nfc("\u0958"), "\u0915\u093c");          // excluded from composition
  EXPECT_EQ(nfc("\u0344"), "\u0308\u0301");          // a mark that decomposes
  EXPECT_EQ(nfc("\u0301a"), "\u0301a");              // a mark with nothing before it
  EXPECT_EQ(nfc("1\u0338\ufb01"), "1\u0338\ufb01");  // compatibility forms stay
  EXPECT_EQ(nfc("\u09c7\u09be"), "\u09cb");          // vowel signs of class 0 compose
  EXPECT_EQ(nfc(""), "");
}

// Marks that Unicode 9 did not know neither move nor compose in the reference.
TEST(NormalForm, YoungerMarksStay) {
  EXPECT_EQ(nfc("a\u0355\u0d3c"), "a\u0355\u0d3c");
  EXPECT_EQ(nfc("\U00011935\U00011930"), "\U00011935\U00011930");
  EXPECT_EQ(nfc("\U00011938"), "\U00011938");
}

TEST(NormalForm, LongRunsOfMarksAreSorted) {
  constexpr int kCount = 100'000;  // an exchange sort would take minutes
  std::string text = "q";
  for (int i = 0; i < kCount; ++i) text += "\u0301\u0323";
  std::string expected = "q";
  for (int i = 0; i < kCount; ++i) expected += "\u0323";
  for (int i = 0; i < kCount; ++i) expected += "\u0301";
  EXPECT_EQ(nfc(text), expected);
}

}  // namespace
}  // namespace orrery
