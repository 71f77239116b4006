// Weights from files: checked against a network's list, then brought into the form in which a rank
// holds them.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "io/checkpoint.h"
#include "io/safetensors.h"
#include "model/weight_layout.h"
#include "model/weight_memory.h"

namespace orrery {

// What a listed tensor is made of in the files.
struct StoredAs {
  std::vector<TensorExpectation> parts;
  // The listed tensor, made from its parts; empty: the first part itself, in the listed shape.
  std::function<Tensor(const Safetensors& files)> make;
  // Of a matrix of 8-bit values: the parts with its scales, one or as many as rows, and with the
  // one scale of its input, which may be absent ("").
  std::string scales = {}, input_scale = {};
};
// How a kind of files stores the tensors of a list.
using Dialect =
    std::function<StoredAs(const Safetensors& files, const std::string& name, const Shape& shape)>;
// One stored tensor for each listed one, under its name or with a leading "model.".
StoredAs stored_as_listed(const Safetensors& files, const std::string& name, const Shape& shape);

struct LoadOptions {
  Dialect dialect = stored_as_listed;
  std::optional<HoldRule> hold;  // empty: as stored (the CPU reads the mapping in place)
  Shard shard;
  // Names in the files that no slot asks for and that are no fault.
  std::function<bool(std::string_view)> ignored;
  // A changed host copy of a stored tensor, same shape, its type or f32, or an empty Tensor to take
  // it as it is.
  std::function<Tensor(const std::string& name, const View& stored)> adapt;
  // The type of such a copy, empty where there is none. Without it a copy is held as the tensor is
  // stored.
  std::function<std::optional<DType>(const std::string& name, DType stored)> adapted_type;
  bool check_finite = true;  // of this rank's slices
};

// The rule that these files are held by: 8-bit matrices as they are stored, all else as the options
// say. It reads `files` when it is asked.
HoldRule hold_rule(const Safetensors& files, const LoadOptions& options);

// Names, shapes, types and, when asked, finite values of everything: one Error lists all faults.
// Returns what check_finite() does.
std::vector<std::string> check_weights(const Safetensors& files, const VisitFunction& visit,
                                       const LoadOptions& options);

// Fills the slots. The files have been checked.
WeightStore fill_weights(Backend& backend, Safetensors files, const VisitFunction& visit,
                         const LoadOptions& options);

// Both, for a network whose tensors come and go together.
WeightStore load_weights(Backend& backend, Safetensors files, const VisitFunction& visit,
                         const LoadOptions& options);

// As fill_weights(), into `block`; nothing else holds the weights. The block lies on this backend,
// or its `write` side in host memory, which is then filled by the calling thread.
void fill_block(Backend& backend, const Safetensors& files, const VisitFunction& visit,
                const LoadOptions& options, WeightBlock& block);

}  // namespace orrery
