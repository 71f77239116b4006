#include "io/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>

#include "base/json.h"
#include "expect_error.h"
#include "scratch_folder.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

std::string little_endian(uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(value >> (8 * i));
  return bytes;
}

std::string file_of(const std::string& header, const std::string& data) {
  return little_endian(header.size()) + header + data;
}

std::string file_of(const std::string& header, size_t data_bytes) {
  return file_of(header, std::string(data_bytes, '\0'));
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  int64_t begin, int64_t end) {
  return concat('"', name, "\":{\"dtype\":\"", dtype, "\",\"shape\":", shape, ",\"data_offsets\":[",
                begin, ",", end, "]}");
}

template <typename T>
std::string bytes_of(std::initializer_list<T> values) {
  std::string bytes;
  for (const T value : values) bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  return bytes;
}

class SafetensorsTest : public testing::Test {
 protected:
  Safetensors open(const std::string& bytes) {
    return Safetensors::open_file(scratch.write("m", bytes));
  }
  std::string expect_corrupt(const std::string& bytes,
                             std::initializer_list<std::string_view> parts) {
    return expect_error(ErrorKind::corrupt, parts, [&] { open(bytes); });
  }
  Safetensors open_folder() { return Safetensors::open_folder(scratch.path()); }
  void write_index(const std::string& weight_map) {
    scratch.write(kWeightsIndexName,
                  "{\"metadata\":{\"total_size\":1},\"weight_map\":" + weight_map + "}");
  }
  void write_shard(const std::string& file, std::initializer_list<std::string> names) {
    std::string header = "{";
    int64_t at = 0;
    for (const std::string& name : names) {
      header += concat(at > 0 ? "," : "", entry(name, "BF16", "[2]", at, at + 4));
      at += 4;
    }
    scratch.write(file, file_of(header + "}", static_cast<size_t>(at)));
  }

  ScratchFolder scratch;
};

TEST_F(SafetensorsTest, ListsAndViewsTensors) {
  const std::string header = "{" + entry("z", "F32", "[2,1]", 0, 8) + "," +
                             entry("a", "BF16", "[3]", 8, 14) +
                             ",\"__metadata__\":{\"format\":\"pt\"}}";
  const auto file =
      open(file_of(header, bytes_of({1.5f, -2.0f}) + bytes_of<uint16_t>({0x3f80, 0, 1})));
  ASSERT_EQ(file.tensors().size(), 2u);
  EXPECT_EQ(file.tensors()[0].name, "a");  // by name
  EXPECT_EQ(file.tensors()[0].stored_type, "BF16");
  EXPECT_EQ(file.tensors()[0].file, "m");
  EXPECT_EQ(file.find("z")->dtype, DType::f32);
  EXPECT_EQ(file.find("z")->shape, (Shape{2, 1}));
  EXPECT_EQ(file.find("b"), nullptr);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.total_bytes(), 14);
  EXPECT_EQ(file.view("a").dtype, DType::bf16);
  EXPECT_EQ(file.read("z", DType::f32).view.as<float>()[1], -2.0f);
  EXPECT_EQ(file.read("a", DType::f32).view.as<float>()[0], 1.0f);
  expect_error(ErrorKind::not_found, {"no tensor q"}, [&] { file.view("q"); });
}

TEST_F(SafetensorsTest, ViewsLiveAsLongAsACopy) {
  View view;
  Safetensors copy = [&] {
    const auto file = open(file_of("{" + entry("a", "F32", "[1]", 0, 4) + "}", bytes_of({3.0f})));
    view = file.view("a");
    return file;
  }();
  float value;
  std::memcpy(&value, view.data, sizeof value);
  EXPECT_EQ(value, 3.0f);
}

// B03: offsets are checked against the file, and files that fit exactly are accepted.
TEST_F(SafetensorsTest, B03ChecksOffsets) {
  expect_corrupt(file_of("{" + entry("a", "U8", "[4]", 0, int64_t{1} << 62) + "}", 4),
                 {"m: a", "4611686018427387904", "beyond the 4 bytes"});
  expect_corrupt(file_of("{" + entry("a", "U8", "[0]", 64, 0) + "}", 64),
                 {"m: a", "end before they begin"});
  expect_corrupt(file_of("{" + entry("a", "U8", "[4]", -4, 0) + "}", 4), {"m: a", "negative"});
  expect_corrupt(file_of("{" + entry("a", "BF16", "[2,3]", 0, 16) + "}", 16),
                 {"m: a: BF16 [2, 3] takes 12 bytes", "span 16"});
  expect_corrupt(file_of("{" + entry("a", "U8", "[4]", 0, 4) + "}", 6),
                 {"2 bytes behind the last"});
  expect_corrupt(
      file_of("{" + entry("a", "U8", "[4]", 0, 4) + "," + entry("b", "U8", "[4]", 2, 6) + "}", 6),
      {"a and b overlap at byte 2"});
  expect_corrupt(
      file_of("{" + entry("a", "U8", "[4]", 0, 4) + "," + entry("b", "U8", "[2]", 6, 8) + "}", 8),
      {"bytes 4 to 6", "before b"});
  expect_corrupt(file_of("{" + entry("a", "U8", "[4]", 0, 4) + "}", 3),
                 {"beyond the 3 bytes", "cut short"});
}

TEST_F(SafetensorsTest, B03AcceptsExactFits) {
  EXPECT_EQ(open(file_of("{}", 0)).tensors().size(), 0u);
  EXPECT_EQ(open(file_of("{" + entry("a", "U8", "[4]", 0, 4) + "}", 4)).view("a").numel(), 4);
  const auto empty = open(file_of("{" + entry("a", "F32", "[0]", 0, 0) + "," +
                                      entry("b", "BF16", "[3,0,9007199254740993]", 0, 0) + "}",
                                  0));
  EXPECT_EQ(empty.view("b").numel(), 0);
  EXPECT_EQ(empty.read("a", DType::f32).view.numel(), 0);
  EXPECT_EQ(open(file_of("{" + entry("s", "F32", "[]", 0, 4) + "}", 4)).view("s").numel(), 1);
}

TEST_F(SafetensorsTest, B03ChecksTheHeaderLength) {
  expect_corrupt("", {"m: 0 bytes are too few"});
  expect_corrupt("1234567", {"m: 7 bytes are too few"});
  expect_corrupt(little_endian(100) + "{}", {"100 bytes long", "only 2 bytes follow"});
  expect_corrupt(little_endian(0), {"does not begin with {"});
  expect_corrupt(little_endian(UINT64_MAX) + "{}", {"18446744073709551615 bytes long"});
  expect_corrupt("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", {"Git LFS pointer"});
}

// B05: padding is accepted, what else may stand in front or be too long is refused in a sentence.
TEST_F(SafetensorsTest, B05PaddedAndOddHeaders) {
  std::string header = "{" + entry("a", "U8", "[4]", 0, 4) + "}";
  header.resize(4096 - 8, ' ');
  EXPECT_EQ(open(file_of(header, 4)).view("a").numel(), 4);
  expect_corrupt(file_of("\xef\xbb\xbf{}", 0), {"byte order mark"});
  expect_corrupt(file_of(" {}", 0), {"does not begin with {"});
  expect_corrupt(file_of("[]", 0), {"does not begin with {"});
  expect_corrupt(file_of("{}x", 0), {"header: not valid JSON"});
  expect_corrupt(file_of("{} }", 0), {"header: not valid JSON"});
  expect_corrupt(little_endian(101'000'000) + "{}", {"101000000 bytes long", "at most 100000000"});
  expect_corrupt(file_of("{\"__metadata__\":{\"a\":\"x\",\"n\":3}}", 0),
                 {"__metadata__.n is not a string"});
  expect_corrupt(file_of("{\"__metadata__\":[]}", 0), {"__metadata__ is not an object"});
}

// B07: sizes from a file never wrap.
TEST_F(SafetensorsTest, B07ShapesThatOverflow) {
  const auto shape = [&](const std::string& dims) {
    return file_of("{" + entry("a", "BF16", dims, 0, 0) + "}", 0);
  };
  expect_corrupt(shape("[8589934592,8589934592]"),
                 {"m: a: BF16 [8589934592, 8589934592]", "64 bits"});
  expect_corrupt(shape("[4294967296,4294967296,0,8589934592]"), {"64 bits"});
  expect_corrupt(shape("[-1]"), {"m: a: the shape [-1]", "whole number of 0 or more"});
  expect_corrupt(shape("[-1,-2]"), {"whole number of 0 or more"});
  expect_corrupt(shape("[1.5]"), {"1.5"});
  expect_corrupt(shape("[2.0]"), {"2.0"});
  expect_corrupt(shape("[\"3\"]"), {"\"3\""});
  expect_corrupt(shape("[true]"), {"true"});
  expect_corrupt(shape("3"), {"shape is missing or not an array"});
  expect_corrupt(shape("[1,1,1,1,1,1,0]"), {"7 dimensions, at most 6"});
  expect_corrupt(shape("[18446744073709551616]"), {"18446744073709551616", "64 bits"});
}

TEST_F(SafetensorsTest, EntriesThatAreNotWhole) {
  expect_corrupt(file_of("{\"a\":3}", 0), {"m: a: the entry is not an object"});
  expect_corrupt(file_of(R"({"a":{"shape":[],"data_offsets":[0,0]}})", 0), {"dtype is missing"});
  expect_corrupt(file_of(R"({"a":{"dtype":"U8","data_offsets":[0,0]}})", 0), {"shape is missing"});
  expect_corrupt(file_of(R"({"a":{"dtype":"U8","shape":[0]}})", 0), {"data_offsets is missing"});
  expect_corrupt(file_of(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0]}})", 0),
                 {"data_offsets is missing or not two"});
  expect_corrupt(file_of(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0.0]}})", 0),
                 {"data_offsets is missing or not two"});
  expect_corrupt(file_of("{" + entry("a", "Q7", "[0]", 0, 0) + "}", 0),
                 {"the type \"Q7\" is not known"});
  expect_corrupt(
      file_of("{" + entry("a", "U8", "[0]", 0, 0) + "," + entry("a", "U8", "[0]", 0, 0) + "}", 0),
      {"header: the key \"a\" occurs twice"});
  expect_corrupt(file_of("{" + entry("a", "F4", "[3]", 0, 2) + "}", 2),
                 {"no whole number of bytes"});
}

TEST_F(SafetensorsTest, ReportsAllFaultsTogether) {
  expect_corrupt(
      file_of("{" + entry("a", "Q7", "[0]", 0, 0) + "," + entry("b", "U8", "[-1]", 0, 0) + "," +
                  entry("c", "U8", "[4]", 0, 9) + ",\"d\":1}",
              8),
      {"4 faults", "\n    a: ", "\n    b: ", "\n    c: ", "\n    d: "});
  std::string many = "{";
  for (int i = 0; i < 50; ++i) many += concat(i ? "," : "", "\"t", i, "\":0");
  expect_corrupt(file_of(many + "}", 0), {"50 faults", "\n    t19: ", "and 30 more"});
}

TEST_F(SafetensorsTest, FilesThatCannotBeOpened) {
  expect_error(ErrorKind::not_found, {"none.safetensors", "cannot open"},
               [&] { Safetensors::open_file(scratch.path() / "none.safetensors"); });
  expect_error(ErrorKind::invalid_argument, {"not a regular file"},
               [&] { Safetensors::open_file(scratch.path()); });
  ASSERT_EQ(::mkfifo((scratch.path() / "pipe").c_str(), 0600), 0);
  expect_error(ErrorKind::invalid_argument, {"not a regular file"},
               [&] { Safetensors::open_file(scratch.path() / "pipe"); });
}

// B09: a type that needs conversion is never handed over as if it were converted.
TEST_F(SafetensorsTest, B09ConvertsOrRefusesByName) {
  const std::string header =
      "{" + entry("f64", "F64", "[3]", 0, 24) + "," + entry("i64", "I64", "[1]", 24, 32) + "," +
      entry("f32", "F32", "[2]", 32, 40) + "," + entry("i32", "I32", "[1]", 40, 44) + "," +
      entry("f16", "F16", "[4]", 44, 52) + "," + entry("bf16", "BF16", "[2]", 52, 56) + "," +
      entry("f8", "F8_E4M3", "[2]", 56, 58) + "," + entry("i8", "I8", "[1]", 58, 59) + "," +
      entry("bool", "BOOL", "[1]", 59, 60) + "," + entry("u8", "U8", "[1]", 60, 61) + "}";
  const auto path = scratch.write(
      "m", file_of(header, bytes_of({0.1, -1e300, 3.0}) + bytes_of<int64_t>({int64_t{1} << 40}) +
                               bytes_of({1.0f + 0x1p-8f, -0.0f}) + bytes_of<int32_t>({-5}) +
                               bytes_of<uint16_t>({0x3c00, 0x0001, 0xfbff, 0x7c00}) +
                               bytes_of<uint16_t>({0x4049, 0x8000}) + std::string("\x38\x40", 2) +
                               std::string("\xff\x01\xc8", 3)));
  ::chmod(path.c_str(), 0444);  // read-only files map as well as others
  const auto file = Safetensors::open_file(path);

  for (const char* name : {"f64", "bool"}) {
    SCOPED_TRACE(name);
    EXPECT_FALSE(file.find(name)->dtype.has_value());
    expect_error(ErrorKind::unsupported, {name, file.find(name)->stored_type, "in place"},
                 [&] { file.view(name); });
  }
  EXPECT_EQ(file.view("f8").dtype, DType::f8e4m3);
  EXPECT_EQ(file.view("i8").dtype, DType::i8);
  const Tensor f64 = file.read("f64", DType::f32);
  EXPECT_EQ(f64.view.as<float>()[0], 0.1f);
  EXPECT_EQ(f64.view.as<float>()[1], -INFINITY);
  const Tensor f16 = file.read("f16", DType::f32);
  EXPECT_EQ(f16.view.as<float>()[0], 1.0f);
  EXPECT_EQ(f16.view.as<float>()[1], 0x1p-24f);
  EXPECT_EQ(f16.view.as<float>()[2], -65504.0f);
  EXPECT_EQ(f16.view.as<float>()[3], INFINITY);
  const Tensor bf16s = file.read("bf16", DType::f32);
  EXPECT_EQ(bf16s.view.as<float>()[0], 3.140625f);
  EXPECT_TRUE(std::signbit(bf16s.view.as<float>()[1]));
  const Tensor rounded = file.read("f32", DType::bf16);
  EXPECT_EQ(rounded.view.as<bf16>()[0].bits, 0x3f80);  // 1 + 2^-8 lies half way: to even
  EXPECT_EQ(file.read("f16", DType::f16).view.as<uint16_t>()[2], 0xfbff);
  EXPECT_EQ(file.read("i64", DType::i64).view.as<int64_t>()[0], int64_t{1} << 40);
  EXPECT_EQ(file.read("i32", DType::i64).view.as<int64_t>()[0], -5);
  EXPECT_EQ(file.read("u8", DType::i32).view.as<int32_t>()[0], 0xc8);
  EXPECT_EQ(file.read("u8", DType::u8).view.as<uint8_t>()[0], 0xc8);

  const auto refused = [&](const char* name, DType dtype) {
    expect_error(ErrorKind::unsupported,
                 {name, file.find(name)->stored_type, concat("cannot be read as ", name_of(dtype))},
                 [&] { file.read(name, dtype); });
  };
  refused("f8", DType::f32);
  refused("i64", DType::f32);
  refused("i64", DType::i32);
  refused("i32", DType::bf16);
  refused("i8", DType::u8);
  refused("f32", DType::f16);
  refused("f32", DType::i32);
}

TEST_F(SafetensorsTest, MisalignedTensorsReadRight) {
  const auto file =
      open(file_of("{" + entry("b", "U8", "[1]", 0, 1) + "," + entry("f", "F32", "[2]", 1, 9) +
                       " }",  // 105 bytes of header: the f32 lies at an odd address
                   std::string("x") + bytes_of({1.25f, -3.0f})));
  const bool odd = reinterpret_cast<uintptr_t>(file.view("f").data) % 4 != 0;
  EXPECT_EQ(Safetensors::aligned(file.view("f")), !odd);
  EXPECT_TRUE(Safetensors::aligned(file.view("b")));
  const Tensor copy = file.read("f", DType::f32);
  EXPECT_EQ(copy.view.as<float>()[0], 1.25f);
  EXPECT_EQ(copy.view.as<float>()[1], -3.0f);
  EXPECT_TRUE(Safetensors::aligned(copy.view));
}

// B10: the mapping is shared and read-only.
TEST_F(SafetensorsTest, B10MapsSharedAndReadOnly) {
  const auto file = open(file_of("{" + entry("a", "F32", "[1]", 0, 4) + "}", bytes_of({3.0f})));
  std::ifstream maps("/proc/self/maps");
  const std::string name = (scratch.path() / "m").string();
  std::string found;
  for (std::string line; std::getline(maps, line);) {
    if (line.ends_with(name)) found = line.substr(line.find(' ') + 1, 4);
  }
  EXPECT_EQ(found, "r--s");
}

TEST_F(SafetensorsTest, OpensShards) {
  write_shard("s1", {"b", "d"});
  write_shard("s2", {"a"});
  write_index(R"({"a":"s2","b":"s1","d":"s1"})");
  const auto folder = open_folder();
  ASSERT_EQ(folder.tensors().size(), 3u);
  EXPECT_EQ(folder.tensors()[0].name, "a");
  EXPECT_EQ(folder.find("d")->file, "s1");
  EXPECT_EQ(folder.origin(), scratch.path());
  EXPECT_EQ(folder.total_bytes(), 12);
}

TEST_F(SafetensorsTest, OpensASingleFileFolder) {
  expect_error(ErrorKind::not_found, {std::string(kWeightsName), "neither"},
               [&] { open_folder(); });
  write_shard(std::string(kWeightsName), {"a"});
  EXPECT_EQ(open_folder().tensors().size(), 1u);
  write_index("{\"a\":\"" + std::string(kWeightsName) + "\"}");
  EXPECT_EQ(open_folder().tensors().size(), 1u);
  expect_error(ErrorKind::not_found, {"does not exist"},
               [&] { Safetensors::open_folder(scratch.path() / "none"); });
}

// B01: an index cannot make the loader open anything outside its folder.
TEST_F(SafetensorsTest, B01ShardNamesStayInside) {
  write_shard("s1", {"a"});
  scratch.write("sub/x.safetensors", file_of("{}", 0));
  for (const char* name :
       {"\"../../../etc/hostname\"", "\"/tmp/x.safetensors\"", "\"sub/x.safetensors\"", "\"\"", "7",
        "null", "\"..\"", "\".\"", "\"a\\\\b\"", "\"s1\\u0000\"", "[\"s1\"]"}) {
    SCOPED_TRACE(name);
    write_index(std::string("{\"a\":\"s1\",\"layers.0.x\":") + name + "}");
    expect_error(ErrorKind::corrupt, {"layers.0.x", "not a plain file name"},
                 [&] { open_folder(); });
  }
}

// B02: everything that is missing or surplus is listed before any weight is read.
TEST_F(SafetensorsTest, B02ListsAllThatIsMissing) {
  write_shard("s1", {"a", "extra"});
  scratch.write("s3", "");
  write_index(R"({"a":"s1","lost":"s1","b":"s2","c":"s2","d":"s3","e":"s4"})");
  expect_error(ErrorKind::corrupt,
               {"5 faults", "s2 is missing; the index places 2 tensors in it", "s4 is missing",
                "lost is not in s1", "extra is in s1, where the index does not place it",
                "s3: 0 bytes are too few"},
               [&] { open_folder(); });
}

TEST_F(SafetensorsTest, B02MissingShardsAlone) {
  write_shard("s1", {"a"});
  write_index(R"({"a":"s1","b":"s2"})");
  expect_error(ErrorKind::not_found, {scratch.path().string(), "s2 is missing"},
               [&] { open_folder(); });
}

TEST_F(SafetensorsTest, B02TensorInAnotherShard) {
  write_shard("s1", {"a", "b"});
  write_shard("s2", {"c"});
  write_index(R"({"a":"s1","b":"s2","c":"s2"})");
  expect_error(ErrorKind::corrupt, {"b is not in s2", "b is in s1, where"}, [&] { open_folder(); });
}

TEST_F(SafetensorsTest, B02IndexAndSingleFile) {
  write_shard("s1", {"a"});
  write_index(R"({"a":"s1"})");
  write_shard(std::string(kWeightsName), {"a"});
  expect_error(ErrorKind::corrupt, {"both", "remove the one"}, [&] { open_folder(); });
}

TEST_F(SafetensorsTest, BadIndexes) {
  write_shard("s1", {"a"});
  const auto index = [&](const std::string& text, std::initializer_list<std::string_view> parts) {
    scratch.write(kWeightsIndexName, text);
    expect_error(ErrorKind::corrupt, parts, [&] { open_folder(); });
  };
  index("{", {std::string(kWeightsIndexName), "not valid JSON"});
  index("[]", {"weight_map is missing"});
  index("{}", {"weight_map is missing"});
  index(R"({"weight_map":[]})", {"weight_map is missing or not an object"});
  index(R"({"weight_map":{"a":"s1","a":"s1"}})", {"weight_map: the key \"a\" occurs twice"});
}

TEST_F(SafetensorsTest, WhatIsWrittenReadsBack) {
  const uint8_t small[3] = {1, 2, 3};
  const float values[6] = {1, 2, 3, 4, 5, -6.5f};
  const int64_t number[1] = {-9};
  const bf16 halves[2] = {to_bf16(1.0f), to_bf16(-2.0f)};
  const auto path = scratch.path() / "out.safetensors";
  write_safetensors(path,
                    {{"small", make_view(small, {3}, DType::u8)},
                     {"layers.0.\"é\"", make_view(values, {2, 3}, DType::f32)},
                     {"number", make_view(number, {}, DType::i64)},
                     {"none", make_view(values, {0, 4}, DType::f32)},
                     {"halves", make_view(halves, {2}, DType::bf16)}},
                    {{"seed", "7"}});
  EXPECT_EQ(scratch.file_count(), 1);
  const std::string bytes = ScratchFolder::read(path);
  const uint64_t header =
      static_cast<unsigned char>(bytes[0]) + 256u * static_cast<unsigned char>(bytes[1]);
  EXPECT_EQ((8 + header) % 64, 0u);
  EXPECT_LT(bytes.find("\"small\""), bytes.find("\"number\""));  // as given

  const auto file = Safetensors::open_file(path);
  EXPECT_EQ(file.metadata().at("seed"), "7");
  ASSERT_EQ(file.tensors().size(), 5u);
  for (const StoredTensor& tensor : file.tensors()) {
    EXPECT_TRUE(Safetensors::aligned(file.view(tensor.name))) << tensor.name;
  }
  EXPECT_EQ(file.view("layers.0.\"é\"").shape, (Shape{2, 3}));
  EXPECT_EQ(std::memcmp(file.view("layers.0.\"é\"").data, values, sizeof values), 0);
  EXPECT_EQ(file.view("number").as<int64_t>()[0], -9);
  EXPECT_EQ(file.view("halves").as<bf16>()[1].bits, halves[1].bits);
  EXPECT_EQ(file.view("small").as<uint8_t>()[2], 3);
  EXPECT_EQ(file.view("none").numel(), 0);
}

TEST_F(SafetensorsTest, WritingReplacesTheOldFile) {
  const float value = 2;
  const auto path = scratch.write("out", "old");
  write_safetensors(path, {{"a", make_view(&value, {1}, DType::f32)}});
  EXPECT_EQ(Safetensors::open_file(path).view("a").numel(), 1);
  struct stat status;
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  const mode_t mask = ::umask(0);
  ::umask(mask);
  EXPECT_EQ(status.st_mode & 0777, 0666 & ~mask);
}

TEST_F(SafetensorsTest, FailedWritesLeaveNothing) {
  const float value = 2;
  const NamedTensor tensor{"a", make_view(&value, {1}, DType::f32)};
  const auto path = scratch.path() / "out";
  const auto refused = [&](const std::vector<NamedTensor>& tensors, std::string_view why) {
    expect_error(ErrorKind::invalid_argument, {path.string(), why},
                 [&] { write_safetensors(path, tensors); });
    EXPECT_FALSE(std::filesystem::exists(path));
  };
  refused({tensor, tensor}, "two tensors are named a");
  refused({{"__metadata__", tensor.view}}, "reserves");
  refused({{"a\xff", tensor.view}}, "not UTF-8");
  const float grid[4] = {};
  refused({{"t", make_view(grid, {2, 2}, DType::f32).permute({1, 0})}}, "not contiguous");
  refused({{"d", make_view(grid, {4}, DType::f32, DeviceKind::cuda)}}, "not in host memory");

  EXPECT_EQ(scratch.file_count(), 0);
  std::filesystem::create_directory(path);
  expect_error(ErrorKind::invalid_argument, {path.string(), "is a folder"},
               [&] { write_safetensors(path, {tensor}); });
  EXPECT_EQ(scratch.file_count(), 1);
}

TEST_F(SafetensorsTest, ManyTensorsOpenFast) {
  constexpr int kTensors = 20000;
  std::string header = "{", map = "{";
  for (int i = 0; i < kTensors; ++i) {
    const std::string name = concat("layers.", i, ".weight");
    header += concat(i ? "," : "", entry(name, "U8", "[1]", i, i + 1));
    map += concat(i ? "," : "", '"', name, "\":\"s1\"");
  }
  scratch.write("s1", file_of(header + "}", kTensors));
  write_index(map + "}");
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(open_folder().tensors().size(), size_t{kTensors});
  // Some 50 ms when linear; quadratic work on 20 000 names would take longer than this.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(Checkpoint, ShippedModelOpens) {
  const auto model = source_dir() / "models/cosmos3-pico";
  if (!std::filesystem::exists(model)) GTEST_SKIP() << model << " is not here";
  const auto start = std::chrono::steady_clock::now();
  const auto transformer = Safetensors::open_folder(model / "transformer");
  const auto vae = Safetensors::open_folder(model / "vae");
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_GT(transformer.tensors().size(), 100u);
  EXPECT_GT(vae.tensors().size(), 50u);
  RecordProperty(
      "microseconds",
      static_cast<int>(std::chrono::duration_cast<std::chrono::microseconds>(took).count()));
  EXPECT_LT(took, std::chrono::milliseconds(500));  // 5 ms on an idle machine
}

// Faults, second list, C11: no address space is no fault of the checkpoint. In a process of its
// own.
TEST(SafetensorsDeathTest, NoAddressSpaceIsToldAsMemory) {
  const ScratchFolder folder;
  std::string header = R"({"a":{"dtype":"U8","shape":[33554432],"data_offsets":[0,33554432]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i));
  const auto shard = folder.write("one.safetensors", length + header);
  std::filesystem::resize_file(shard, 8 + header.size() + 33554432);
  folder.write(std::string(kWeightsIndexName), R"({"weight_map":{"a":"one.safetensors"}})");
  const auto open_without_room = [&] {
    std::ifstream statm("/proc/self/statm");
    rlim_t pages = 0;
    statm >> pages;
    const rlimit limit{pages * 4096 + (rlim_t{8} << 20), RLIM_INFINITY};
    setrlimit(RLIMIT_AS, &limit);
    try {
      Safetensors::open_folder(folder.path());
    } catch (const Error& error) {
      std::_Exit(error.kind() == ErrorKind::out_of_memory ? 0 : 1);
    }
    std::_Exit(2);
  };
  EXPECT_EXIT(open_without_room(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace orrery
