// Attention as an ordered list of implementations: the first that accepts a call runs it, or the
// one that the plan names.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "cuda/context.h"
#include "cuda/cudnn_graph.h"
#include "cuda/gemm.h"

namespace orrery::cuda {

class Attention {
 public:
  Attention(Context& context, CudnnHandle& handle, Gemm& gemm);
  ~Attention();

  // As Backend::attention; returns the name of the implementation that ran.
  std::string run(MutView out, View q, View k, View v, const AttentionPlan& plan);

 private:
  struct Call {
    MutView out;
    View q, k, v;
    const AttentionPlan& plan;
  };
  struct Implementation {
    const char* name;
    bool is_automatic(const Call& call) const { return !prefers || prefers(call); }
    std::function<std::string(const Call&)> refusal;  // empty: accepts
    std::function<bool(const Call&)> prefers;         // chosen unasked; null: whenever it accepts
    std::function<void(const Call&)> run;
  };
  struct CudnnPlan;

  void run_native(const Call& call);
  const CudnnPlan& cudnn_plan(const Call& call);
  void run_cudnn(const Call& call);
  void run_gemm(const Call& call);

  Context& context_;
  CudnnHandle& handle_;
  Gemm& gemm_;
  Scratch workspace_, scores_, probabilities_;
  std::map<std::vector<int64_t>, std::unique_ptr<CudnnPlan>> cudnn_plans_;
  std::vector<Implementation> implementations_;  // best first
};

}  // namespace orrery::cuda
