// Channels-last convolution: products where the kernel is a line in time or a point, our Hopper
// kernel for two frames at a time where it applies, cuDNN plans cached per shape elsewhere, and a
// kernel for what cuDNN refuses. Weights are reordered once.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
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

  // What ran the last call: "gemm", "pairs of frames", "cudnn (engine 3)", "direct (why not
  // cudnn)".
  const std::string& last() const { return last_; }

 private:
  struct Problem;
  struct Plan;

  // What is kept of a filter w [Cout, Cin, kd, kh, kw].
  enum class Form : uint8_t {
    f32,    // [Cout, kd, kh, kw, Cin]
    bf16,   // the same
    pairs,  // u of sm90_conv.h: bf16 [4, kh, kw, Cout, Cin]
  };
  View derived(const View& w, Form form);
  // Each returns false, having enqueued nothing, when it is not for this problem.
  bool try_pairs(const Problem& problem, const View& w);
  bool try_pointwise(const Problem& problem);
  bool try_columns(const Problem& problem);
  bool try_cudnn(const Problem& problem);
  const Plan& plan_for(const Problem& problem);
  void run_plan(const Problem& problem, const Plan& plan);

  Context& context_;
  CudnnHandle& handle_;
  Gemm& gemm_;
  Scratch workspace_, wide_, dense_x_, dense_out_, dense_residual_, pairs_;
  std::map<std::pair<const void*, Form>, Tensor> weights_;
  std::map<std::vector<int64_t>, std::unique_ptr<Plan>> plans_;
  std::string last_;
};

}  // namespace orrery::cuda
