// The CPU backend: products and convolutions by oneDNN, attention and the rest by own loops for the
// instruction sets of x86-64 (chosen at run time), OpenMP threads. Results do not depend on the
// number of threads. A row of linear may depend on the number of rows beside it, in rounding.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"

namespace orrery::cpu {

struct CpuOptions {
  int num_threads = 0;  // 0: OMP_NUM_THREADS if set, else the cores this process may use
  // Our own loops: "generic", "avx2" or "avx512"; empty: the best this CPU runs. oneDNN chooses for
  // itself.
  std::string kernels = {};
  // "onednn" (also when empty), or "reference": slower, but a row's bytes depend on that row and
  // the weights alone, so that any cut of the rows gives the same.
  std::string linear = {};
};

// Threads of a backend that is told nothing: OMP_NUM_THREADS, else the cores this process may use.
int default_threads();

std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options = {});

}  // namespace orrery::cpu
