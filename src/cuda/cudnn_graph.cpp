#include "cuda/cudnn_graph.h"

#include <cudnn.h>

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace orrery::cuda {

namespace {

// More would crowd out the model; engines that want more lose to those that do not.
constexpr int64_t kMaxWorkspace = int64_t{1} << 30;
constexpr int64_t kMaxEngines = 64;

class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type) {
    check_cudnn(cudnnBackendCreateDescriptor(type, &raw_));
  }
  Descriptor(Descriptor&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  ~Descriptor() {
    if (raw_) cudnnBackendDestroyDescriptor(raw_);
  }

  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count,
           const void* values) {
    check_cudnn(cudnnBackendSetAttribute(raw_, name, type, count, values));
  }
  void set(cudnnBackendAttributeName_t name, const Descriptor& value) {
    set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value.raw_);
  }
  void set(cudnnBackendAttributeName_t name, int64_t value) {
    set(name, CUDNN_TYPE_INT64, 1, &value);
  }
  void set(cudnnBackendAttributeName_t name, const std::vector<int64_t>& values) {
    set(name, CUDNN_TYPE_INT64, int64_t(values.size()), values.data());
  }
  void set(cudnnBackendAttributeName_t name, bool value) {
    set(name, CUDNN_TYPE_BOOLEAN, 1, &value);
  }
  void set(cudnnBackendAttributeName_t name, cudnnDataType_t value) {
    set(name, CUDNN_TYPE_DATA_TYPE, 1, &value);
  }
  void finalize() { check_cudnn(cudnnBackendFinalize(raw_)); }

  cudnnBackendDescriptor_t raw() const { return raw_; }

 private:
  cudnnBackendDescriptor_t raw_ = nullptr;
};

cudnnDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::bf16: return CUDNN_DATA_BFLOAT16;
    case DType::f16: return CUDNN_DATA_HALF;
    default: return CUDNN_DATA_FLOAT;
  }
}

std::vector<int64_t> list(const Shape& shape) {
  std::vector<int64_t> values;
  for (int i = 0; i < shape.rank(); ++i) values.push_back(shape[i]);
  return values;
}

// The engine configurations cuDNN proposes for a graph, best first. Empty when it proposes none.
std::vector<Descriptor> propose(const Descriptor& graph, cudnnBackendHeurMode_t mode) {
  Descriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
  std::vector<Descriptor> configurations;
  if (cudnnBackendFinalize(heuristic.raw()) != CUDNN_STATUS_SUCCESS) return configurations;
  int64_t count = 0;
  check_cudnn(cudnnBackendGetAttribute(heuristic.raw(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                       CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr));
  count = std::min(count, kMaxEngines);
  std::vector<cudnnBackendDescriptor_t> raw;
  for (int64_t i = 0; i < count; ++i) {
    configurations.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    raw.push_back(configurations.back().raw());
  }
  int64_t returned = 0;
  check_cudnn(cudnnBackendGetAttribute(heuristic.raw(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                       CUDNN_TYPE_BACKEND_DESCRIPTOR, count, &returned,
                                       raw.data()));
  configurations.erase(configurations.begin() + returned, configurations.end());
  return configurations;
}

struct Engine {
  int64_t index = -1;
  std::vector<cudnnBackendNumericalNote_t> notes;
};

Engine engine_of(const Descriptor& configuration) {
  Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t raw = engine.raw();
  int64_t count = 0;
  check_cudnn(cudnnBackendGetAttribute(configuration.raw(), CUDNN_ATTR_ENGINECFG_ENGINE,
                                       CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &raw));
  Engine result;
  check_cudnn(cudnnBackendGetAttribute(engine.raw(), CUDNN_ATTR_ENGINE_GLOBAL_INDEX,
                                       CUDNN_TYPE_INT64, 1, &count, &result.index));
  result.notes.resize(CUDNN_NUMERICAL_NOTE_TYPE_COUNT);
  check_cudnn(cudnnBackendGetAttribute(engine.raw(), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                       CUDNN_TYPE_NUMERICAL_NOTE, CUDNN_NUMERICAL_NOTE_TYPE_COUNT,
                                       &count, result.notes.data()));
  result.notes.resize(size_t(count));
  return result;
}

bool has_note(const Engine& engine, cudnnBackendNumericalNote_t note) {
  return std::find(engine.notes.begin(), engine.notes.end(), note) != engine.notes.end();
}

// Sums in f32, the same from run to run; f32 operands as they are (tensor cores would round them).
bool is_acceptable(const Engine& engine, bool is_exact_f32) {
  for (const auto note :
       {CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC, CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION,
        CUDNN_NUMERICAL_NOTE_WINOGRAD, CUDNN_NUMERICAL_NOTE_FFT}) {
    if (has_note(engine, note)) return false;
  }
  return !is_exact_f32 || (!has_note(engine, CUDNN_NUMERICAL_NOTE_TENSOR_CORE) &&
                           !has_note(engine, CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS));
}

}  // namespace

CudnnHandle::~CudnnHandle() {
  if (handle_) cudnnDestroy(handle_);
}

cudnnContext* CudnnHandle::get() {
  const Stream stream = context_.stream();
  if (!handle_) {
    check_cudnn(cudnnCreate(&handle_));
    check_cudnn(cudnnSetStream(handle_, stream));
  }
  return handle_;
}

struct CudnnGraph::State {
  CudnnHandle& handle;
  std::vector<Descriptor> tensors, parts, operations;  // parts: what operations point to
  std::unique_ptr<Descriptor> plan;
  int64_t workspace = 0;
  std::string engine = "not planned";

  const Descriptor& tensor(int64_t id) const { return tensors[size_t(id - 1)]; }
};

CudnnGraph::CudnnGraph(CudnnHandle& handle)
    : state_(std::make_unique<State>(State{handle, {}, {}, {}, {}})) {}
CudnnGraph::~CudnnGraph() = default;

int64_t CudnnGraph::tensor(const TensorSpec& spec) {
  const int64_t id = int64_t(state_->tensors.size()) + 1;
  Descriptor tensor(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  tensor.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, id);
  tensor.set(CUDNN_ATTR_TENSOR_DATA_TYPE, type_of(spec.dtype));
  tensor.set(CUDNN_ATTR_TENSOR_DIMENSIONS, list(spec.dims));
  tensor.set(CUDNN_ATTR_TENSOR_STRIDES, list(spec.strides));
  tensor.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, spec.alignment);
  tensor.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, spec.place == Place::inner);
  if (spec.place == Place::host) tensor.set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, true);
  tensor.finalize();
  state_->tensors.push_back(std::move(tensor));
  return id;
}

void CudnnGraph::convolution(int64_t y, int64_t x, int64_t w, const ConvolutionSpec& spec) {
  Descriptor convolution(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
  convolution.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, int64_t(spec.stride.size()));
  convolution.set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_DATA_FLOAT);
  convolution.set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode);
  convolution.set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, spec.stride);
  convolution.set(CUDNN_ATTR_CONVOLUTION_DILATIONS, spec.dilation);
  convolution.set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, spec.pad_before);
  convolution.set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, spec.pad_after);
  convolution.finalize();

  Descriptor operation(CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR);
  const float alpha = 1.0f, beta = 0.0f;
  operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, state_->tensor(x));
  operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, state_->tensor(w));
  operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, state_->tensor(y));
  operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, convolution);
  operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, CUDNN_TYPE_FLOAT, 1, &alpha);
  operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA, CUDNN_TYPE_FLOAT, 1, &beta);
  operation.finalize();
  state_->parts.push_back(std::move(convolution));
  state_->operations.push_back(std::move(operation));
}

void CudnnGraph::add(int64_t y, int64_t a, int64_t b) {
  Descriptor pointwise(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  const cudnnPointwiseMode_t mode = CUDNN_POINTWISE_ADD;
  pointwise.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
  pointwise.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_DATA_FLOAT);
  pointwise.finalize();

  Descriptor operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, pointwise);
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, state_->tensor(a));
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, state_->tensor(b));
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, state_->tensor(y));
  operation.finalize();
  state_->parts.push_back(std::move(pointwise));
  state_->operations.push_back(std::move(operation));
}

void CudnnGraph::attention(int64_t out, int64_t q, int64_t k, int64_t v, int64_t scale,
                           int64_t stats) {
  Descriptor operation(CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC, state_->tensor(q));
  operation.set(CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC, state_->tensor(k));
  operation.set(CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC, state_->tensor(v));
  operation.set(CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC, state_->tensor(out));
  operation.set(CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC, state_->tensor(scale));
  if (stats) operation.set(CUDNN_ATTR_OPERATION_SDPA_FWD_STATSDESC, state_->tensor(stats));
  operation.finalize();
  state_->operations.push_back(std::move(operation));
}

bool CudnnGraph::plan(bool is_exact_f32) {
  cudnnHandle_t handle = state_->handle.get();
  Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  std::vector<cudnnBackendDescriptor_t> operations;
  for (const Descriptor& operation : state_->operations) operations.push_back(operation.raw());
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
            int64_t(operations.size()), operations.data());
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
  if (cudnnBackendFinalize(graph.raw()) != CUDNN_STATUS_SUCCESS) {
    char detail[512] = "";
    cudnnGetLastErrorString(detail, sizeof detail);
    state_->engine = concat("no such graph: ", detail);
    return false;
  }
  int64_t proposed = 0, refused = 0;
  for (const cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    for (const Descriptor& configuration : propose(graph, mode)) {
      ++proposed;
      const Engine engine = engine_of(configuration);
      if (!is_acceptable(engine, is_exact_f32)) {
        ++refused;
        continue;
      }
      auto plan = std::make_unique<Descriptor>(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
      plan->set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
      plan->set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration);
      if (cudnnBackendFinalize(plan->raw()) != CUDNN_STATUS_SUCCESS) continue;
      int64_t workspace = 0, count = 0;
      check_cudnn(cudnnBackendGetAttribute(plan->raw(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                           CUDNN_TYPE_INT64, 1, &count, &workspace));
      if (workspace > kMaxWorkspace) continue;
      state_->plan = std::move(plan);
      state_->workspace = workspace;
      state_->engine = concat("engine ", engine.index);
      return true;
    }
  }
  state_->engine = concat("no engine: ", proposed, " proposed, ", refused,
                          " of them inexact or not deterministic");
  return false;
}

int64_t CudnnGraph::workspace_bytes() const { return state_->workspace; }

const std::string& CudnnGraph::engine() const { return state_->engine; }

void CudnnGraph::run(std::span<const Binding> bindings, void* workspace) const {
  std::vector<int64_t> ids;
  std::vector<const void*> data;
  for (const Binding& binding : bindings) {
    ids.push_back(binding.tensor);
    data.push_back(binding.data);
  }
  Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, ids);
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, int64_t(data.size()),
           data.data());
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
  pack.finalize();
  check_cudnn(cudnnBackendExecute(state_->handle.get(), state_->plan->raw(), pack.raw()));
}

}  // namespace orrery::cuda
