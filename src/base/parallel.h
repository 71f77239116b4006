// Independent pieces of work on several threads of the host.
#pragma once

#include <cstdint>
#include <functional>

namespace orrery {

// Calls body(i) for every i in [0, count), in any order, on as many threads as the machine has
// cores but at most `max_threads`. When calls throw, the others still run and the error of the
// lowest i is thrown.
void parallel_for(int64_t count, const std::function<void(int64_t i)>& body, int max_threads = 8);

}  // namespace orrery
