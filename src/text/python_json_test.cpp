#include "text/python_json.h"

#include <gtest/gtest.h>

#include <limits>

namespace orrery {
namespace {

TEST(PythonJson, NumbersAsReprPrintsThem) {
  const std::vector<std::pair<double, std::string>> cases = {
      {1.0, "1.0"},
      {5.0, "5.0"},
      {0.1, "0.1"},
      {29.97, "29.97"},
      {23.976, "23.976"},
      {2.0 / 3, "0.6666666666666666"},
      {1e15, "1000000000000000.0"},
      {1e16, "1e+16"},
      {1e22, "1e+22"},
      {1e100, "1e+100"},
      {123456789012345.6, "123456789012345.6"},
      {1e-4, "0.0001"},
      {1e-5, "1e-05"},
      {1.5e-7, "1.5e-07"},
      {-0.0, "-0.0"},
      {5e-324, "5e-324"},
      {std::numeric_limits<double>::max(), "1.7976931348623157e+308"},
      {9007199254740993.0, "9007199254740992.0"}};
  for (const auto& [value, text] : cases) EXPECT_EQ(python_json(value), text);
}

TEST(PythonJson, TextIsAscii) {
  EXPECT_EQ(python_json(std::string("\0\x1f\x7f\u0080\u00e9\u2028\U0001f600\"\\/\b\f\n\r\t", 22)),
            "\"\\u0000\\u001f\x7f\\u0080\\u00e9\\u2028\\ud83d\\ude00\\\"\\\\/\\b\\f\\n\\r\\t\"");
  EXPECT_EQ(python_json("\xFF"), "\"\\ufffd\"");
}

// B31: a prompt given as an object has one text, whatever blanks and escapes its file used.
TEST(PythonJson, ContainersInFileOrder) {
  const Json value = Json::parse(
      "{\"b\" :[1,2.50,\"\xc3\xa9;\"],\n\"a\":{\"x\":null,\"y\":[true,false]},\"e\":{},\"l\":[]}",
      "t");
  EXPECT_EQ(
      python_json(value),
      R"({"b": [1, 2.5, "\u00e9;"], "a": {"x": null, "y": [true, false]}, "e": {}, "l": []})");
  EXPECT_EQ(python_json(Json::parse(R"({"b": [1, 2.5, "\u00e9;"]})", "t")),
            python_json(Json::parse("{\"b\":[1,25e-1,\"\xc3\xa9;\"]}", "t")));
}

}  // namespace
}  // namespace orrery
