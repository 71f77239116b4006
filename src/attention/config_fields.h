// Reading the members of a strategy document. Each refusal names the place, what was found and what
// would do.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/json.h"

namespace orrery {

// "`value` found", shortened to a line's worth.
std::string shown(const Json& value);

template <typename... Parts>
[[noreturn]] void refuse(const Json& value, const Parts&... parts) {
  fail(ErrorKind::invalid_argument, value.where(), ": ", parts..., ", found ", shown(value));
}

// An object all of whose keys are among `keys`.
void expect_object(const Json& value, std::string_view what,
                   std::initializer_list<std::string_view> keys);
// A text that is not empty.
const std::string& expect_name(const Json& value, std::string_view what);
// An integer (not true, not 1.0) within [low, high].
int64_t expect_integer(const Json& value, std::string_view what, int64_t low, int64_t high);
// A finite number, not a boolean.
double expect_number(const Json& value, std::string_view what);
// The member, or a refusal that names the missing key.
const Json& expect_member(const Json& object, std::string_view key);

}  // namespace orrery
