// Is told where work that goes to a device begins and ends, in the order in which it is queued: the
// seam for timelines.
#pragma once

#include <string_view>

namespace orrery {

class WorkObserver {
 public:
  virtual ~WorkObserver() = default;
  // `lane` is the queue that the work goes to (a stream of the device); work of one lane runs in
  // order.
  virtual void begin(std::string_view name, void* lane) = 0;
  virtual void end(void* lane) = 0;
};

}  // namespace orrery
