// The operations that several implementations can compute: their arguments as plain data, good
// already by the contracts of backend.h, and what is known of a call that ran.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "backend/attention_plan.h"
#include "tensor/operand.h"

namespace orrery {

enum class Activation : uint8_t {
  none,
  silu,       // x * sigmoid(x)
  relu2,      // max(x, 0)^2
  silu_gate,  // x = [gate | up] along the row: silu(gate) * up; halves the width
};

struct LinearOptions {
  View bias = {};      // [N]
  View residual = {};  // [M, N], added after the activation; may be `out` itself
  Activation activation = Activation::none;  // none, silu or relu2
};

// Channels-last convolution. pad_before/pad_after per (depth, height, width); zero padding.
struct Conv3d {
  std::array<int64_t, 3> stride{1, 1, 1};
  std::array<int64_t, 3> dilation{1, 1, 1};
  std::array<int64_t, 3> pad_before{0, 0, 0};
  std::array<int64_t, 3> pad_after{0, 0, 0};
};

struct LinearArgs {
  MutView out;
  Operand x, w;
  LinearOptions options = {};
};

struct GatedLinearArgs {
  MutView out;
  Operand x, w;
};

struct AttentionArgs {
  MutView out;
  View q, k, v;
  const AttentionPlan& plan;
};

struct SelectBlocksArgs {
  MutView indices, counts;
  View q, k;
  const BlockSelection& selection;
  MutView scores;  // or empty
};

struct Conv3dArgs {
  MutView out;
  View x, w;
  View bias = {};
  Conv3d conv = {};
  View residual = {};
};

// Shapes and types, for the message of a call that no implementation takes.
std::string describe(const LinearArgs& call);
std::string describe(const GatedLinearArgs& call);
std::string describe(const AttentionArgs& call);
std::string describe(const SelectBlocksArgs& call);
std::string describe(const Conv3dArgs& call);

// Who computed a call.
struct Ran {
  std::string name = {};      // of the implementation; empty when there was nothing to compute
  std::string note = {};      // what else it says of itself: the engine that a library chose
  std::string declined = {};  // better implementations and why they declined: "native: bf16 only"
  double seconds = 0;         // 0 unless the backend profiles
};

}  // namespace orrery
