#include "cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <exception>
#include <map>
#include <string>

#include "base/error.h"
#include "cuda/attention.h"
#include "cuda/context.h"
#include "cuda/conv.h"
#include "cuda/cudnn_graph.h"
#include "cuda/gemm.h"
#include "cuda/kernels.h"
#include "cuda/select_blocks.h"
#include "cuda/transfer.h"

namespace orrery::cuda {

namespace {

// Columns of the transposed convolution, at most this much at a time.
constexpr int64_t kMaxPartBytes = int64_t{128} << 20;

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(const CudaOptions& options) : context_(options.device) {
    context_.on_release = [this](const void* data, size_t bytes) {
      convolution_.forget(data, bytes);
    };
  }
  ~CudaBackend() override {
    context_.settle();  // and makes the device current: any thread may end a backend
    context_.on_release = nullptr;
    do_forget_replays();
  }

  DeviceKind device() const override { return DeviceKind::cuda; }
  std::string description() const override { return context_.description(); }
  std::string driver() const override { return context_.driver(); }
  Buffer allocate(size_t bytes) override { return context_.allocate(bytes); }
  void synchronize() override {
    context_.require_eager("waiting for the device");
    check(cudaStreamSynchronize(context_.stream()));
  }
  MemoryState memory() const override {
    const DeviceMemory now = device_memory(context_.device());
    return {int64_t(now.free), int64_t(now.total), int64_t(context_.peak_bytes())};
  }
  Buffer allocate_pinned(size_t bytes) override { return context_.allocate_pinned(bytes); }
  void await_upload(int lane) override { beside_.await(lane); }
  bool fuses_weights() const override { return true; }
  Place place() const { return {context_.device(), context_.stream(), context_.link()}; }

 private:
  // First call: run as it is, which fills every cache. Second: record. From then on: launch.
  struct Graph {
    bool is_warm = false;
    cudaGraphExec_t executable = nullptr;
  };
  void capture(Graph& graph, const std::function<void()>& fn);
  Stream stream() const { return context_.stream(); }
  void* lane() const override { return stream(); }

  void do_replay(const std::string& key, const std::function<void()>& fn) override;
  void do_forget_replays() override {
    for (auto& [key, graph] : graphs_) {
      if (graph.executable)
        cudaGraphExecDestroy(graph.executable);  // one that runs is freed when it is done
    }
    graphs_.clear();
    context_.has_graphs = false;
  }
  void do_upload(MutView out, View host) override {
    context_.require_eager("upload");
    transfer_.upload(out.mut(), host.data, size_t(host.bytes()));
  }
  void do_download(MutView out, View x) override {
    context_.require_eager("download");
    transfer_.download(out.mut(), x.data, size_t(x.bytes()));
  }
  void do_upload_beside(int lane, MutView out, View host) override {
    context_.require_eager("upload");
    beside_.upload(lane, out.mut(), host.data, size_t(host.bytes()));
  }
  void do_copy(MutView out, View x) override { cuda::copy(stream(), out, x); }
  void do_fill(MutView out, float value) override { cuda::fill(stream(), out, value); }
  void do_lincomb(MutView out, std::span<const Term> terms) override {
    cuda::lincomb(stream(), out, terms);
  }
  void do_add_row(MutView x, View row) override {
    const Term terms[] = {{1.0f, x}, {1.0f, row.unsqueeze(0).expand(0, x.dim(0))}};
    cuda::lincomb(stream(), x, terms);
  }
  void do_activation(MutView out, View x, Activation kind) override {
    cuda::epilogue(stream(), out, x, {}, {}, kind);
  }
  void do_clamp(MutView x, float low, float high) override { cuda::clamp(stream(), x, low, high); }
  void do_to_bytes(MutView out, View x) override { cuda::to_bytes(stream(), out, x); }
  bool do_all_finite(View x) override;
  void do_gather_rows(MutView out, View table, std::span<const int64_t> ids) override {
    cuda::gather_rows(stream(), out, table, ids);
  }
  Ran do_linear(const LinearArgs& call) override { return gemm_.run(call); }
  Ran do_gated_linear(const GatedLinearArgs& call) override { return gemm_.run_gated(call); }
  void do_quantise(MutOperand out, View x, Scaling scaling) override {
    cuda::quantise(stream(), out, x, scaling);
  }
  void do_dequantise(MutView out, Operand x) override { cuda::dequantise(stream(), out, x); }
  void do_rms_norm(MutView out, View x, View weight, const Norm& norm) override {
    cuda::rms_norm(stream(), out, x, weight, norm);
  }
  void do_qk_norm_rope(MutView out, View x, View weight, View cos, View sin,
                       const Norm& norm) override {
    cuda::qk_norm_rope(stream(), out, x, weight, cos, sin, norm);
  }
  Ran do_attention(const AttentionArgs& call) override { return attention_.run(call); }
  Ran do_select_blocks(const SelectBlocksArgs& call) override { return selector_.run(call); }
  Ran do_conv3d(const Conv3dArgs& call) override { return convolution_.run(call); }
  void do_conv_transpose1d(MutView out, View x, View w, View bias, int64_t stride,
                           int64_t padding) override;
  void do_snake(MutView out, View x, View alpha, View beta) override {
    cuda::snake(stream(), out, x, alpha, beta);
  }

  Context context_;
  Transfer transfer_{context_};
  BesideUploads beside_{context_};
  CudnnHandle cudnn_{context_};
  Gemm gemm_{context_};
  Convolution convolution_{context_, cudnn_, gemm_};
  Attention attention_{context_, cudnn_, gemm_};
  BlockSelector selector_{context_, gemm_};
  Scratch flag_{context_}, products_{context_};
  std::map<std::string, Graph, std::less<>> graphs_;
};

void CudaBackend::do_replay(const std::string& key, const std::function<void()>& fn) {
  // A recorded step cannot be timed call by call, and a step within a step is part of it.
  if (profiling() || observed() || context_.capturing) return fn();
  Graph& graph = graphs_[key];
  if (!graph.is_warm) {
    fn();
    graph.is_warm = true;
    return;
  }
  if (!graph.executable) capture(graph, fn);
  check(cudaGraphLaunch(graph.executable, stream()));
}

void CudaBackend::capture(Graph& graph, const std::function<void()>& fn) {
  const Stream stream = context_.stream();
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  context_.capturing = true;
  std::exception_ptr error;
  try {
    fn();
  } catch (...) {
    error = std::current_exception();
  }
  context_.capturing = false;
  cudaGraph_t recorded = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream, &recorded);
  if (error) {
    if (recorded) cudaGraphDestroy(recorded);
    cudaGetLastError();
    std::rethrow_exception(error);
  }
  check(ended);
  const cudaError_t made = cudaGraphInstantiate(&graph.executable, recorded, 0);
  cudaGraphDestroy(recorded);
  check(made);
  context_.has_graphs = true;
}

bool CudaBackend::do_all_finite(View x) {
  context_.require_eager("looking for values that are not finite");
  void* flag = flag_.get(sizeof(int32_t));
  check(cudaMemsetAsync(flag, 0, sizeof(int32_t), stream()));
  cuda::find_non_finite(stream(), static_cast<int32_t*>(flag), x);
  int32_t found = 0;
  transfer_.download(&found, flag, sizeof found);
  return found == 0;
}

// The sum over input channels is a product with w as [Cout k, Cin]; the sum over taps that meet in
// one output row follows.
void CudaBackend::do_conv_transpose1d(MutView out, View x, View w, View bias, int64_t stride,
                                      int64_t padding) {
  const int64_t taps = w.dim(2), columns = w.dim(1) * taps;
  const View factor = w.reshape({w.dim(0), columns}).permute({1, 0});
  const int64_t rows_at_once =
      std::max<int64_t>(1, kMaxPartBytes / (columns * int64_t(sizeof(float)))) * stride;
  for (int64_t begin = 0; begin < out.dim(0); begin += rows_at_once) {
    const int64_t size = std::min(rows_at_once, out.dim(0) - begin);
    // Input rows t that reach an output row: t stride + tap - padding in [begin, begin + size).
    const int64_t lowest = begin + padding - taps + 1;
    const int64_t first = lowest > 0 ? (lowest + stride - 1) / stride : 0;
    const int64_t last = std::min(x.dim(0) - 1, (begin + size - 1 + padding) / stride);
    const int64_t count = std::max<int64_t>(0, last - first + 1);
    const MutView product = products_.tensor({std::max<int64_t>(1, count), columns}, DType::f32);
    if (count > 0) gemm_.run({product, x.slice(0, first, count), factor});
    cuda::fold(stream(), out.slice(0, begin, size), product.slice(0, 0, count), bias,
               {stride, padding, taps, begin, first});
  }
}

const CudaBackend& as_cuda(const Backend& backend) {
  const auto* cuda = dynamic_cast<const CudaBackend*>(&backend);
  require(cuda != nullptr, "cuda: the backend is not a CUDA backend but ", backend.description());
  return *cuda;
}

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options) {
  return std::make_unique<CudaBackend>(options);
}

bool is_cuda_built() { return true; }

Place place_of(const Backend& backend) { return as_cuda(backend).place(); }

}  // namespace orrery::cuda
