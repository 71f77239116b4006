// Text of unknown origin on a terminal.
#pragma once

#include <string>
#include <string_view>

namespace orrery::cli {

// The text with control characters and bytes that are not UTF-8 as \xNN: names in files must not
// move the cursor or colour the screen. Line breaks stay. Words and texts that are too long to read
// are shortened, with a count of what was left out.
std::string printable(std::string_view text);

}  // namespace orrery::cli
