// Ranks that are threads of one process: tests, and runs on one machine without MPI. Host memory
// only.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "dist/world.h"

namespace orrery {

// The ranks of one run. When one of them fails, every collective of every group ends with an error
// that carries its message, so that no rank waits for one that is gone.
class ThreadWorld final : public World {
 public:
  explicit ThreadWorld(int size);
  ~ThreadWorld() override;
  int size() const override { return size_; }
  std::vector<int> local() const override;

  // May be asked for outside of run() as well.
  std::unique_ptr<Communicator> group(int rank, const std::vector<int>& ranks) override;
  // One thread per rank; a single rank stays on the caller's. A rank that returns while others
  // still count on it is a failure too.
  void run(const std::function<void(int rank)>& body) override;

 private:
  class Group;
  class Member;
  struct Shared;
  int size_;
  std::unique_ptr<Shared> shared_;
};

}  // namespace orrery
