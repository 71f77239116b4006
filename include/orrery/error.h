// The one exception type of Orrery and its kinds.
#pragma once

#include <stdexcept>
#include <string>

#include "orrery/export.h"

namespace ORRERY_API orrery {

enum class ErrorKind {
  invalid_argument,  // the request or a flag is wrong: the user can mend it
  not_found,         // a file or folder is missing
  corrupt,           // a file is damaged or contradicts itself
  unsupported,       // well-formed, but this build or model cannot do it
  out_of_memory,     // a budget does not hold what was asked for
  device,            // an accelerator or a library call failed
  numeric,           // NaN or Inf where a finite number is needed
  cancelled,         // the caller asked to stop
  blocked,           // the guardrail refused the prompt or the frames
  guardrail,         // the guardrail gave no verdict, which is no approval
};

// Thrown by every layer. The message is a sentence that names the input, the limit and, where it
// is known, the remedy.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace orrery
