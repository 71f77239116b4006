// What tells one request from another.
#pragma once

#include <string>

#include "engine/settings.h"
#include "orrery/engine.h"

namespace orrery {

// Equal on ranks that were started with the same request.
std::string fingerprint(const Request& request, const Settings& settings,
                        const EngineOptions& options);

}  // namespace orrery
