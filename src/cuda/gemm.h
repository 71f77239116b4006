// Matrix products: lists of who computes linear and gated_linear. The plain product is cuBLASLt's;
// sums in f32 and a kernel of ours add what the library has no epilogue for; the gated one has a
// Hopper kernel of its own.
#pragma once

#include <memory>

#include "backend/implementations.h"
#include "cuda/context.h"

namespace orrery::cuda {

class Gemm {
 public:
  explicit Gemm(Context& context);
  ~Gemm();

  // As Backend::linear and gated_linear; out may also be f32 when x and w are bf16, and keeps the
  // f32 sums then, and linear takes the activation silu_gate.
  Ran run(const LinearArgs& call);
  Ran run_gated(const GatedLinearArgs& call);

 private:
  struct State;
  std::unique_ptr<State> state_;
  Implementations<LinearArgs> linear_;
  Implementations<GatedLinearArgs> gated_;
};

}  // namespace orrery::cuda
