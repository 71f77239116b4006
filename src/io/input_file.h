// Whole files in memory, of a size that is known or bounded first.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace orrery {

// The bytes of a regular file or a pipe, at most `most`. Refuses folders, devices and sockets,
// which may have no end; messages say that the file is no `what` ("a picture").
std::vector<uint8_t> read_input(const std::filesystem::path& file, int64_t most, const char* what);

// Refuses what is no regular file.
void require_regular(const std::filesystem::path& file, const char* what);

}  // namespace orrery
