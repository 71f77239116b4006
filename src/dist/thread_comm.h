// Ranks that are threads of one process: tests, and runs on one machine without MPI. Host memory
// only.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "dist/world.h"

namespace orrery {

// The ranks of one run. When one of them fails, every collective of every group ends with an error
// that carries its message, so that no rank waits for one that is gone.
class ThreadWorld final : public World {
 public:
  // `part_rows` of the groups; by default nothing is sent in parts, since memory moves at once.
  explicit ThreadWorld(int size, int64_t part_rows = std::numeric_limits<int64_t>::max());
  ~ThreadWorld() override;
  int size() const override { return size_; }
  std::vector<int> local() const override;

  // May be asked for outside of run() as well.
  std::unique_ptr<Communicator> group(int rank, const std::vector<int>& ranks) override;
  // One thread per rank; the first stays on the caller's. A rank that returns while others still
  // count on it is a failure too.
  void run(const std::function<void(int rank)>& body,
           const std::function<void()>& on_failure = {}) override;

 private:
  class Group;
  class Member;
  struct Shared;
  int size_;
  std::unique_ptr<Shared> shared_;
};

}  // namespace orrery
