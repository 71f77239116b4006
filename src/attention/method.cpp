#include "attention/method.h"

#include "base/error.h"

namespace orrery {

std::string BlockSparseOptions::describe(const std::string& method,
                                         const std::string& detail) const {
  std::string text = concat(method, " ", block_q, "x", block_k, ", ", detail);
  if (reuse_steps > 1) text += concat(", selection reused for ", reuse_steps, " steps");
  return text + " (" + kernel.provider + ")";
}

}  // namespace orrery
