#include "base/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#include "base/cores.h"

namespace orrery {

void parallel_for(int64_t count, const std::function<void(int64_t i)>& body, int max_threads) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(count));
  std::atomic<int64_t> next = 0;
  const auto work = [&] {
    for (int64_t i = next++; i < count; i = next++) {
      try {
        body(i);
      } catch (...) {
        errors[static_cast<size_t>(i)] = std::current_exception();
      }
    }
  };
  {
    std::vector<std::jthread> threads;
    const int64_t wanted = std::min({count, int64_t{usable_cores()}, int64_t{max_threads}});
    try {
      for (int64_t i = 1; i < wanted; ++i) threads.emplace_back(work);
    } catch (const std::system_error&) {
      // A limit on processes: the threads that started do the work.
    }
    work();
  }
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace orrery
