// The caller's wish to stop, looked at by every rank of a request.
#pragma once

#include <functional>
#include <stop_token>
#include <string>
#include <utility>

#include "dist/communicator.h"

namespace orrery {

class StopWish {
 public:
  // `ranks`: a group of host memory of all ranks that share the request; null for one.
  StopWish(std::stop_token token, Communicator* ranks) : token_(std::move(token)), ranks_(ranks) {}

  // Whether to stop here. Every rank asks at the same places and all get the same answer: yes, when
  // any of them is asked to stop.
  bool together() const;
  // Whether to stop at a place that ranks reach at different times, or not all of them: an answer
  // of one rank alone. Among several ranks always no, since the others would wait for this one.
  bool alone() const { return ranks_ == nullptr && token_.stop_requested(); }
  // What this rank was asked, whatever the others do.
  bool requested() const { return token_.stop_requested(); }

 private:
  std::stop_token token_;
  Communicator* ranks_;
};

}  // namespace orrery
