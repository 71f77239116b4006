// Where and when a measured line was made.
#pragma once

#include <string>

namespace orrery {

// What ORRERY_COMMIT says, or "unknown".
std::string measured_commit();

// Of the clock in UTC, as 2026-11-30.
std::string today();

}  // namespace orrery
