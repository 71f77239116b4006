// Tensors as the bytes of a safetensors file, for outputs that are opened elsewhere.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "io/safetensors.h"

namespace orrery {

// As write_safetensors(), in memory; messages begin with `name`.
std::vector<uint8_t> encode_safetensors(const std::vector<NamedTensor>& tensors,
                                        const std::map<std::string, std::string>& metadata,
                                        const std::string& name);

}  // namespace orrery
