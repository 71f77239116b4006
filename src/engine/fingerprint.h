// What tells one request from another.
#pragma once

#include <cstdint>
#include <string>

#include "engine/settings.h"
#include "orrery/engine.h"

namespace orrery {

// FNV-1a: a few flipped bits change it.
uint64_t digest(const void* data, size_t bytes);

// Equal on ranks that were started with the same request.
std::string fingerprint(const Request& request, const Settings& settings,
                        const EngineOptions& options);

}  // namespace orrery
