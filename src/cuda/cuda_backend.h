// The CUDA backend. Without CUDA in the build, make_cuda_backend() refuses with a sentence.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "backend/timeline.h"

namespace orrery::cuda {

struct CudaOptions {
  int device = 0;
};

struct DeviceMemory {
  size_t free = 0;
  size_t total = 0;
};

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options = {});
bool is_cuda_built();

// Bytes of one device. Refuses as make_cuda_backend() does.
DeviceMemory device_memory(int device = 0);

// Where a backend made by make_cuda_backend() runs: for a communicator whose calls must keep their
// order with the backend's. Streams are cudaStream_t.
struct Place {
  int device = 0;
  void* stream = nullptr;  // all of the backend's work
  void* link = nullptr;    // transfers between devices, beside it
};
Place place_of(const Backend& backend);

// For the work of a backend made by make_cuda_backend() and of its communicators; on its thread.
std::unique_ptr<Timeline> make_timeline(const Backend& backend);

}  // namespace orrery::cuda
