// Linked instead of the CUDA backend when the build has no CUDA.
#include "base/error.h"
#include "cuda/cuda_backend.h"

namespace orrery::cuda {

namespace {
[[noreturn]] void refuse() {
  fail(ErrorKind::unsupported,
       "device cuda: this build of orrery has no CUDA; configure it with `cmake --preset cuda`, or "
       "use --device cpu");
}
}  // namespace

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions&) { refuse(); }

bool is_cuda_built() { return false; }

DeviceMemory device_memory(int) { refuse(); }

Place place_of(const Backend&) { refuse(); }

std::unique_ptr<Timeline> make_timeline(const Backend&) { refuse(); }

}  // namespace orrery::cuda
