#include "text/utf8.h"

#include <algorithm>

namespace orrery {

namespace {

bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

// What may follow a leading byte: how many continuation bytes, and the bounds of the first of them
// (they exclude overlong forms, surrogates and values past U+10FFFF). length 0: cannot lead.
struct Lead {
  int length = 0;
  unsigned char low = 0x80;
  unsigned char high = 0xBF;
};

Lead lead_of(unsigned char byte) {
  if (byte < 0xC2 || byte > 0xF4) return {};
  if (byte < 0xE0) return {1};
  if (byte < 0xF0) {
    return {2, static_cast<unsigned char>(byte == 0xE0 ? 0xA0 : 0x80),
            static_cast<unsigned char>(byte == 0xED ? 0x9F : 0xBF)};
  }
  return {3, static_cast<unsigned char>(byte == 0xF0 ? 0x90 : 0x80),
          static_cast<unsigned char>(byte == 0xF4 ? 0x8F : 0xBF)};
}

}  // namespace

std::string valid_utf8(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  size_t i = 0;
  while (i < bytes.size()) {
    const auto byte = static_cast<unsigned char>(bytes[i]);
    if (byte < 0x80) {
      out += bytes[i++];
      continue;
    }
    const Lead lead = lead_of(byte);
    size_t end = i + 1;
    if (lead.length > 0 && end < bytes.size()) {
      const auto first = static_cast<unsigned char>(bytes[end]);
      if (first >= lead.low && first <= lead.high) {
        const size_t limit = std::min(bytes.size(), i + 1 + static_cast<size_t>(lead.length));
        for (++end; end < limit && is_continuation(bytes[end]); ++end) {
        }
      }
    }
    if (lead.length > 0 && end == i + 1 + static_cast<size_t>(lead.length)) {
      out.append(bytes, i, end - i);
    } else {
      out += "\xEF\xBF\xBD";
    }
    i = end;
  }
  return out;
}

char32_t next_code_point(std::string_view text, size_t& position) {
  const auto at = [&](size_t i) {
    return static_cast<char32_t>(static_cast<unsigned char>(text[i]));
  };
  const char32_t lead = at(position);
  const size_t i = position;
  if (lead < 0x80) {
    position += 1;
    return lead;
  }
  if (lead < 0xE0) {
    position += 2;
    return (lead & 0x1F) << 6 | (at(i + 1) & 0x3F);
  }
  if (lead < 0xF0) {
    position += 3;
    return (lead & 0x0F) << 12 | (at(i + 1) & 0x3F) << 6 | (at(i + 2) & 0x3F);
  }
  position += 4;
  return (lead & 0x07) << 18 | (at(i + 1) & 0x3F) << 12 | (at(i + 2) & 0x3F) << 6 |
         (at(i + 3) & 0x3F);
}

void append_utf8(std::string& out, char32_t c) {
  const auto put = [&](char32_t byte) { out += static_cast<char>(byte); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6);
    put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12);
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18);
    put(0x80 | (c >> 12 & 0x3F));
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  }
}

size_t count_code_points(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char byte) { return !is_continuation(byte); }));
}

bool is_python_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
         c == 0x205F || c == 0x3000;
}

std::string_view strip_front(std::string_view text) {
  size_t position = 0;
  while (position < text.size()) {
    size_t next = position;
    if (!is_python_space(next_code_point(text, next))) break;
    position = next;
  }
  return text.substr(position);
}

std::string_view strip_back(std::string_view text) {
  while (!text.empty()) {
    size_t start = text.size() - 1;
    while (start > 0 && is_continuation(text[start])) --start;
    size_t position = start;
    if (!is_python_space(next_code_point(text, position))) break;
    text = text.substr(0, start);
  }
  return text;
}

}  // namespace orrery
