// Projections by cuBLASLt, the gated one by our Hopper kernel where it applies.
#pragma once

#include <memory>

#include "backend/backend.h"
#include "cuda/context.h"

namespace orrery::cuda {

class Gemm {
 public:
  explicit Gemm(Context& context);
  ~Gemm();

  // As Backend::linear; out may also be f32 when x and w are bf16, and keeps the f32 sums then.
  void run(MutView out, View x, View w, const LinearOptions& options = {});
  // As Backend::gated_linear.
  void run_gated(MutView out, View x, View w);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace orrery::cuda
