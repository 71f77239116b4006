// The first half of a gated MLP on Hopper: two products of the same rows and what joins them, bf16
// in and out, f32 accumulation, one rounding.
#pragma once

#include <cstdint>

namespace orrery::cuda {

// out [m, n] = silu(x g^T) * (x u^T); w [2n, k] holds the rows of g, then those of u.
struct Sm90GateParams {
  const void* x = nullptr;  // bf16 [m, k]
  const void* w = nullptr;  // bf16 [2n, k]
  void* out = nullptr;      // bf16 [m, n]
  int64_t x_stride = 0;     // elements between rows
  int64_t w_stride = 0;
  int64_t out_stride = 0;
  int64_t m = 0, n = 0, k = 0;
};

// nullptr when the kernel can run these parameters, else a sentence that says why not.
const char* sm90_gate_supports(const Sm90GateParams& params);

// Enqueues the call on `stream` (a cudaStream_t). Neither allocates nor synchronises. Returns
// nullptr, or a sentence when it could not be enqueued.
const char* sm90_gate(const Sm90GateParams& params, void* stream);

}  // namespace orrery::cuda
