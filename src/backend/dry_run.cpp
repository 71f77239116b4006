#include "backend/dry_run.h"

#include <algorithm>

namespace orrery {

Buffer DryRunBackend::allocate(size_t bytes) {
  allocated_ += bytes;
  peak_ = std::max(peak_, allocated_);
  void* address = reinterpret_cast<void*>(next_);
  next_ += (bytes + 4095) / 4096 * 4096;
  return Buffer(
      address, bytes, device_,
      [](void* self, void*, size_t size) { static_cast<DryRunBackend*>(self)->allocated_ -= size; },
      this);
}

}  // namespace orrery
