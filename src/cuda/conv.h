// Channels-last convolution: products where the kernel is a line in time or a point, cuDNN plans
// cached per shape elsewhere, and our own kernel for what cuDNN refuses. Weights are reordered
// once.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "backend/backend.h"
#include "cuda/context.h"
#include "cuda/cudnn_graph.h"
#include "cuda/gemm.h"

namespace orrery::cuda {

class Convolution {
 public:
  Convolution(Context& context, CudnnHandle& handle, Gemm& gemm);
  ~Convolution();

  // As Backend::conv3d.
  void run(MutView out, View x, View w, View bias, const Conv3d& conv, View residual);

  // Forgets reordered weights made from memory in this range, which is about to be freed.
  void forget(const void* data, size_t bytes);

  // What ran the last call: "gemm", "cudnn (engine 3)", "direct (why not cudnn)".
  const std::string& last() const { return last_; }

 private:
  struct Problem;
  struct Plan;

  // w as [Cout, kd, kh, kw, Cin] of the given type.
  View reordered(const View& w, DType dtype);
  // Each returns false, having enqueued nothing, when it is not for this problem.
  bool try_pointwise(const Problem& problem);
  bool try_columns(const Problem& problem);
  bool try_cudnn(const Problem& problem);
  const Plan& plan_for(const Problem& problem);
  void run_plan(const Problem& problem, const Plan& plan);

  Context& context_;
  CudnnHandle& handle_;
  Gemm& gemm_;
  Scratch workspace_, wide_, dense_x_, dense_out_, dense_residual_;
  std::map<std::tuple<const void*, DType>, Tensor> weights_;
  std::map<std::vector<int64_t>, std::unique_ptr<Plan>> plans_;
  std::string last_;
};

}  // namespace orrery::cuda
