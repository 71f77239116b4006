// The operations of the CPU backend, one function each; backend.h has their contracts.
#pragma once

#include <string>

#include "backend/backend.h"
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
LinearFunction choose_linear(std::string_view name);  // the default when empty; refuses others
void linear(Context& context, MutView out, View x, View w, const LinearOptions& options);

// conv.cpp
void conv3d(Context& context, MutView out, View x, View w, View bias, const Conv3d& conv,
            View residual);
void conv_transpose1d(Context& context, MutView out, View x, View w, View bias, int64_t stride,
                      int64_t padding);

// attention.cpp. Returns the name of the implementation that ran.
std::string attention(Context& context, MutView out, View q, View k, View v,
                      const AttentionPlan& plan);

// select_blocks.cpp
void select_blocks(Context& context, MutView indices, MutView counts, View q, View k,
                   const BlockSelection& selection, MutView scores);

inline Act act(Activation kind) {
  switch (kind) {
    case Activation::silu: return Act::silu;
    case Activation::relu2: return Act::relu2;
    default: return Act::none;
  }
}

}  // namespace orrery::cpu
