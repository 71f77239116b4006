// Faults found while a checkpoint is checked, to be told together in one message.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"

namespace orrery {

class FaultList {
 public:
  // Of each kind ("missing", "shape", ...) the first kShown are written out and the rest counted.
  static constexpr int64_t kShown = 20;
  static constexpr size_t kMaxLength = 400;  // of one fault: names come from the files

  // `parts` make a clause that stands alone: "layers.0.norm.weight [64] is missing".
  template <typename... Parts>
  void add(const std::string& kind, const Parts&... parts) {
    Group& group = group_of(kind);
    if (group.count++ < kShown) group.faults.push_back(shorten(concat(parts...)));
  }

  int64_t count() const;
  int64_t count(const std::string& kind) const;
  // Throws what was found under the name `origin`; returns when nothing was.
  void raise(ErrorKind kind, const std::string& origin) const;

 private:
  struct Group {
    std::string kind;
    int64_t count = 0;
    std::vector<std::string> faults;
  };
  Group& group_of(const std::string& kind);
  static std::string shorten(std::string fault);

  std::vector<Group> groups_;
};

}  // namespace orrery
