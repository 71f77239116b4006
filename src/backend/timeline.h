// When queued work ran on a device.
#pragma once

#include <string>
#include <vector>

#include "base/work_observer.h"

namespace orrery {

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

}  // namespace orrery
