// Ranks that each own a CUDA device, exchanging device memory through NCCL. Without NCCL in the
// build, make_nccl_communicator() refuses with a sentence.
#pragma once

#include <cstdint>
#include <memory>

#include "dist/communicator.h"

namespace orrery {

bool is_nccl_built();

// One rank's device and the streams (cudaStream_t) of its backend.
struct NcclDevice {
  int device = 0;
  void* compute = nullptr;  // the backend's work
  void* link = nullptr;     // transfers between devices, for all groups of the rank
  int64_t part_rows = 4096;
};

// The same group as `host`, for memory of the device. `host` (threads or MPI) carries the group's
// id once, and keeps the threads of one process in step. Collectives run on `link`, behind what
// `compute` was given before and, unless started with start_*(), in front of what it is given
// after; calls return before they are done. Collective; every rank names another device.
//
// When a connection breaks or abort() is called, kernels that wait for other ranks end and the next
// call throws.
std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator> host,
                                                     const NcclDevice& device);

}  // namespace orrery
