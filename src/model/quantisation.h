// Checkpoints whose projections are stored in 8 bits: what their configuration says, and how their
// files spell it. ModelOpt's unified format (W8A8, e4m3, one scale a matrix and one of its input)
// with the keys that other writers add, and compressed-tensors' "float-quantized" (a scale a row,
// inputs scaled row by row or once).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "model/weights.h"

namespace orrery {

// Which steps of a request are computed natively
// (quantization_config.runtime.diffusion_step_policy, schema 1, "first_last_n"). Without one: all
// steps, both towers.
struct StepPolicy {
  Precision standard = Precision::native;
  int64_t first = 0, last = 0;  // steps at either end
  Precision at_first = Precision::a16, at_last = Precision::a16, at_both = Precision::a16;
  Precision text = Precision::native;  // "reasoner": the text tower

  // A request of one step has no ends.
  Precision at(int64_t step, int64_t num_steps) const;
  // Throws Error{unsupported} that names a key which is unknown, missing or not understood.
  static StepPolicy from_json(const Json& policy);
};

struct Quantisation {
  std::string method;  // "modelopt FP8", "compressed-tensors float-quantized"; empty: none
  StepPolicy policy;
  bool has_input_scales = false;    // else inputs are scaled row by row
  std::vector<std::string> ignore;  // patterns of modules that are not quantised

  // From a transformer's config.json. Throws Error{unsupported} that names a method, an algorithm
  // or a format that this program does not know.
  static Quantisation from_json(const Json& transformer_config);

  // How these files store a network's tensors; 8-bit ones are known by their stored type.
  Dialect dialect() const;
  // How they would be held, by the configuration alone; what is not quantised as `other` says.
  HoldRule hold_rule(const HoldRule& other) const;
  // What writers add beside the tensors, which nobody reads.
  static bool is_unused(std::string_view name);
};

}  // namespace orrery
