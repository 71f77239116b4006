// How many threads can run at once in this process.
#pragma once

namespace orrery {

// The least of the cores the process may run on (affinity) and its control groups' CPU quota,
// rounded up; at least 1. Reads the system at each call.
int usable_cores();

}  // namespace orrery
