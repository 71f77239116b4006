// Token texts and ids, both ways; the byte alphabet of byte-level BPE; added tokens found in text.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace orrery {

// Byte-level BPE spells each byte as one printable character: 33-126, 161-172 and 174-255 stand for
// themselves, the other 68 bytes in ascending order are U+0100, U+0101 and so on.
class ByteAlphabet {
 public:
  ByteAlphabet();
  const std::string& symbol(unsigned char byte) const { return symbol_[byte]; }
  // The bytes that `spelled` (valid UTF-8) stands for; none when a character is not of the
  // alphabet.
  std::optional<std::string> bytes_of(std::string_view spelled) const;

 private:
  std::array<std::string, 256> symbol_;
  std::array<int16_t, 512> byte_;  // by code point, -1: not of the alphabet
};

// One id per text and one text per id.
class Vocabulary {
 public:
  static constexpr int64_t kMaxId = (int64_t{1} << 22) - 1;  // the largest in use are below 2^18

  explicit Vocabulary(size_t expected);
  // `origin` names the place in errors. Refused: ids out of range, an id or a text given twice.
  void add(std::string_view text, int64_t id, const std::string& origin);
  std::optional<int32_t> find(std::string_view text) const;
  std::optional<std::string_view> text(int64_t id) const;
  int64_t size() const { return static_cast<int64_t>(spans_.size()); }  // largest id + 1

 private:
  struct Span {
    uint32_t offset = 0;
    uint32_t length = 0;
    bool used = false;
  };
  void grow();
  size_t slot_of(std::string_view text) const;
  std::string_view text_at(int32_t id) const;

  std::string blob_;
  std::vector<Span> spans_;     // by id
  std::vector<int32_t> slots_;  // ids by hash of the text, -1: free; open addressing
  size_t count_ = 0;
};

// Finds the listed texts in a text: the leftmost, and of those that begin there the longest.
class AddedTokens {
 public:
  struct Match {
    size_t begin = 0;
    size_t end = 0;
    int32_t id = -1;  // -1: nothing found, begin and end are the end of the text
  };

  AddedTokens();
  void add(std::string_view text, int32_t id);
  Match find(std::string_view text, size_t from) const;
  // The text of an added id; null for other ids.
  const std::string* text(int64_t id) const;

 private:
  struct Node {
    char byte;
    int32_t child;  // -1: none
    int32_t sibling;
    int32_t id;  // of the token that ends here, -1: none
  };
  int32_t child_of(int32_t node, char byte) const;

  std::vector<Node> nodes_;  // a trie; node 0 is its root
  std::array<bool, 256> first_{};
  std::vector<std::pair<int32_t, std::string>> texts_;  // ascending ids
};

}  // namespace orrery
