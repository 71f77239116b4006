#include "base/json.h"

#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "expect_error.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

Json parse(std::string_view text) { return Json::parse(text, "f.json"); }

void expect_corrupt(std::string_view text, std::initializer_list<std::string_view> parts) {
  SCOPED_TRACE(text.substr(0, 80));
  expect_error(ErrorKind::corrupt, parts, [&] { parse(text); });
}

TEST(Json, ReadsEveryKind) {
  const Json root =
      parse(R"( {"n": null, "t": true, "i": -7, "d": 1.5e2, "s": "a\u00e9\ud83d\ude00",
                              "a": [1, [], {}]} )");
  EXPECT_TRUE(root.at("n").is_null());
  EXPECT_TRUE(root.at("t").as_bool());
  EXPECT_EQ(root.at("i").as_int(), -7);
  EXPECT_EQ(root.at("i").as_double(), -7.0);
  EXPECT_EQ(root.at("d").as_double(), 150.0);
  EXPECT_EQ(root.at("s").as_string(), "a\xc3\xa9\xf0\x9f\x98\x80");
  EXPECT_EQ(root.at("a").items().size(), 3u);
  EXPECT_TRUE(root.at("a").at(2).is_object());
  EXPECT_EQ(root.members()[2].first, "i");  // file order
  EXPECT_EQ(root.find("absent"), nullptr);
}

TEST(Json, KindsAreNotMixedUp) {
  const Json root = parse(R"({"t": true, "one": 1, "real": 1.0, "s": "1"})");
  expect_error(ErrorKind::corrupt, {"f.json: t", "expected an integer, found a boolean"},
               [&] { root.at("t").as_int(); });
  expect_error(ErrorKind::corrupt, {"f.json: t", "expected a number"},
               [&] { root.at("t").as_double(); });
  expect_error(ErrorKind::corrupt, {"f.json: one", "expected a boolean"},
               [&] { root.at("one").as_bool(); });
  expect_error(ErrorKind::corrupt, {"f.json: real", "expected an integer, found a number"},
               [&] { root.at("real").as_int(); });
  expect_error(ErrorKind::corrupt, {"f.json: s", "found a string"},
               [&] { root.at("s").as_double(); });
}

TEST(Json, MessagesNameThePath) {
  const Json root = parse(R"({"a": {"b": [0, 1, {"c": [true]}]}})");
  EXPECT_EQ(root.where(), "f.json");
  EXPECT_EQ(root.at("a").at("b").at(2).where(), "f.json: a.b[2]");
  EXPECT_EQ(root.at("a").at("b").at(2).at("c").at(size_t{0}).where(), "f.json: a.b[2].c[0]");
  EXPECT_EQ(parse("[[3]]").at(size_t{0}).at(size_t{0}).where(), "f.json: [0][0]");
  EXPECT_EQ(parse("3").where(), "f.json");
  EXPECT_EQ(Json(3).where(), "a value");
  expect_error(ErrorKind::corrupt, {"f.json: a: the key \"z\" is missing"},
               [&] { root.at("a").at("z"); });
  expect_error(ErrorKind::corrupt, {"f.json: a.b: has 3 items, item 3 is missing"},
               [&] { root.at("a").at("b").at(3); });
  expect_error(ErrorKind::corrupt, {"f.json: a: expected an array, found an object"},
               [&] { root.at("a").items(); });
}

TEST(Json, ScalarsOfALongListNameTheList) {
  std::string text = "{\"v\": [";
  for (int i = 0; i < 300; ++i) text += "0,";
  const Json root = parse(text + "{\"k\": 1}]}");
  EXPECT_EQ(root.at("v").at(255).where(), "f.json: v[255]");
  EXPECT_EQ(root.at("v").at(256).where(), "f.json: v");
  EXPECT_EQ(root.at("v").at(300).at("k").where(), "f.json: v[300].k");
}

TEST(Json, PathsOutliveTheDocument) {
  Json leaf;
  {
    const Json root = parse(R"({"a": [5]})");
    leaf = root.at("a").at(size_t{0});
  }
  EXPECT_EQ(leaf.where(), "f.json: a[0]");
}

TEST(Json, RefusesDuplicateKeys) {
  expect_corrupt(R"({"a": 1, "a": 1})", {"f.json: the key \"a\" occurs twice"});
  expect_corrupt(R"({"x": [{"a": 1, "b": 2, "\u0061": 3}]})",
                 {"f.json: x[0]", "\"a\" occurs twice"});
  std::string many = "{";
  for (int i = 0; i < 1000; ++i) many += "\"k" + std::to_string(i) + "\": 0, ";
  EXPECT_EQ(parse(many + "\"z\": 0}").members().size(), 1001u);
  expect_corrupt(many + "\"k500\": 0}", {"\"k500\" occurs twice"});
}

TEST(Json, RefusesWhatIsNotJson) {
  expect_corrupt("", {"f.json: not valid JSON"});
  expect_corrupt("{} x", {"f.json: not valid JSON"});
  expect_corrupt("{}{}", {"not valid JSON"});
  expect_corrupt("[1,]", {"not valid JSON"});
  expect_corrupt("{\"a\": 01}", {"not valid JSON"});
  expect_corrupt("{'a': 1}", {"not valid JSON"});
  expect_corrupt("// c\n{}", {"not valid JSON"});
  expect_corrupt("\"a\nb\"", {"not valid JSON"});
  expect_corrupt("\"\\ud800\"", {"not valid JSON"});
  // The library would stop at the NUL and miss the rest.
  expect_corrupt(std::string_view("{}\0{", 4), {"byte 2", "NUL"});
  EXPECT_TRUE(parse("\xef\xbb\xbf{}").is_object());
}

TEST(Json, RefusesInvalidUtf8) {
  for (const char* bytes : {"\xff", "\xc0\xaf", "\xe2\x82", "\xed\xa0\x80", "\xf4\x90\x80\x80"}) {
    expect_corrupt("[\"" + std::string(bytes) + "\"]", {"not valid JSON"});
    EXPECT_FALSE(is_utf8(bytes));
  }
  EXPECT_TRUE(is_utf8("a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"));
}

TEST(Json, RefusesNumbersThatDoNotFit) {
  EXPECT_EQ(parse("9223372036854775807").as_int(), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(parse("-9223372036854775808").as_int(), std::numeric_limits<int64_t>::min());
  expect_corrupt("[9223372036854775808]", {"f.json: [0]", "9223372036854775808", "64 bits"});
  expect_corrupt("{\"n\": 18446744073709551616}", {"f.json: n", "18446744073709551616"});
  expect_corrupt("-9223372036854775809", {"-9223372036854775809"});
  expect_corrupt("1e400", {"1e400"});
  for (const char* text : {"NaN", "Infinity", "-Infinity", "[nan]"}) {
    expect_corrupt(text, {"not valid JSON"});
  }
  EXPECT_EQ(parse("1e300").as_double(), 1e300);
}

TEST(Json, DepthIsBounded) {
  const auto nested = [](int depth) {
    return std::string(static_cast<size_t>(depth), '[') +
           std::string(static_cast<size_t>(depth), ']');
  };
  EXPECT_TRUE(parse(nested(kMaxJsonDepth)).is_array());
  expect_corrupt(nested(kMaxJsonDepth + 1), {"deeper than 64"});
  expect_corrupt(std::string(1 << 20, '['), {"deeper than 64"});
}

TEST(Json, MessagesStayShort) {
  const std::string message =
      expect_error(ErrorKind::corrupt, {}, [] { parse("\"" + std::string(100000, 'a')); });
  EXPECT_LT(message.size(), 400u);
}

TEST(Json, Writes) {
  Json root = Json::object();
  root.set("b", 1).set("a", Json::array({true, Json(), "q\"\\\n\x01/\xc3\xa9"}));
  root.set("b", 2.0);
  EXPECT_EQ(root.dump(), "{\"b\":2.0,\"a\":[true,null,\"q\\\"\\\\\\n\\u0001/\xc3\xa9\"]}");
  EXPECT_EQ(Json::object({{"a", Json::array({1})}, {"e", Json::object()}}).dump(2),
            "{\n  \"a\": [\n    1\n  ],\n  \"e\": {}\n}");
  EXPECT_EQ(Json("x\xff\xc3").dump(), "\"x\xef\xbf\xbd\xef\xbf\xbd\"");
  expect_error(ErrorKind::invalid_argument, {"nan"}, [] { Json(std::nan("")).dump(); });
  expect_error(ErrorKind::invalid_argument, {"inf"}, [] { Json(INFINITY).dump(); });
}

// A random document; `rng` also draws strings of arbitrary code points.
Json random_json(std::mt19937_64& rng, int depth) {
  const auto below = [&](uint64_t n) { return static_cast<int64_t>(rng() % n); };
  const auto random_string = [&] {
    std::string text;
    for (int64_t i = below(6); i > 0; --i) {
      constexpr const char* kPieces[] = {
          "a", "\"", "\\", "\n", "\x7f", "\x1f", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80",
          "/"};
      text += kPieces[below(std::size(kPieces))];
    }
    return text;
  };
  switch (below(depth > 0 ? 7 : 5)) {
    case 0: return {};
    case 1: return below(2) == 0;
    case 2: return static_cast<int64_t>(rng());
    case 3: {
      const double value = std::bit_cast<double>(rng());
      return std::isfinite(value) ? value : 0.5;
    }
    case 4: return random_string();
    case 5: {
      Json list = Json::array();
      for (int64_t i = below(5); i > 0; --i) list.push(random_json(rng, depth - 1));
      return list;
    }
    default: {
      Json object = Json::object();
      for (int64_t i = below(5); i > 0; --i)
        object.set(random_string(), random_json(rng, depth - 1));
      return object;
    }
  }
}

void expect_equal(const Json& a, const Json& b) {
  ASSERT_EQ(static_cast<int>(a.kind()), static_cast<int>(b.kind()));
  switch (a.kind()) {
    case Json::Kind::null: return;
    case Json::Kind::boolean: EXPECT_EQ(a.as_bool(), b.as_bool()); return;
    case Json::Kind::integer: EXPECT_EQ(a.as_int(), b.as_int()); return;
    case Json::Kind::number:
      EXPECT_EQ(std::bit_cast<uint64_t>(a.as_double()), std::bit_cast<uint64_t>(b.as_double()));
      return;
    case Json::Kind::string: EXPECT_EQ(a.as_string(), b.as_string()); return;
    case Json::Kind::array:
      ASSERT_EQ(a.items().size(), b.items().size());
      for (size_t i = 0; i < a.items().size(); ++i) expect_equal(a.at(i), b.at(i));
      return;
    case Json::Kind::object:
      ASSERT_EQ(a.members().size(), b.members().size());
      for (size_t i = 0; i < a.members().size(); ++i) {
        EXPECT_EQ(a.members()[i].first, b.members()[i].first);
        expect_equal(a.members()[i].second, b.members()[i].second);
      }
  }
}

TEST(Json, WhatIsWrittenReadsBackEqual) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 rng(seed);
    const Json value = random_json(rng, 4);
    expect_equal(parse(value.dump()), value);
    expect_equal(parse(value.dump(2)), value);
    if (HasFailure()) return;
  }
}

// 100 000 members and as many pairs: quadratic work would take minutes, linear takes some 50 ms.
TEST(Json, BigDocumentsTakeLinearTime) {
  std::string text = "{\"vocab\": {";
  for (int i = 0; i < 100000; ++i) text += "\"token" + std::to_string(i) + "\": 1, ";
  text += "\"end\": 0}, \"merges\": [";
  for (int i = 0; i < 100000; ++i) text += "[\"a\", \"b\"], ";
  text += "[]]}";
  const auto start = std::chrono::steady_clock::now();
  const Json root = parse(text);
  int64_t sum = 0;
  for (const auto& [key, value] : root.at("vocab").members()) sum += value.as_int();
  EXPECT_EQ(parse(root.dump()).at("merges").items().size(), 100001u);
  EXPECT_EQ(sum, 100000);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(Json, LoadsFiles) {
  const ScratchFolder scratch;
  const auto file = scratch.write("a.json", "{\"k\": [1]}");
  EXPECT_EQ(Json::load(file).at("k").at(size_t{0}).where(), file.string() + ": k[0]");
  expect_error(ErrorKind::not_found, {"none.json", "cannot open"},
               [&] { Json::load(scratch.path() / "none.json"); });
  expect_error(ErrorKind::not_found, {"is a folder"}, [&] { Json::load(scratch.path()); });
  expect_error(ErrorKind::corrupt, {"empty.json", "not valid JSON"},
               [&] { Json::load(scratch.write("empty.json", "")); });
  const std::string big = "\"" + std::string((size_t{1} << 20) + 17, 'x') + "\"";  // over one piece
  EXPECT_EQ(Json::load(scratch.write("big.json", big)).as_string().size(), big.size() - 2);
}

TEST(JsonMembers, AreHandedOverOneByOne) {
  std::vector<std::string> seen;
  Json::parse_members(R"({"a": 1, "b": {"c": [2]}, "d": "x"})", "header",
                      [&](const std::string& key, const Json& value) {
                        seen.push_back(key + value.dump() + value.where());
                      });
  EXPECT_EQ(seen,
            (std::vector<std::string>{"a1header: a", "b{\"c\":[2]}header: b", "d\"x\"header: d"}));
  const auto ignore = [](const std::string&, const Json&) {};
  expect_error(ErrorKind::corrupt, {"header", "\"a\" occurs twice"},
               [&] { Json::parse_members(R"({"a": 1, "b": 2, "a": 3})", "header", ignore); });
  expect_error(ErrorKind::corrupt, {"header", "expected an object"},
               [&] { Json::parse_members("[{}]", "header", ignore); });
  expect_error(ErrorKind::corrupt, {"header", "not valid JSON"},
               [&] { Json::parse_members(R"({"a": 1)", "header", ignore); });
}

// C6: what a document takes in memory is bounded, what is read of a file as well.
TEST(JsonBudget, RefusesMoreThanAnyModelNeeds) {
  std::string many = "[0";
  for (int64_t i = 0; i < kMaxJsonValues; ++i) many += ",0";
  expect_error(ErrorKind::corrupt, {"list", "2000000 values"},
               [&] { Json::parse(many + "]", "list"); });
  // Of a stream of members only the largest counts.
  std::string members = "{\"x\":0";
  for (int64_t i = 0; i < 3; ++i)
    members += concat(",\"", i, "\":", many.substr(0, many.size() / 2 - 1), "]");
  int64_t count = 0;
  Json::parse_members(members + "}", "header", [&](const std::string&, const Json&) { ++count; });
  EXPECT_EQ(count, 4);
  expect_error(ErrorKind::corrupt, {"/dev/zero", "more than 64 MiB"},
               [] { Json::load("/dev/zero"); });
}

}  // namespace
}  // namespace orrery
