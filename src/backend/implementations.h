// Who computes an operation: a list of implementations, best first. A call is offered to each in
// turn; the first that takes it has run it, and the reasons of those before it are kept.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/calls.h"
#include "base/error.h"

namespace orrery {

// What an implementation answers. One that declines has not touched the outputs.
struct Answer {
  bool ran = true;
  std::string note = {};  // why it declined, or Ran::note
};
inline Answer decline(std::string why) { return {false, std::move(why)}; }

template <typename Call>
struct Implementation {
  std::string name;
  std::function<Answer(const Call&)> run;
};

template <typename Call>
class Implementations {
 public:
  Implementations(std::string op, std::vector<Implementation<Call>> best_first)
      : op_(std::move(op)), list_(std::move(best_first)) {}

  // `wanted`: the one that must run it, or empty. Throws Error{unsupported} with all reasons when
  // nobody takes the call.
  Ran run(const Call& call, std::string_view wanted = {}) const {
    Ran ran;
    for (const Implementation<Call>& one : list_) {
      if (!wanted.empty() && wanted != one.name) continue;
      Answer answer = one.run(call);
      if (answer.ran) {
        ran.name = one.name;
        ran.note = std::move(answer.note);
        return ran;
      }
      ran.declined += (ran.declined.empty() ? "" : "; ") + one.name + ": " + answer.note;
    }
    fail(ErrorKind::unsupported, op_, ": ",
         wanted.empty() ? "no implementation can run " : concat(wanted, " cannot run "),
         describe(call), " (", ran.declined.empty() ? "this backend has " + names() : ran.declined,
         ")");
  }

  bool has(std::string_view name) const {
    return std::any_of(list_.begin(), list_.end(),
                       [&](const auto& one) { return one.name == name; });
  }
  std::string names() const {  // "native, reference"
    std::string all;
    for (const Implementation<Call>& one : list_) all += (all.empty() ? "" : ", ") + one.name;
    return all;
  }

 private:
  std::string op_;
  std::vector<Implementation<Call>> list_;
};

}  // namespace orrery
