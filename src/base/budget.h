// What reading one untrusted input may cost. A parser says what it does as it goes, and refuses,
// with the place it has come to, when either account is used up.
#pragma once

#include <cstdint>

namespace orrery {

struct Budget {
  int64_t steps = 0;  // operations that are left: values of a document, statements of a template
  int64_t bytes = 0;  // memory that may still be made or gone through

  // False once more than there was has been spent.
  bool spend(int64_t more_steps, int64_t more_bytes) {
    steps -= more_steps;
    bytes -= more_bytes;
    return !exhausted();
  }
  bool exhausted() const { return steps < 0 || bytes < 0; }
};

}  // namespace orrery
