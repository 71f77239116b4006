// Unicode normal form C.
#pragma once

#include <string>
#include <string_view>

namespace orrery {

// `text` must be valid UTF-8. Linear but for runs of combining marks, which are sorted.
std::string nfc(std::string_view text);

}  // namespace orrery
