// What linear and the convolutions share. Their arithmetic is oneDNN's, their threads are ours: a
// result is cut into pieces whose sizes depend on the operation's shapes alone, and a piece is one
// call of oneDNN on one thread. So bytes do not depend on the number of threads, operands are
// widened in pieces that stay in the cache, and ranks of one process keep to their own threads.
#pragma once

#include <omp.h>

#include <atomic>
#include <vector>

#include "backend/backend.h"
#include "cpu/context.h"

namespace orrery::cpu {

// While one lives, oneDNN uses one thread in calls from this thread. (The pool's workers are set to
// one when they start.)
class OneThreadCalls {
 public:
  OneThreadCalls() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThreadCalls() { omp_set_num_threads(before_); }
  OneThreadCalls(const OneThreadCalls&) = delete;
  OneThreadCalls& operator=(const OneThreadCalls&) = delete;

 private:
  int before_;
};

// Statuses of calls inside a parallel loop, which must not throw; check() throws after it.
class Calls {
 public:
  void note(int status) {
    if (status != 0) status_.store(status, std::memory_order_relaxed);
  }
  void check(const char* operation) const;

 private:
  std::atomic<int> status_ = 0;
};

// Columns [first, first + n) of a row of results: bias, activation, residual, one rounding.
struct Finish {
  std::vector<float> bias;  // f32, all columns; or empty
  Act act = Act::none;
  void row(const Kernels& kernels, const MutView& out, int64_t out_element, const View& residual,
           int64_t residual_element, const float* c, int64_t first, int64_t n) const;
};

// The elements of a bias [N] in f32; none for an empty view.
std::vector<float> bias_row(const Kernels& kernels, const View& bias);

// The size of equal pieces of n, at most `most` each.
inline int64_t equal_pieces(int64_t n, int64_t most) {
  return n == 0 ? 1 : ceil_div(n, ceil_div(n, most));
}

}  // namespace orrery::cpu
