#include "base/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

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
    const auto cores = static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency()));
    std::vector<std::jthread> threads;
    for (int64_t i = 1; i < std::min({count, cores, int64_t{max_threads}}); ++i)
      threads.emplace_back(work);
    work();
  }
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace orrery
