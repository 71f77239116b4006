// Sound as a WAV file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace orrery {

// Planar float samples [channels][samples], clamped to [-1, 1], as 16-bit PCM. Refuses NaN,
// channels of different lengths and more than 4 GiB.
void write_wav(const std::filesystem::path& file, const std::vector<std::vector<float>>& channels,
               int64_t sampling_rate);

}  // namespace orrery
