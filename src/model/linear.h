// A projection of a network: its matrices and how they are applied.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "tensor/operand.h"

namespace orrery {

class Communicator;

// How a projection of 8-bit weights is computed; others know no difference.
enum class Precision : uint8_t {
  native,  // its input rounded to the same 8 bits
  a16,     // its weights widened, its input as it is
};

// One or several weight matrices that are applied to the same input and whose outputs lie side by
// side: [N_i, K] each. A backend that fuses weights holds them as one.
struct Linear {
  std::vector<Operand> weights;
  std::vector<View> biases;  // empty, or one per weight
  // f32 [1]: the scale of 8-bit inputs. Empty: each row of an input has its own.
  View input_scale;
  // Set when the input dimension was cut (Split::columns): the output is summed over this group.
  Communicator* reduce = nullptr;
  int64_t out_features() const;
  int64_t in_features() const;
};

// out = activation(x . w^T + b) + residual. `out` spans the parts side by side; `residual` may be
// `out` itself. With `reduce`, bias and residual are added once, to the first rank's part of the
// sum.
void apply(Backend& backend, MutView out, Operand x, const Linear& linear, View residual = {},
           Activation activation = Activation::none);

// x in the 8 bits that the linear's weights are held in, in memory of the arena; x itself when they
// are not. What a product of two 8-bit factors takes.
Operand narrowed(Backend& backend, Arena& arena, View x, const Linear& linear);

}  // namespace orrery
