// Sound as the bytes of a WAV file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace orrery {

// Planar float samples [channels][samples], clamped to [-1, 1], as 16-bit PCM. Refuses NaN,
// channels of different lengths and more than 4 GiB; messages begin with `name`.
std::string encode_wav(const std::vector<std::vector<float>>& channels, int64_t sampling_rate,
                       const std::string& name);

}  // namespace orrery
