#include "cuda/gemm.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <compare>
#include <map>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "cuda/kernels.h"
#include "cuda/kernels/sm90_gate.h"

namespace orrery::cuda {

namespace {

// Enough for the split-K and stream-K kernels of Hopper.
constexpr size_t kWorkspace = size_t{64} << 20;
// Smaller bf16 results take our epilogue: the library's kernels for them round the product before
// they add bias or residual.
constexpr int64_t kMinFusedSize = int64_t{1} << 20;
// Results that need an epilogue of our own pass through f32 in parts of at most this size.
constexpr int64_t kMaxPartBytes = int64_t{256} << 20;
// Fewer rows are bound by reading the weights, which the library's kernels split better.
constexpr int64_t kMinGatedRows = 256;

cudaDataType_t type_of(DType dtype) { return dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

// A row-major matrix as cuBLASLt's column-major one.
struct Matrix {
  DType dtype = DType::f32;
  bool transposed = false;
  int64_t rows = 0, columns = 0, leading = 0;  // before transposition
  uint32_t alignment = 0;
  auto operator<=>(const Matrix&) const = default;
};

uint32_t alignment_of(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return uint32_t(std::min<uintptr_t>(256, address & (~address + 1)));
}

// [M, N] with contiguous rows is column-major [N, M].
Matrix matrix_of(const View& view) {
  const int64_t leading = view.dim(0) > 1 ? view.stride(0) : view.dim(1);
  return {view.dtype,
          false,
          view.dim(1),
          view.dim(0),
          std::max(leading, view.dim(1)),
          alignment_of(view.data)};
}

// w [N, K] as the left factor [N, K]: transposed when its rows are contiguous, as it lies
// otherwise.
Matrix weight_of(const View& w) {
  if (w.stride(1) == 1 || w.dim(1) == 1) {
    Matrix matrix = matrix_of(w);
    matrix.transposed = true;
    return matrix;
  }
  return {
      w.dtype, false, w.dim(0), w.dim(1), std::max(w.stride(1), w.dim(0)), alignment_of(w.data)};
}

struct Problem {
  Matrix w, x, residual, out;
  DType bias = DType::f32;
  bool has_bias = false;
  auto operator<=>(const Problem&) const = default;
};

class Layout {
 public:
  explicit Layout(const Matrix& matrix) {
    check_cublas(cublasLtMatrixLayoutCreate(&layout_, type_of(matrix.dtype), uint64_t(matrix.rows),
                                            uint64_t(matrix.columns), matrix.leading));
  }
  ~Layout() { cublasLtMatrixLayoutDestroy(layout_); }
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
  cublasLtMatrixLayout_t get() const { return layout_; }

 private:
  cublasLtMatrixLayout_t layout_ = nullptr;
};

// Descriptors and the algorithm that the library's heuristic prefers for one problem.
class Plan {
 public:
  Plan(cublasLtHandle_t handle, const Problem& problem)
      : w_(problem.w), x_(problem.x), residual_(problem.residual), out_(problem.out) {
    // CUBLAS_COMPUTE_32F is true fp32 for f32 operands: tf32 would need its own compute type.
    check_cublas(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t w_op = problem.w.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    set(CUBLASLT_MATMUL_DESC_TRANSA, w_op);
    if (problem.has_bias) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(problem.bias));
    }
    cublasLtMatmulPreference_t preference = nullptr;
    check_cublas(cublasLtMatmulPreferenceCreate(&preference));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      check_cublas(
          cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspace);
    // Partial sums of a split product stay f32: the one rounding comes at the end.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, problem.w.alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, problem.x.alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, problem.residual.alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, problem.out.alignment);
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, operation_, w_.get(), x_.get(), residual_.get(),
                                       out_.get(), preference, 1, &result, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    found_ = status == CUBLAS_STATUS_SUCCESS && found > 0 && result.state == CUBLAS_STATUS_SUCCESS;
    if (found_) algorithm_ = result.algo;
  }
  ~Plan() { cublasLtMatmulDescDestroy(operation_); }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  bool found() const { return found_; }

  void run(cublasLtHandle_t handle, const MutView& out, const View& x, const View& w,
           const LinearOptions& options, void* workspace, Stream stream) const {
    if (options.bias) {
      const void* bias = options.bias.data;
      check_cublas(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                  &bias, sizeof bias));
    }
    const float one = 1.0f, beta = options.residual ? 1.0f : 0.0f;
    const void* residual = options.residual ? options.residual.data : out.data;
    check_cublas(cublasLtMatmul(handle, operation_, &one, w.data, w_.get(), x.data, x_.get(), &beta,
                                residual, residual_.get(), out.mut(), out_.get(), &algorithm_,
                                workspace, kWorkspace, stream));
  }

 private:
  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check_cublas(cublasLtMatmulDescSetAttribute(operation_, attribute, &value, sizeof value));
  }

  cublasLtMatmulDesc_t operation_ = nullptr;
  Layout w_, x_, residual_, out_;
  cublasLtMatmulAlgo_t algorithm_;
  bool found_ = false;
};

// Whether the rows of a matrix lie apart, as a library needs (a broadcast row does not).
bool has_matrix_rows(const View& view) { return view.dim(0) <= 1 || view.stride(0) >= view.dim(1); }

}  // namespace

struct Gemm::State {
  explicit State(Context& c)
      : context(c), workspace(c), x_scratch(c), w_scratch(c), product_scratch(c) {}
  ~State() {
    plans.clear();
    if (handle) cublasLtDestroy(handle);
  }

  Context& context;
  cublasLtHandle_t handle = nullptr;
  std::map<Problem, Plan> plans;
  Scratch workspace, x_scratch, w_scratch, product_scratch;

  View as_f32(Scratch& scratch, const View& view) {
    const MutView copied = scratch.tensor(view.shape, DType::f32);
    copy(context.stream(), copied, view);
    return copied;
  }

  // True when the library ran it, which takes no activation.
  bool try_library(const MutView& out, const View& x, const View& w, const LinearOptions& options) {
    const bool is_narrow = x.dtype == DType::bf16 && w.dtype == DType::bf16;
    const bool is_full = x.dtype == DType::f32 && w.dtype == DType::f32 && out.dtype == DType::f32;
    if (!is_narrow && !is_full) return false;
    if (w.dim(1) == 0) return false;
    if (options.residual &&
        (options.residual.dtype != out.dtype || !has_matrix_rows(options.residual)))
      return false;
    if (options.bias && options.bias.dtype != out.dtype) return false;
    const bool is_fused = options.bias || options.residual;
    if (is_fused && out.dtype == DType::bf16 && out.numel() < kMinFusedSize) return false;
    if (!has_matrix_rows(x)) return false;
    Problem problem{weight_of(w),
                    matrix_of(x),
                    options.residual ? matrix_of(options.residual) : matrix_of(out),
                    matrix_of(out),
                    options.bias.dtype,
                    static_cast<bool>(options.bias)};
    if (options.bias && alignment_of(options.bias.data) < 16) return false;
    const Stream stream = context.stream();
    if (!handle) check_cublas(cublasLtCreate(&handle));
    auto it = plans.find(problem);
    if (it == plans.end()) {
      it = plans
               .emplace(std::piecewise_construct, std::forward_as_tuple(problem),
                        std::forward_as_tuple(handle, problem))
               .first;
    }
    if (!it->second.found()) return false;
    it->second.run(handle, out, x, w, options, workspace.get(kWorkspace), stream);
    return true;
  }

  // The product in f32 scratch, then our epilogue with its one rounding; in row parts to bound the
  // scratch. False when the library refuses the product.
  bool try_in_parts(const MutView& out, const View& x, const View& w,
                    const LinearOptions& options) {
    const int64_t width = w.dim(0);  // twice out's behind a gate
    const int64_t step = std::max<int64_t>(1, kMaxPartBytes / (width * int64_t(sizeof(float))));
    for (int64_t begin = 0; begin < out.dim(0); begin += step) {
      const int64_t size = std::min(step, out.dim(0) - begin);
      const MutView product = product_scratch.tensor({size, width}, DType::f32);
      if (w.dim(1) == 0)
        fill(context.stream(), product, 0.0f);
      else if (!try_library(product, x.slice(0, begin, size), w, {}))
        return false;
      const View residual = options.residual ? options.residual.slice(0, begin, size) : View{};
      epilogue(context.stream(), out.slice(0, begin, size), product, options.bias, residual,
               options.activation);
    }
    return true;
  }

  bool try_run(const MutView& out, const View& x, const View& w, const LinearOptions& options) {
    if (options.activation == Activation::none && try_library(out, x, w, options)) return true;
    return try_in_parts(out, x, w, options);
  }
};

Gemm::Gemm(Context& context) : state_(std::make_unique<State>(context)) {}
Gemm::~Gemm() = default;

void Gemm::run(MutView out, View x, View w, const LinearOptions& options) {
  State& s = *state_;
  if (s.try_run(out, x, w, options)) return;
  // Mixed types, broadcast rows, or strides the library refuses: dense f32 copies of both factors.
  const View wide_w = s.as_f32(s.w_scratch, w), wide_x = s.as_f32(s.x_scratch, x);
  require(s.try_run(out, wide_x, wide_w, options), ErrorKind::device,
          "linear: cuBLASLt has no f32 kernel for ", x.shape, " x ", w.shape, "^T");
}

void Gemm::run_gated(MutView out, View x, View w) {
  const bool is_narrow =
      x.dtype == DType::bf16 && w.dtype == DType::bf16 && out.dtype == DType::bf16;
  if (is_narrow && x.dim(0) >= kMinGatedRows && w.stride(1) == 1) {
    Sm90GateParams params;
    params.x = x.data;
    params.w = w.data;
    params.out = out.mut();
    params.x_stride = x.stride(0);
    params.w_stride = w.stride(0);
    params.out_stride = out.stride(0);
    params.m = x.dim(0);
    params.n = out.dim(1);
    params.k = x.dim(1);
    if (sm90_gate_supports(params) == nullptr) {
      const char* error = sm90_gate(params, state_->context.stream());
      require(error == nullptr, ErrorKind::device, "gated_linear: ", error);
      return;
    }
  }
  run(out, x, w, {.activation = Activation::silu_gate});
}

}  // namespace orrery::cuda
