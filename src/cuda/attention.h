// Who computes attention on CUDA: our Hopper kernels, cuDNN, two products a head, a reference
// kernel.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "backend/implementations.h"
#include "cuda/context.h"
#include "cuda/cudnn_graph.h"
#include "cuda/gemm.h"

namespace orrery::cuda {

class Attention {
 public:
  Attention(Context& context, CudnnHandle& handle, Gemm& gemm);
  ~Attention();

  // As Backend::attention.
  Ran run(const AttentionArgs& call) { return list_.run(call, call.plan.implementation); }

 private:
  struct CudnnPlan;

  Answer native(const AttentionArgs& call);
  Answer cudnn(const AttentionArgs& call);
  Answer gemm(const AttentionArgs& call);
  Answer reference(const AttentionArgs& call);
  const CudnnPlan& cudnn_plan(const AttentionArgs& call);

  Context& context_;
  CudnnHandle& handle_;
  Gemm& gemm_;
  Scratch workspace_, scores_, probabilities_;
  std::map<std::vector<int64_t>, std::unique_ptr<CudnnPlan>> cudnn_plans_;
  Implementations<AttentionArgs> list_;
};

}  // namespace orrery::cuda
