// The text that a picture or video file carries under a key.
#pragma once

#include <filesystem>
#include <string>

namespace orrery {

// Of PNG text chunks, JPEG comments "key: value" (as write_image() makes them) or the tags of a
// video container; empty when there is none. Throws Error{not_found} or Error{corrupt}.
std::string read_embedded_text(const std::filesystem::path& file, const std::string& key);

}  // namespace orrery
