#include "io/fault_list.h"

namespace orrery {

FaultList::Group& FaultList::group_of(const std::string& kind) {
  for (Group& group : groups_) {
    if (group.kind == kind) return group;
  }
  return groups_.emplace_back(Group{kind, 0, {}});
}

std::string FaultList::shorten(std::string fault) {
  if (fault.size() > kMaxLength) fault = fault.substr(0, kMaxLength) + "...";
  return fault;
}

int64_t FaultList::count() const {
  int64_t total = 0;
  for (const Group& group : groups_) total += group.count;
  return total;
}

int64_t FaultList::count(const std::string& kind) const {
  for (const Group& group : groups_) {
    if (group.kind == kind) return group.count;
  }
  return 0;
}

void FaultList::raise(ErrorKind kind, const std::string& origin) const {
  if (groups_.empty()) return;
  if (count() == 1) fail(kind, origin, ": ", groups_.front().faults.front());
  std::string text = concat(origin, ": ", count(), " faults");
  for (const Group& group : groups_) {
    text += concat("\n  ", group.kind, " (", group.count, "):");
    for (const std::string& fault : group.faults) text += "\n    " + fault;
    const int64_t more = group.count - static_cast<int64_t>(group.faults.size());
    if (more > 0) text += concat("\n    and ", more, " more");
  }
  throw Error(kind, text);
}

}  // namespace orrery
