// UTF-8 without tables: decode, encode, replace what is invalid.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace orrery {

// U+FFFD for each maximal invalid part, as Python's errors="replace" and Rust's lossy conversion
// do: a truncated sequence counts once, a byte that can begin none counts by itself.
std::string valid_utf8(std::string_view bytes);

// The code point at `position`, which moves behind it. `text` must be valid UTF-8.
char32_t next_code_point(std::string_view text, size_t& position);
void append_utf8(std::string& out, char32_t code_point);
size_t count_code_points(std::string_view text);

// What Python's str.isspace() says of one code point; wider than Unicode White_Space by
// U+001C..001F.
bool is_python_space(char32_t code_point);
// Python's str.strip(), lstrip() and rstrip() without arguments; `text` must be valid UTF-8.
std::string_view strip_front(std::string_view text);
std::string_view strip_back(std::string_view text);

}  // namespace orrery
