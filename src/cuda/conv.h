// Who computes channels-last convolutions on CUDA: our Hopper kernel for two frames at a time,
// products where the kernel is a point or a line in time, cuDNN plans cached per shape, and a
// kernel for what cuDNN refuses. Weights are reordered once.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "backend/implementations.h"
#include "cuda/context.h"
#include "cuda/cudnn_graph.h"
#include "cuda/gemm.h"

namespace orrery::cuda {

class Convolution {
 public:
  Convolution(Context& context, CudnnHandle& handle, Gemm& gemm);
  ~Convolution();

  // As Backend::conv3d. The note of cudnn is its engine.
  Ran run(const Conv3dArgs& call);

  // Forgets reordered weights made from memory in this range, which is about to be freed.
  void forget(const void* data, size_t bytes);

 private:
  struct Problem;
  struct Plan;

  // What is kept of a filter, seen as w [Cout, kd, kh, kw, Cin].
  enum class Form : uint8_t {
    f32,    // dense
    bf16,   // dense
    pairs,  // u of sm90_conv.h: bf16 [4, kh, kw, Cout, Cin]
  };
  View derived(const View& w, Form form);
  View dense_filter(const Problem& problem);
  Answer pairs(const Problem& problem);
  Answer pointwise(const Problem& problem);
  Answer columns(const Problem& problem);
  Answer cudnn(const Problem& problem);
  Answer direct(const Problem& problem);
  const Plan& plan_for(const Problem& problem);
  void run_plan(const Problem& problem, const Plan& plan);

  Context& context_;
  CudnnHandle& handle_;
  Gemm& gemm_;
  Scratch workspace_, wide_, dense_x_, dense_out_, dense_residual_, pairs_;
  std::map<std::pair<const void*, Form>, Tensor> weights_;
  std::map<std::vector<int64_t>, std::unique_ptr<Plan>> plans_;
  Implementations<Problem> list_;
};

}  // namespace orrery::cuda
