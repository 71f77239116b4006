// Threads that wait between short pieces of parallel work without keeping a core from others.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace orrery {

// One caller at a time hands out loops; the caller computes too. A worker joins a loop when it gets
// to run and is waited for only from then on: a worker whose core is taken by another process costs
// its share of the work and no more. Waiting spins for some microseconds, then sleeps.
class ThreadPool {
 public:
  // `threads` counts the caller. Threads that the system refuses are done without: size() says how
  // many there are. `on_start` runs in each worker first.
  explicit ThreadPool(int threads, const std::function<void()>& on_start = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // body(i, thread) for each i in [0, count), in any order, on at most `threads` threads. `thread`
  // is below min(threads, size()) and belongs to one thread during the call; the caller's is 0.
  // `body` must neither throw nor call run() of the same pool.
  template <typename Body>
  void run(int64_t count, int threads, const Body& body) {
    const auto call = [](const void* object, int64_t i, int thread) {
      (*static_cast<const Body*>(object))(i, thread);
    };
    run({call, &body, count}, threads);
  }

 private:
  struct Loop {
    void (*call)(const void* body, int64_t i, int thread) = nullptr;
    const void* body = nullptr;
    int64_t count = 0;
  };
  void run(const Loop& loop, int threads);
  void work(int thread);
  void wait_and_work();

  Loop loop_;                        // valid for those who hold a place
  std::atomic<int64_t> next_ = 0;    // index to compute
  std::atomic<int> places_ = 0;      // that workers may still take in this loop; 0 between loops
  std::atomic<int> left_ = 0;        // workers that took a place and are done
  std::atomic<uint32_t> epoch_ = 0;  // one more with each loop and at the end
  std::atomic<bool> ended_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace orrery
