// Linked into the device tests in place of the CPU backend: a GPU machine needs no oneDNN to run
// them.
#include "base/error.h"
#include "cpu/cpu_backend.h"

namespace orrery::cpu {

std::unique_ptr<Backend> make_cpu_backend(const CpuOptions&) {
  fail(ErrorKind::unsupported, "device cpu: the device tests are built without the CPU backend");
}

int default_threads() { return 1; }

}  // namespace orrery::cpu
