#include "attention/warm_up.h"

#include <algorithm>
#include <exception>

#include "base/error.h"

namespace orrery {

WarmUp::WarmUp(const AttentionStrategy& strategy, const std::vector<AttentionRole>& roles)
    : strategy_(strategy) {
  for (const WarmUpTarget& target : strategy.warm_up_targets(roles)) {
    entries_.push_back({target, false, {}});
  }
}

void WarmUp::exercise(const WarmUpTarget& target, const std::function<void()>& body) {
  const auto entry = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& e) { return e.target == target; });
  require(entry != entries_.end(), "warm-up: layout ", target.layout, " at ", name_of(target.role),
          " is not among the targets of this request");
  entry->exercised = false;
  try {
    body();
  } catch (const std::exception& error) {
    entry->failure = error.what();
    throw;
  }
  entry->failure.clear();
  entry->exercised = true;
}

std::vector<WarmUpTarget> WarmUp::pending() const {
  std::vector<WarmUpTarget> targets;
  for (const Entry& entry : entries_) {
    if (!entry.exercised) targets.push_back(entry.target);
  }
  return targets;
}

std::string WarmUp::summary() const {
  const auto done = std::count_if(entries_.begin(), entries_.end(),
                                  [](const Entry& entry) { return entry.exercised; });
  std::string text = concat(done, " of ", entries_.size(), " layouts exercised");
  const char* separator = "; pending: ";
  for (const Entry& entry : entries_) {
    if (entry.exercised) continue;
    text += concat(separator, strategy_.layout_name(entry.target.layout), " ",
                   name_of(entry.target.role));
    if (!entry.failure.empty()) text += " (" + entry.failure + ")";
    separator = ", ";
  }
  return text;
}

}  // namespace orrery
