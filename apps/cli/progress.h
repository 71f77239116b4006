// Progress on standard error: a bar on a terminal, plain lines elsewhere.
#pragma once

#include <string>

#include "orrery/result.h"

namespace orrery::cli {

class ProgressPrinter {
 public:
  explicit ProgressPrinter(bool quiet);
  ~ProgressPrinter();
  void operator()(const Progress& progress);
  // A line of its own, never in the middle of a bar.
  void line(const std::string& text);

 private:
  void clear();
  bool quiet_;
  bool terminal_;
  bool bar_shown_ = false;
  double last_line_ = 0;
};

}  // namespace orrery::cli
