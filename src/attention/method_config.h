// METHOD of a strategy document: a dense provider's name, or a block-sparse method with its
// selection.
#pragma once

#include <memory>

#include "attention/method.h"
#include "base/json.h"

namespace orrery {

// Throws Error{invalid_argument} naming the place.
std::unique_ptr<AttentionMethod> parse_method(const Json& method);

}  // namespace orrery
