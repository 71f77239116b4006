#include "cpu/kernels.h"

#include <array>

#include "base/error.h"

namespace orrery::cpu {

bool runs(const Kernels& kernels) {
#if defined(__x86_64__)
  if (&kernels == &avx512_kernels()) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512cd") && runs(avx2_kernels());
  }
  if (&kernels == &avx2_kernels()) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  }
#endif
  return &kernels == &generic_kernels();
}

const Kernels& choose_kernels(std::string_view name) {
  const std::array tables{&avx512_kernels(), &avx2_kernels(), &generic_kernels()};
  std::string usable;
  for (const Kernels* kernels : tables) {
    if (!runs(*kernels)) continue;
    if (name.empty() || name == kernels->name) return *kernels;
    usable += usable.empty() ? "" : ", ";
    usable += kernels->name;
  }
  fail(ErrorKind::invalid_argument, "cpu kernels: \"", name,
       "\" is not one of those this CPU runs (", usable, ")");
}

}  // namespace orrery::cpu
