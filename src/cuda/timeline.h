// When queued work ran on the device, by events around it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/work_observer.h"

namespace orrery::cuda {

class Timeline : public WorkObserver {
 public:
  struct Span {
    std::string lane;  // "compute" or "link" (transfers between devices)
    std::string name;
    double begin_ms = 0, end_ms = 0;  // since the timeline was made
  };
  // Of everything observed so far, in the order it was queued. Waits for the device.
  virtual std::vector<Span> spans() = 0;
};

// For the work of a backend made by make_cuda_backend() and of its communicators; on its thread.
std::unique_ptr<Timeline> make_timeline(const Backend& backend);

}  // namespace orrery::cuda
