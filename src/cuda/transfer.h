// Copies between host memory and the device through pinned buffers, a few threads filling or
// emptying them while the copy engine runs. Straight from a mapped file: no other host copy exists.
#pragma once

#include <memory>

#include "cuda/context.h"

namespace orrery::cuda {

class Transfer {
 public:
  explicit Transfer(Context& context);
  ~Transfer();

  // Returns once `host` has been read; the device sees the bytes in stream order.
  void upload(void* device, const void* host, size_t bytes);
  // Returns once `host` holds the bytes.
  void download(void* host, const void* device, size_t bytes);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace orrery::cuda
