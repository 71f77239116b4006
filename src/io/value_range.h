// What the values of a stored tensor are, looked at once: whether all are finite, and whether one
// is so large that a damaged bit explains it better than training does.
#pragma once

#include <optional>
#include <string>

#include "tensor/view.h"

namespace orrery {

struct ValueRange {
  static constexpr double kMostOverTypical = 1e4;

  std::optional<std::string> fault;  // "NaN at [3, 17]": the first value that is not finite
  double typical = 0;  // root mean square of most values: a few large ones do not move it
  double largest = 0;  // magnitude
  Shape at;            // its place

  bool is_likely() const { return typical == 0 || largest <= kMostOverTypical * typical; }
  // "5e+36 at [3, 17], 2e+38 times what is usual in it"
  std::string unlikely() const;
};

// `view` is in host memory and contiguous, of any alignment. Integers are finite and likely.
ValueRange value_range(const View& view);
// ValueRange::fault alone.
std::optional<std::string> first_non_finite(const View& view);

}  // namespace orrery
