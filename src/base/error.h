// The two ways to refuse: fail(...) and require(condition, ...). Arguments are streamed into the
// message. Always on; meant for contracts that an input can break, at the grain of an operation.
#pragma once

#include <sstream>
#include <string>

#include "orrery/error.h"

namespace orrery {

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <typename... Parts>
[[noreturn]] void fail(ErrorKind kind, const Parts&... parts) {
  throw Error(kind, concat(parts...));
}

// Refuses with ErrorKind::invalid_argument unless `condition` holds.
template <typename... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) [[unlikely]]
    fail(ErrorKind::invalid_argument, parts...);
}

template <typename... Parts>
void require(bool condition, ErrorKind kind, const Parts&... parts) {
  if (!condition) [[unlikely]]
    fail(kind, parts...);
}

}  // namespace orrery
