// The CPU backend: products and convolutions by oneDNN, attention and the rest by own loops for the
// instruction sets of x86-64 (chosen at run time), on threads of its own (base/thread_pool.h).
// Results do not depend on the number of threads. A row of linear may depend on the number of rows
// beside it, in rounding.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"

namespace orrery::cpu {

struct CpuOptions {
  int num_threads = 0;  // 0: default_threads()
  // Our own loops: "generic", "avx2" or "avx512"; empty: the best this CPU runs. oneDNN chooses for
  // itself.
  std::string kernels = {};
  // "onednn" (also when empty), or "reference": slower, but a row's bytes depend on that row and
  // the weights alone, so that any cut of the rows gives the same.
  std::string linear = {};
};

// Threads of a backend that is told nothing: the least of OMP_NUM_THREADS, the cores this process
// may run on and its CPU quota.
int default_threads();

std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options = {});

}  // namespace orrery::cpu
