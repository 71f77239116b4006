// The CPU backend: own loops for the instruction sets of x86-64 (chosen at run time), OpenMP
// threads. Results do not depend on the number of threads.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"

namespace orrery::cpu {

struct CpuOptions {
  int num_threads = 0;  // 0: OMP_NUM_THREADS if set, else the cores this process may use
  std::string kernels;  // "generic", "avx2" or "avx512"; empty: the best this CPU runs
};

// Threads of a backend that is told nothing: OMP_NUM_THREADS, else the cores this process may use.
int default_threads();

std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options = {});

}  // namespace orrery::cpu
