// Operation graphs of cuDNN's backend interface, with no cuDNN type in sight: describe tensors, add
// operations, plan, run. Descriptions that cuDNN cannot run end in plan() returning false.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda/context.h"
#include "tensor/view.h"

struct cudnnContext;

namespace orrery::cuda {

// One handle, made at first use and bound to the context's stream.
class CudnnHandle {
 public:
  explicit CudnnHandle(Context& context) : context_(context) {}
  ~CudnnHandle();
  CudnnHandle(const CudnnHandle&) = delete;
  CudnnHandle& operator=(const CudnnHandle&) = delete;
  cudnnContext* get();

 private:
  Context& context_;
  cudnnContext* handle_ = nullptr;
};

class CudnnGraph {
 public:
  enum class Place {
    device,
    host,
    inner
  };  // host: one value passed by the caller; inner: never stored
  struct TensorSpec {
    Shape dims;     // batch, channels, then space
    Shape strides;  // elements
    DType dtype = DType::f32;
    Place place = Place::device;
    int64_t alignment = 16;
  };
  struct ConvolutionSpec {
    std::vector<int64_t> stride, dilation, pad_before, pad_after;  // one per spatial dimension
  };
  struct Binding {
    int64_t tensor;
    const void* data;
  };

  explicit CudnnGraph(CudnnHandle& handle);
  ~CudnnGraph();
  CudnnGraph(const CudnnGraph&) = delete;
  CudnnGraph& operator=(const CudnnGraph&) = delete;

  // Describing returns the tensor's id for the operations and run().
  int64_t tensor(const TensorSpec& spec);
  void convolution(int64_t y, int64_t x, int64_t w, const ConvolutionSpec& spec);
  void add(int64_t y, int64_t a, int64_t b);
  // softmax(scale q k^T) v; stats (0: none) receives the log-sum-exp.
  void attention(int64_t out, int64_t q, int64_t k, int64_t v, int64_t scale, int64_t stats);

  // Finds the first engine of cuDNN's own order that runs the graph with f32 sums,
  // deterministically and without transforms (Winograd, FFT). is_exact_f32 also leaves out those
  // that round f32 operands.
  bool plan(bool is_exact_f32);
  int64_t workspace_bytes() const;
  const std::string& engine() const;  // of the plan, or why there is none
  void run(std::span<const Binding> bindings, void* workspace) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace orrery::cuda
