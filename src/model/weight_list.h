// A model's tensors, listed once. Each network has one function visit(weights, config, visitor)
// that names every tensor with its slot and shape; checking, loading, sharding, sizing and random
// initialisation are visitors over that list.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "model/linear.h"

namespace orrery {

// How tensor parallelism cuts a tensor: by output rows, by input columns, or not at all.
enum class Split : uint8_t { none, rows, columns };

class WeightVisitor {
 public:
  virtual ~WeightVisitor() = default;
  // One tensor of the checkpoint; `slot` is its place in the weights struct.
  virtual void tensor(View& slot, const std::string& name, Shape shape,
                      Split split = Split::none) = 0;
  // A matrix of which a call takes a few rows (Backend::gather_rows): it need not leave host
  // memory.
  virtual void table(View& slot, const std::string& name, Shape shape) {
    tensor(slot, name, shape);
  }
  // Matrices [out[i], in] named prefixes[i] + ".weight" (and ".bias" [out[i]] when has_bias), all
  // split the same way. A bias is cut with Split::rows and whole with Split::columns.
  virtual void linear(Linear& slot, const std::vector<std::string>& prefixes,
                      const std::vector<int64_t>& out, int64_t in, Split split, bool has_bias) = 0;
};

using VisitFunction = std::function<void(WeightVisitor&)>;

struct ListedTensor {
  std::string name;
  Shape shape;
};
std::vector<ListedTensor> list_tensors(const VisitFunction& visit);

}  // namespace orrery
