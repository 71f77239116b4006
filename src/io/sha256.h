// SHA-256 of a file, as sha256sum prints it.
#pragma once

#include <filesystem>
#include <string>

namespace orrery {

// Throws Error{not_found} when the file cannot be opened.
std::string sha256_of_file(const std::filesystem::path& file);

}  // namespace orrery
