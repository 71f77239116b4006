// The operations of the CPU backend, one function each, or a list of those that can compute it;
// backend.h has their contracts.
#pragma once

#include "backend/backend.h"
#include "backend/implementations.h"
#include "cpu/context.h"

namespace orrery::cpu {

// elementwise.cpp
void copy(Context& context, MutView out, View x);
void fill(Context& context, MutView out, float value);
void lincomb(Context& context, MutView out, std::span<const Term> terms);
void add_row(Context& context, MutView x, View row);
void activation(Context& context, MutView out, View x, Activation kind);
void clamp(Context& context, MutView x, float low, float high);
void to_bytes(Context& context, MutView out, View x);
bool all_finite(Context& context, View x);
void gather_rows(Context& context, MutView out, View table, std::span<const int64_t> ids);
void snake(Context& context, MutView out, View x, View alpha, View beta);

// norm.cpp
void rms_norm(Context& context, MutView out, View x, View weight, const Norm& norm);
void qk_norm_rope(Context& context, MutView out, View x, View weight, View cos, View sin,
                  const Norm& norm);

// linear.cpp
void quantise(Context& context, MutOperand out, View x, Scaling scaling);
void dequantise(Context& context, MutView out, const Operand& x);

// Lists in the order of preference, for the life of the context: linear.cpp, attention.cpp,
// select_blocks.cpp, conv.cpp.
Implementations<LinearArgs> linear_implementations(Context& context);
Implementations<AttentionArgs> attention_implementations(Context& context);
Implementations<SelectBlocksArgs> select_blocks_implementations(Context& context);
Implementations<Conv3dArgs> conv3d_implementations(Context& context);

// conv.cpp
void conv_transpose1d(Context& context, MutView out, View x, View w, View bias, int64_t stride,
                      int64_t padding);

inline Act act(Activation kind) {
  switch (kind) {
    case Activation::silu: return Act::silu;
    case Activation::relu2: return Act::relu2;
    default: return Act::none;
  }
}

}  // namespace orrery::cpu
