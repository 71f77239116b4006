// Matrices of few bits in host memory: the arithmetic that every backend reproduces.
#pragma once

#include "tensor/operand.h"

namespace orrery {

// Where the scales of a matrix that is quantised come from.
enum class Scaling : uint8_t {
  given,  // they are there already
  amax,   // largest magnitude of a block / largest_of(type); 1 where a block is all zeros
};

// out = x / scale, rounded to the nearest value of out's type (f8e4m3 or i8), ties to even, beyond
// the largest to the largest. The division is a division: a product with the reciprocal may land on
// the other side of a tie. NaN stays NaN, in i8 it becomes 0; neither counts for a scale. x is f32
// or bf16 with contiguous rows.
void quantise(MutOperand out, View x, Scaling scaling);

// out = values * scales, in f32, rounded once to f32 or bf16.
void dequantise(MutView out, const Operand& x);

}  // namespace orrery
