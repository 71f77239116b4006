#include "printable.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>

namespace orrery::cli {

namespace {

constexpr size_t kLongestWord = 300, kShortenedWord = 100, kLongestText = 20000;

// Bytes of the well-formed UTF-8 character at the front; 0 when there is none or it is a control
// character.
size_t character(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
  const size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < size) return 0;
  for (size_t i = 1; i < size; ++i) {
    if (byte(i) >> 6 != 2) return 0;
  }
  const bool is_bad = (first == 0xc2 && byte(1) < 0xa0) ||  // control characters of Latin-1
                      (first == 0xe0 && byte(1) < 0xa0) || (first == 0xf0 && byte(1) < 0x90) ||
                      (first == 0xed && byte(1) >= 0xa0) || (first == 0xf4 && byte(1) >= 0x90);
  return is_bad ? 0 : size;
}

std::string left_out(size_t bytes) { return "[... " + std::to_string(bytes) + " bytes ...]"; }

std::string shortened_words(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t end = std::min(text.find_first_of(" \n"), text.size());
    const std::string_view word = text.substr(0, end);
    if (word.size() > kLongestWord) {
      out += word.substr(0, kShortenedWord);
      out += left_out(word.size() - 2 * kShortenedWord);
      out += word.substr(word.size() - kShortenedWord);
    } else {
      out += word;
    }
    text.remove_prefix(end);
    const size_t blanks = std::min(text.find_first_not_of(" \n"), text.size());
    out += text.substr(0, blanks);
    text.remove_prefix(blanks);
  }
  return out;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string words = shortened_words(text);
  if (words.size() > kLongestText) {
    words = words.substr(0, kLongestText) + left_out(words.size() - kLongestText);
  }
  std::string out;
  for (std::string_view rest = words; !rest.empty();) {
    const size_t size = rest[0] == '\n' ? 1 : character(rest);
    if (size > 0) {
      out += rest.substr(0, size);
    } else {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\x%02x", static_cast<uint8_t>(rest[0]));
      out += escaped;
    }
    rest.remove_prefix(std::max<size_t>(size, 1));
  }
  return out;
}

}  // namespace orrery::cli
