#include "base/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <system_error>

namespace orrery {
namespace {

// A wake-up costs some 5 us. Longer spinning gains little on an idle machine and takes the time of
// neighbours on a busy one (docs/performance.md, "Busy neighbours").
constexpr std::chrono::microseconds kSpin{20};

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Until `value` differs from `old`.
template <typename T>
void wait_while(const std::atomic<T>& value, T old) {
  constexpr int kChecksBetweenClocks = 16;
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kChecksBetweenClocks; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int threads, const std::function<void()>& on_start) {
  try {
    for (int i = 1; i < threads; ++i) {
      workers_.emplace_back([this, on_start] {
        if (on_start) on_start();
        wait_and_work();
      });
    }
  } catch (const std::system_error&) {
    // A limit on processes: the threads that started do the work.
  }
}

ThreadPool::~ThreadPool() {
  ended_.store(true, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::work(int thread) {
  const Loop loop = loop_;
  for (;;) {
    const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    if (i >= loop.count) return;
    loop.call(loop.body, i, thread);
  }
}

void ThreadPool::wait_and_work() {
  uint32_t seen = 0;
  for (;;) {
    wait_while(epoch_, seen);
    seen = epoch_.load(std::memory_order_acquire);
    if (ended_.load(std::memory_order_relaxed)) return;
    int place = places_.load(std::memory_order_acquire);
    while (place > 0 &&
           !places_.compare_exchange_weak(place, place - 1, std::memory_order_acquire)) {
    }
    if (place <= 0) continue;
    work(place);
    left_.fetch_add(1, std::memory_order_release);
    left_.notify_one();
  }
}

void ThreadPool::run(const Loop& loop, int threads) {
  const int helpers = static_cast<int>(
      std::min<int64_t>({threads - int64_t{1}, loop.count - 1, std::ssize(workers_)}));
  if (helpers <= 0) {
    for (int64_t i = 0; i < loop.count; ++i) loop.call(loop.body, i, 0);
    return;
  }
  loop_ = loop;
  next_.store(0, std::memory_order_relaxed);
  left_.store(0, std::memory_order_relaxed);
  places_.store(helpers, std::memory_order_release);
  epoch_.fetch_add(1, std::memory_order_release);
  if (helpers == std::ssize(workers_)) {
    epoch_.notify_all();
  } else {
    for (int i = 0; i < helpers; ++i) epoch_.notify_one();
  }
  work(0);
  const int joined = helpers - places_.exchange(0, std::memory_order_acq_rel);
  for (int left = left_.load(std::memory_order_acquire); left < joined;
       left = left_.load(std::memory_order_acquire)) {
    wait_while(left_, left);
  }
}

}  // namespace orrery
