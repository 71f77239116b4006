// Ranks that are threads of one process: tests, and runs on one machine without MPI. Host memory
// only.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "dist/communicator.h"

namespace orrery {

// The ranks of one run. When one of them fails, every collective of every group ends with an error
// that carries its message, so that no rank waits for one that is gone.
class ThreadWorld {
 public:
  explicit ThreadWorld(int size);
  ~ThreadWorld();
  int size() const { return size_; }

  // The group of `ranks` (distinct, `rank` among them) as rank `rank` sees it. Every member must
  // ask for the same list. The communicator must not outlive the world.
  std::unique_ptr<Communicator> group(int rank, const std::vector<int>& ranks);
  // Runs body(rank) on one thread per rank, once, and returns when all have ended. The first
  // failure is thrown again here as it was. A rank that returns while others still count on it is a
  // failure too.
  void run(const std::function<void(int rank)>& body);

 private:
  class Group;
  class Member;
  struct Shared;
  int size_;
  std::unique_ptr<Shared> shared_;
};

}  // namespace orrery
