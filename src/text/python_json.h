// JSON text as Python's json.dumps writes it by default: ", " and ": " between items, everything
// but ASCII escaped, floats as repr() prints them.
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"

namespace orrery {

// The canonical text of a prompt that is given as a JSON object.
std::string python_json(const Json& value);

}  // namespace orrery
