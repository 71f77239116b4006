// Which layouts of a strategy have been exercised at the shapes of a request, and which are
// pending.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "attention/strategy.h"

namespace orrery {

// The strategy must outlive this. Not thread-safe.
class WarmUp {
 public:
  // `roles`: those the coming request reaches.
  WarmUp(const AttentionStrategy& strategy, const std::vector<AttentionRole>& roles);

  // Runs `body`, which must evaluate the model once with the target's layout, and marks the target
  // exercised. When `body` throws the target stays pending with the message, and the error goes on.
  void exercise(const WarmUpTarget& target, const std::function<void()>& body);

  struct Entry {
    WarmUpTarget target;
    bool exercised = false;
    std::string failure;  // of the last attempt; empty when there was none or it went well
  };
  const std::vector<Entry>& entries() const { return entries_; }
  std::vector<WarmUpTarget> pending() const;
  bool is_complete() const { return pending().empty(); }
  // "2 of 3 layouts exercised; pending: mixed cosmos3.gen (arena: ...)".
  std::string summary() const;

 private:
  const AttentionStrategy& strategy_;
  std::vector<Entry> entries_;
};

}  // namespace orrery
