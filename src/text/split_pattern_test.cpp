#include "text/split_pattern.h"

#include <gtest/gtest.h>

#include <vector>

#include "expect_error.h"

namespace orrery {
namespace {

// As the released tokenizers have it.
const char* const kPattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

using Pieces = std::vector<std::string>;

Pieces split(const std::string& pattern, const std::string& text) {
  const SplitPattern split_pattern(pattern, "t.json");
  SplitPattern::Matcher matcher(split_pattern);
  matcher.start(text);
  Pieces pieces;
  for (std::string_view piece = matcher.next(); !piece.empty(); piece = matcher.next()) {
    pieces.emplace_back(piece);
  }
  return pieces;
}

Pieces split(const std::string& text) { return split(kPattern, text); }

// B27: runs of symbols stay together, digits stand alone, contractions whatever their case.
TEST(SplitPattern, SymbolsDigitsAndContractions) {
  EXPECT_EQ(split("->"), (Pieces{"->"}));
  EXPECT_EQ(split("(x):\n"), (Pieces{"(x", "):\n"}));
  EXPECT_EQ(split("2026"), (Pieces{"2", "0", "2", "6"}));
  EXPECT_EQ(split("3.14"), (Pieces{"3", ".", "1", "4"}));
  EXPECT_EQ(split("I'm CAN'T"), (Pieces{"I", "'m", " CAN", "'T"}));
  EXPECT_EQ(split("{\"a\": 1}"), (Pieces{"{\"", "a", "\":", " ", "1", "}"}));
  EXPECT_EQ(split("!!!???"), (Pieces{"!!!???"}));
}

// B28: newlines, blanks and the classes of Unicode.
TEST(SplitPattern, BlanksAndUnicodeClasses) {
  EXPECT_EQ(split("\n\n\n"), (Pieces{"\n\n\n"}));
  EXPECT_EQ(split("a \n\n b"), (Pieces{"a", " \n\n", " b"}));
  EXPECT_EQ(split("trailing  "), (Pieces{"trailing", "  "}));
  EXPECT_EQ(split("a   b"), (Pieces{"a", "  ", " b"}));
  EXPECT_EQ(split("a\t\r\nb"), (Pieces{"a", "\t\r\n", "b"}));
  EXPECT_EQ(split("x\u00a0y"), (Pieces{"x", "\u00a0y"}));
  EXPECT_EQ(split("e\u0301"), (Pieces{"e", "\u0301"}));
  EXPECT_EQ(split("\u4e2d\u6587"), (Pieces{"\u4e2d\u6587"}));
  EXPECT_EQ(split("\u0e2a\u0e27\u0e31\u0e2a"), (Pieces{"\u0e2a\u0e27", "\u0e31\u0e2a"}));
  EXPECT_EQ(split("\u00bd\u2167"), (Pieces{"\u00bd", "\u2167"}));  // all of N, not only digits
  EXPECT_EQ(split(""), Pieces{});
}

// \s is Unicode White_Space: U+0085 is in it, U+180E and U+200B are not.
TEST(SplitPattern, WhiteSpaceIsThatOfUnicode) {
  EXPECT_EQ(split("\\s", "a\u0085b"), (Pieces{"a", "\u0085", "b"}));
  EXPECT_EQ(split("\\s", "a\u180eb"), (Pieces{"a\u180eb"}));
  EXPECT_EQ(split("\\s", "a\u200bb"), (Pieces{"a\u200bb"}));
  EXPECT_EQ(split("[\\S]+", "a\u180eb c\u3000d"), (Pieces{"a\u180eb", " ", "c", "\u3000", "d"}));
  EXPECT_EQ(split("\\\\s", "a\\s b"), (Pieces{"a", "\\s", " b"}));  // a backslash, then an s
  for (const char* blank :
       {"\u00a0", "\u1680", "\u2000", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"}) {
    EXPECT_EQ(split("\\s+", std::string("a") + blank), (Pieces{"a", blank}));
  }
  for (const char* other : {"\x1c", "\u2060", "\ufeff"}) {
    EXPECT_EQ(split("\\s+", std::string("a") + other), (Pieces{std::string("a") + other}));
  }
}

TEST(SplitPattern, LongRunsAreOnePiece) {
  const std::string blanks(100'000, ' ');
  EXPECT_EQ(split(blanks), (Pieces{blanks}));
  EXPECT_EQ(split(blanks + "x"), (Pieces{blanks.substr(1), " x"}));
  EXPECT_EQ(split(std::string(100'000, 'a')).size(), 1u);
}

TEST(SplitPattern, OneMatcherServesManyTexts) {
  const SplitPattern pattern("b", "t.json");
  SplitPattern::Matcher matcher(pattern);
  matcher.start("ab");
  EXPECT_EQ(matcher.next(), "a");
  matcher.start("ba");
  EXPECT_EQ(matcher.next(), "b");
  EXPECT_EQ(matcher.next(), "a");
  EXPECT_EQ(matcher.next(), "");
}

TEST(SplitPattern, RefusesWhatItCannotUse) {
  const auto make = [](const char* pattern) { return [=] { SplitPattern(pattern, "t.json"); }; };
  expect_error(ErrorKind::unsupported, {"t.json", "(a", "cannot compile"}, make("(a"));
  expect_error(ErrorKind::unsupported, {"t.json", "a*", "empty string"}, make("a*"));
  expect_error(ErrorKind::unsupported, {"t.json", "\\C"}, make("\\C"));
}

}  // namespace
}  // namespace orrery
