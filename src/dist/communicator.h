// Collectives within one group of ranks. A group of one does nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tensor/view.h"

namespace orrery {

// All ranks of a group make the same calls in the same order. Tensors are contiguous and live on
// the device the group was made for.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // x = sum over ranks of x, in a fixed order (the same bytes on every rank). f32 or bf16.
  virtual void all_reduce(MutView x) = 0;
  // Block i of `x` (first dimension cut in size() equal parts) goes to rank i; block j of out came
  // from rank j. Equal shapes.
  virtual void all_to_all(MutView out, View x) = 0;
  // out [size(), ...x.shape], rank order. x may be this rank's own block of out.
  virtual void all_gather(MutView out, View x) = 0;
  virtual void broadcast(MutView x, int root) = 0;
  virtual void barrier() = 0;
  // Ends every collective that a rank of this process waits in, from any thread: called when
  // another rank has failed. Communicators that notice by themselves need not do anything.
  virtual void abort() {}
};

// The group of one.
std::unique_ptr<Communicator> solo();

}  // namespace orrery
