#include "text/tokenizer.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "base/json.h"
#include "expect_error.h"
#include "scratch_folder.h"
#include "support/source_dir.h"
#include "text/normal_form.h"
#include "text/utf8.h"

namespace orrery {
namespace {

using Ids = std::vector<int64_t>;

std::filesystem::path pico_folder() { return source_dir() / "models/cosmos3-pico/text_tokenizer"; }

const Tokenizer& pico() {
  static const Tokenizer tokenizer = Tokenizer::load(pico_folder());
  return tokenizer;
}

Json pico_file() { return Json::load(pico_folder() / "tokenizer.json"); }

using Path = std::vector<std::string>;

// The file with one value replaced, found by keys and, in lists, indices.
Json with(const Json& file, const Path& path, const Json& value) {
  if (path.empty()) return value;
  const Path rest(path.begin() + 1, path.end());
  if (file.is_array()) {
    Json list = Json::array();
    const auto wanted = static_cast<size_t>(std::stoi(path.front()));
    for (size_t i = 0; i < file.items().size(); ++i) {
      list.push(i == wanted ? with(file.at(i), rest, value) : file.at(i));
    }
    return list;
  }
  Json object = file;
  const Json* member = file.find(path.front());
  object.set(path.front(), member != nullptr ? with(*member, rest, value) : value);
  return object;
}

Tokenizer changed(const Path& path, const Json& value) {
  return Tokenizer::from_json(with(pico_file(), path, value).dump(), "t.json");
}

void expect_refused(ErrorKind kind, const Path& path, const Json& value,
                    std::initializer_list<std::string_view> parts) {
  SCOPED_TRACE(value.dump().substr(0, 80));
  const std::string message = expect_error(kind, parts, [&] { changed(path, value); });
  EXPECT_NE(message.find("t.json"), std::string::npos) << message;
}

// The ids below are those of the reference implementation with the same file.
TEST(Tokenizer, IdsOfTheReference) {
  EXPECT_EQ(pico().encode("->"), (Ids{12, 29}));  // B27
  EXPECT_EQ(pico().encode("{\"a\": 1}"), (Ids{374, 64, 288, 220, 16, 92}));
  EXPECT_EQ(pico().encode("I'm CAN'T"), (Ids{40, 6, 76, 220, 34, 32, 45, 6, 51}));
  EXPECT_EQ(pico().encode("3.14159"), (Ids{18, 13, 16, 19, 16, 20, 24}));
  EXPECT_EQ(pico().encode("a \n\n\n b"), (Ids{64, 220, 198, 198, 198, 261}));  // B28
  EXPECT_EQ(pico().encode("trailing  "), (Ids{83, 302, 72, 75, 413, 220, 220}));
  EXPECT_EQ(pico().encode("x\u00a0y"), (Ids{87, 126, 254, 88}));
  EXPECT_EQ(pico().encode("\u00e9"), (Ids{127, 102}));
  EXPECT_EQ(pico().encode("e\u0301"), (Ids{127, 102}));
  EXPECT_EQ(pico().encode("\u4e2d\u6587"), (Ids{160, 116, 255, 162, 244, 229}));
  EXPECT_EQ(pico().encode("a\u0085b"), (Ids{64, 126, 227, 65}));
  EXPECT_EQ(pico().encode(std::string_view("\0", 1)), (Ids{188}));
  EXPECT_EQ(pico().encode(""), Ids{});
  EXPECT_EQ(pico().encode("   "), (Ids{220, 220, 220}));
  EXPECT_EQ(pico().vocab_size(), 543);
}

TEST(Tokenizer, InvalidBytesAreReplacedBeforeAnythingElse) {  // B28
  EXPECT_EQ(pico().encode("\xFF\xC0"), (Ids{171, 123, 121, 171, 123, 121}));
  EXPECT_EQ(pico().encode("\xFF\xC0"), pico().encode("\ufffd\ufffd"));
  EXPECT_EQ(pico().encode("\xE4\xB8<|im_end|>"), (Ids{171, 123, 121, 540}));
}

TEST(Tokenizer, AddedTokensAreFoundOnRawText) {
  EXPECT_EQ(pico().encode("<|im_end|>"), (Ids{540}));
  EXPECT_EQ(pico().encode("a<|im_start|><|im_end|>b"), (Ids{64, 539, 540, 65}));
  EXPECT_EQ(pico().encode("<|im_end|"), (Ids{27, 91, 72, 76, 62, 68, 262, 91}));
  EXPECT_EQ(pico().encode("<<|im_end|>"), (Ids{27, 540}));
  // A mark behind an added token composes with nothing.
  EXPECT_EQ(pico().encode("<|im_end|>\u0301"), (Ids{540, 136, 223}));
  EXPECT_EQ(pico().decode(Ids{540, 136, 223}), "<|im_end|>\u0301");
}

TEST(Tokenizer, AddedTokensLongestFirstSpecialOrNot) {
  Json file = pico_file();
  Json tokens = file.at("added_tokens");
  const auto add = [&](const char* text, int64_t id) {
    Json token = tokens.at(size_t{0});
    tokens.push(token.set("content", text).set("id", id).set("special", false));
  };
  add("<a>", 600);
  add("<a><b", 601);
  add("<b>", 602);
  add("e\u0301", 603);
  const Tokenizer tokenizer =
      Tokenizer::from_json(file.set("added_tokens", tokens).dump(), "t.json");
  EXPECT_EQ(tokenizer.encode("<a><b>"), (Ids{601, 29}));
  EXPECT_EQ(tokenizer.encode("<a><a><b"), (Ids{600, 601}));
  EXPECT_EQ(tokenizer.encode("<a><b><b>"), (Ids{601, 29, 602}));
  EXPECT_EQ(tokenizer.encode("e\u0301"), (Ids{603}));
  EXPECT_EQ(tokenizer.encode("\u00e9"), (Ids{127, 102}));
  EXPECT_EQ(tokenizer.decode(Ids{603, 601}), "e\u0301<a><b");
  EXPECT_EQ(tokenizer.vocab_size(), 604);
  expect_error(ErrorKind::invalid_argument, {"t.json", "550", "604"},
               [&] { tokenizer.decode(Ids{550}); });
}

TEST(Tokenizer, DecodesBytesAcrossTokens) {
  EXPECT_EQ(pico().decode(Ids{160, 116, 255, 162, 244, 229}), "\u4e2d\u6587");
  EXPECT_EQ(pico().decode(Ids{160, 116}), "\ufffd");
  EXPECT_EQ(pico().decode(Ids{116, 64, 160}), "\ufffda\ufffd");
  EXPECT_EQ(pico().decode(Ids{}), "");
  for (const int64_t id : {int64_t{-1}, int64_t{543}, int64_t{1} << 40, INT64_MIN}) {
    expect_error(ErrorKind::invalid_argument, {concat("the token id ", id, " "), "543"},
                 [&] { pico().decode(Ids{id}); });
  }
}

TEST(Tokenizer, IdsByText) {
  EXPECT_EQ(pico().id_of("<|vision_start|>"), 541);
  EXPECT_EQ(pico().id_of("!"), 0);
  EXPECT_EQ(pico().id_of("\u0120"), 220);  // a blank as the file spells it
  EXPECT_EQ(pico().id_of("no such token"), std::nullopt);
  EXPECT_EQ(pico().eos_id(), 540);
}

// Every class of character, in runs and mixed.
std::string random_text(std::mt19937& random) {
  static constexpr std::array<std::pair<uint32_t, uint32_t>, 14> kRanges = {{{0x0, 0x7F},
                                                                             {0x20, 0x40},
                                                                             {0x61, 0x7A},
                                                                             {0x80, 0x2FF},
                                                                             {0x300, 0x36F},
                                                                             {0x590, 0x11FF},
                                                                             {0x1100, 0x11FF},
                                                                             {0x1E00, 0x206F},
                                                                             {0x3000, 0x30FF},
                                                                             {0x3400, 0x9FFF},
                                                                             {0xAC00, 0xD7A3},
                                                                             {0xE000, 0xFFFF},
                                                                             {0x10000, 0x2FFFF},
                                                                             {0xE0000, 0x10FFFF}}};
  std::string text;
  const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  for (uint32_t runs = below(8); runs > 0; --runs) {
    const auto [first, last] = kRanges[below(kRanges.size())];
    for (uint32_t length = below(12); length > 0; --length)
      append_utf8(text, first + below(last - first + 1));
  }
  return text;
}

TEST(Tokenizer, DecodingGivesTheNormalFormBack) {
  std::mt19937 random(11);
  for (int round = 0; round < 3000; ++round) {
    const std::string text = random_text(random);
    const std::string more = random_text(random);
    EXPECT_EQ(pico().decode(pico().encode(text)), nfc(text));
    // Nothing composes across an added token.
    const Ids ids = pico().encode(text + "<|im_start|>" + more);
    EXPECT_EQ(pico().decode(ids), nfc(text) + "<|im_start|>" + nfc(more));
    for (const int64_t id : ids) EXPECT_TRUE(id >= 0 && id < pico().vocab_size());
  }
}

TEST(Tokenizer, ThreadsShareOne) {
  std::mt19937 random(12);
  std::vector<std::string> texts;
  std::vector<Ids> expected;
  for (int i = 0; i < 200; ++i) {
    texts.push_back(random_text(random));
    expected.push_back(pico().encode(texts.back()));
  }
  std::array<int, 4> wrong{};
  std::vector<std::thread> threads;
  for (int& count : wrong) {
    threads.emplace_back([&] {
      for (size_t i = 0; i < texts.size(); ++i) count += pico().encode(texts[i]) != expected[i];
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, (std::array<int, 4>{}));
}

TEST(Tokenizer, LongPieces) {
  const std::string text(100'000, 'a');
  const Ids ids = pico().encode(text);
  EXPECT_EQ(pico().decode(ids), text);
  EXPECT_EQ(pico().encode(std::string(20'000, ' ')).size(), 20'000u);  // no merge of blanks
}

TEST(Tokenizer, OlderFilesSpellMergesAsStrings) {
  const Json file = pico_file();
  Json merges = Json::array();
  for (const Json& pair : file.at("model").at("merges").items()) {
    merges.push(pair.at(size_t{0}).as_string() + " " + pair.at(1).as_string());
  }
  EXPECT_EQ(changed({"model", "merges"}, merges).encode("the little red circle"),
            pico().encode("the little red circle"));
  expect_refused(ErrorKind::corrupt, {"model", "merges", "3"}, "ab", {"\"ab\"", "one blank"});
  expect_refused(ErrorKind::corrupt, {"model", "merges", "3"}, "a b c", {"\"a b c\"", "one blank"});
}

TEST(Tokenizer, WholePiecesWhenMergesAreIgnored) {
  Json file = with(pico_file(), {"model", "merges"}, Json::array());
  EXPECT_EQ(Tokenizer::from_json(file.dump(), "t.json").encode(" a").size(), 2u);
  file = with(file, {"model", "ignore_merges"}, true);
  const Tokenizer tokenizer = Tokenizer::from_json(file.dump(), "t.json");
  EXPECT_EQ(tokenizer.encode(" a"), (Ids{*tokenizer.id_of("\u0120a")}));
}

TEST(Tokenizer, WithoutANormalizerTextIsLeftAlone) {
  EXPECT_EQ(changed({"normalizer"}, Json()).encode("e\u0301").size(), 3u);
}

TEST(Tokenizer, RefusesByName) {
  const ErrorKind kind = ErrorKind::unsupported;
  expect_refused(kind, {"normalizer", "type"}, "NFKC", {"normalizer", "NFKC", "NFC"});
  expect_refused(kind, {"model", "type"}, "WordPiece", {"model", "WordPiece", "BPE"});
  expect_refused(kind, {"model", "dropout"}, 0.1, {"dropout"});
  expect_refused(kind, {"model", "end_of_word_suffix"}, "</w>", {"end_of_word_suffix", "</w>"});
  expect_refused(kind, {"model", "continuing_subword_prefix"}, "##",
                 {"continuing_subword_prefix", "##"});
  expect_refused(kind, {"pre_tokenizer"}, Json(), {"pre_tokenizer"});
  expect_refused(kind, {"pre_tokenizer", "type"}, "Whitespace", {"pre_tokenizer", "Whitespace"});
  expect_refused(kind, {"pre_tokenizer", "pretokenizers", "0", "type"}, "Digits",
                 {"pretokenizers[0]", "Digits"});
  expect_refused(kind, {"pre_tokenizer", "pretokenizers", "0", "behavior"}, "Removed",
                 {"behavior", "Removed"});
  expect_refused(kind, {"pre_tokenizer", "pretokenizers", "0", "invert"}, true, {"invert true"});
  expect_refused(kind, {"pre_tokenizer", "pretokenizers", "0", "pattern"},
                 Json::object({{"String", " "}}), {"Regex"});
  expect_refused(kind, {"pre_tokenizer", "pretokenizers", "0", "pattern", "Regex"}, "(",
                 {"cannot compile"});
  expect_refused(kind, {"pre_tokenizer", "pretokenizers", "1", "add_prefix_space"}, true,
                 {"add_prefix_space true"});
  expect_refused(kind, {"pre_tokenizer", "pretokenizers", "1", "use_regex"}, true,
                 {"use_regex true"});
  expect_refused(kind, {"pre_tokenizer", "pretokenizers"}, Json::array(), {"0 steps"});
  expect_refused(kind, {"post_processor", "type"}, "BertProcessing",
                 {"post_processor", "BertProcessing"});
  expect_refused(kind, {"decoder", "type"}, "WordPiece", {"decoder", "WordPiece"});
  for (const char* flag : {"single_word", "lstrip", "rstrip", "normalized"}) {
    expect_refused(kind, {"added_tokens", "1", flag}, true,
                   {"added_tokens[1]", flag, "<|im_start|>"});
  }
}

TEST(Tokenizer, RefusesFilesThatContradictThemselves) {
  const ErrorKind kind = ErrorKind::corrupt;
  expect_refused(kind, {"model", "vocab", "a"}, 1, {"the id 1", "\"a\""});
  expect_refused(kind, {"model", "vocab", "a"}, -1, {"-1", "\"a\""});
  expect_refused(kind, {"model", "vocab", "a"}, int64_t{1} << 40, {"1099511627776", "\"a\""});
  expect_refused(kind, {"model", "vocab", "a"}, "x", {"\"a\"", "integer"});
  expect_refused(kind, {"model", "vocab"}, Json::object(), {"lacks", "byte 0"});
  expect_refused(kind, {"model", "merges", "2"}, Json::array({"q", "qq"}), {"merge 2", "\"qq\""});
  expect_refused(kind, {"model", "merges", "2"}, Json::array({"q"}), {"1 parts"});
  expect_refused(kind, {"added_tokens", "1", "id"}, 538, {"538"});
  expect_refused(kind, {"added_tokens", "1", "content"}, "", {"added_tokens[1]"});
  expect_refused(kind, {"added_tokens", "1", "content"}, "a", {"\"a\"", "539"});
  expect_error(kind, {"t.json"}, [] { Tokenizer::from_json("{", "t.json"); });
  expect_error(kind, {"t.json", "model"}, [] { Tokenizer::from_json("{}", "t.json"); });
}

class TokenizerFolder : public testing::Test {
 protected:
  Tokenizer load(std::string_view config) {
    folder_.write("tokenizer.json", ScratchFolder::read(pico_folder() / "tokenizer.json"));
    if (!config.empty()) folder_.write("tokenizer_config.json", config);
    return Tokenizer::load(folder_.path());
  }
  ScratchFolder folder_;
};

TEST_F(TokenizerFolder, NeedsOnlyTokenizerJson) {
  expect_error(ErrorKind::not_found, {"tokenizer.json"}, [&] { Tokenizer::load(folder_.path()); });
  const Tokenizer tokenizer = load("");
  EXPECT_EQ(tokenizer.eos_id(), std::nullopt);
  EXPECT_EQ(tokenizer.chat_template(), "");
}

TEST_F(TokenizerFolder, EosIsAStringOrAnObject) {
  EXPECT_EQ(load(R"({"eos_token": "<|endoftext|>"})").eos_id(), 538);
  EXPECT_EQ(load(R"({"eos_token": {"content": "<|im_end|>", "lstrip": false}})").eos_id(), 540);
  EXPECT_EQ(load(R"({"eos_token": null})").eos_id(), std::nullopt);
  expect_error(ErrorKind::corrupt, {"tokenizer_config.json", "</s>"},
               [&] { load(R"({"eos_token": "</s>"})"); });
  expect_error(ErrorKind::corrupt, {"tokenizer_config.json", "eos_token"},
               [&] { load(R"({"eos_token": 3})"); });
}

TEST_F(TokenizerFolder, TheTemplateOfTheFileComesFirst) {
  EXPECT_EQ(load(R"({"chat_template": "from config"})").chat_template(), "from config");
  EXPECT_EQ(
      load(
          R"({"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]})")
          .chat_template(),
      "d");
  expect_error(ErrorKind::corrupt, {"chat_template", "default"},
               [&] { load(R"({"chat_template": [{"name": "tools", "template": "t"}]})"); });
  folder_.write("chat_template.jinja", "from file");
  EXPECT_EQ(load(R"({"chat_template": "from config"})").chat_template(), "from file");
}

TEST_F(TokenizerFolder, NamedTokensAreKept) {
  const Tokenizer tokenizer =
      load(R"({"eos_token": "<|im_end|>", "pad_token": {"content": "p"}, "bos_token": null,
                                       "add_bos_token": false})");
  EXPECT_EQ(tokenizer.special_tokens(),
            (std::vector<Tokenizer::Named>{{"eos_token", "<|im_end|>"}, {"pad_token", "p"}}));
}

}  // namespace
}  // namespace orrery
