// Ranks that each own a CUDA device, exchanging device memory through NCCL. Without NCCL in the
// build, make_nccl_communicator() refuses with a sentence.
#pragma once

#include <memory>

#include "dist/communicator.h"

namespace orrery {

bool is_nccl_built();

// The same group as `host`, for memory of CUDA device `device`: `host` (threads or MPI) carries the
// group's id, once. Calls go to `stream` (a cudaStream_t, the backend's own), so they keep their
// order with the backend's work and return before they are done. Collective; every rank names
// another device.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, void* stream, int device);

}  // namespace orrery
