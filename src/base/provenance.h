// Where and when a measured line was made.
#pragma once

#include <string>

namespace orrery {

// What the environment's ORRERY_COMMIT says, else the commit of this build, or "unknown".
std::string measured_commit();

// Of the clock in UTC, as 2026-11-30.
std::string today();

}  // namespace orrery
