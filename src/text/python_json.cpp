#include "text/python_json.h"

#include <array>
#include <charconv>
#include <cmath>

#include "text/utf8.h"

namespace orrery {

namespace {

void write_unit(std::string& out, char32_t unit) {
  static constexpr std::string_view kDigits = "0123456789abcdef";
  out += "\\u";
  for (int shift = 12; shift >= 0; shift -= 4) out += kDigits[unit >> shift & 0xF];
}

void write_text(std::string& out, std::string_view raw) {
  static constexpr std::string_view kNamed = "\"\\\n\r\t\f\b";
  static constexpr std::string_view kNames = "\"\\nrtfb";
  const std::string text = valid_utf8(raw);
  out += '"';
  for (size_t i = 0; i < text.size();) {
    const char32_t c = next_code_point(text, i);
    const size_t named = c < 0x80 ? kNamed.find(static_cast<char>(c)) : std::string_view::npos;
    if (named != std::string_view::npos)
      (out += '\\') += kNames[named];
    else if (c >= 0x20 && c < 0x7F)
      out += static_cast<char>(c);
    else if (c == 0x7F)
      out += '\x7F';
    else if (c < 0x10000)
      write_unit(out, c);
    else {
      write_unit(out, 0xD800 + ((c - 0x10000) >> 10));
      write_unit(out, 0xDC00 + ((c - 0x10000) & 0x3FF));
    }
  }
  out += '"';
}

// repr(): the shortest digits that read back, positional for exponents -4 to 15, always with a
// point or an exponent of at least two digits.
void write_number(std::string& out, double value) {
  if (!std::isfinite(value)) {
    out += std::isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity";
    return;
  }
  std::array<char, 64> buffer;
  const auto scientific = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                        std::chars_format::scientific);
  const std::string_view shortest(buffer.data(),
                                  static_cast<size_t>(scientific.ptr - buffer.data()));
  const size_t mark = shortest.find('e');
  int exponent = 0;
  const char* digits = shortest.data() + mark + (shortest[mark + 1] == '+' ? 2 : 1);
  std::from_chars(digits, shortest.data() + shortest.size(), exponent);
  if (exponent < -4 || exponent >= 16) {
    out += shortest;
    return;
  }
  const auto fixed =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::fixed);
  const std::string_view text(buffer.data(), static_cast<size_t>(fixed.ptr - buffer.data()));
  out += text;
  if (text.find('.') == std::string_view::npos) out += ".0";
}

void write(std::string& out, const Json& value) {
  std::string_view separator;
  switch (value.kind()) {
    case Json::Kind::null: out += "null"; return;
    case Json::Kind::boolean: out += value.as_bool() ? "true" : "false"; return;
    case Json::Kind::integer: out += std::to_string(value.as_int()); return;
    case Json::Kind::number: write_number(out, value.as_double()); return;
    case Json::Kind::string: write_text(out, value.as_string()); return;
    case Json::Kind::array:
      out += '[';
      for (const Json& item : value.items()) {
        out += separator;
        write(out, item);
        separator = ", ";
      }
      out += ']';
      return;
    case Json::Kind::object:
      out += '{';
      for (const auto& [key, item] : value.members()) {
        out += separator;
        write_text(out, key);
        out += ": ";
        write(out, item);
        separator = ", ";
      }
      out += '}';
      return;
  }
}

}  // namespace

std::string python_json(const Json& value) {
  std::string out;
  write(out, value);
  return out;
}

}  // namespace orrery
