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
// Smaller bf16 results go through f32 sums and our epilogue: the library's kernels for them round
// the product before they add bias or residual.
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

  void run(cublasLtHandle_t handle, const LinearArgs& call, void* workspace, Stream stream) const {
    if (call.options.bias) {
      const void* bias = call.options.bias.data;
      check_cublas(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                  &bias, sizeof bias));
    }
    const View& residual = call.options.residual;
    const float one = 1.0f, beta = residual ? 1.0f : 0.0f;
    check_cublas(cublasLtMatmul(handle, operation_, &one, call.w.data, w_.get(), call.x.data,
                                x_.get(), &beta, residual ? residual.data : call.out.data,
                                residual_.get(), call.out.mut(), out_.get(), &algorithm_, workspace,
                                kWorkspace, stream));
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

// Why the library's own product and epilogue are not for this call; empty: they are. It has no
// activations.
std::string library_reason(const LinearArgs& call) {
  const auto& [bias, residual, activation] = call.options;
  const bool is_narrow = call.x.dtype == DType::bf16 && call.w.dtype == DType::bf16;
  const bool is_full =
      call.x.dtype == DType::f32 && call.w.dtype == DType::f32 && call.out.dtype == DType::f32;
  if (call.x.scales || call.w.scales) return "multiplies values without scales";
  if (activation != Activation::none) return "has no activations";
  if (!is_narrow && !is_full) return "multiplies bf16 with bf16, or f32 with f32 to f32";
  if (call.w.dim(1) == 0) return "takes at least one column";
  if (residual && (residual.dtype != call.out.dtype || !has_matrix_rows(residual)))
    return "takes a residual of the output's type, with rows that lie apart";
  if (bias && bias.dtype != call.out.dtype) return "takes a bias of the output's type";
  if ((bias || residual) && call.out.dtype == DType::bf16 && call.out.numel() < kMinFusedSize)
    return "would round a small result before it adds bias or residual";
  if (!has_matrix_rows(call.x)) return "takes x with rows that lie apart";
  if (bias && alignment_of(bias.data) < 16) return "takes a bias at a multiple of 16 bytes";
  return "";
}

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

  View as_f32(Scratch& scratch, const Operand& operand) {
    const MutView copied = scratch.tensor(operand.shape, DType::f32);
    if (operand.scales)
      dequantise(context.stream(), copied, operand);
    else
      copy(context.stream(), copied, operand);
    return copied;
  }

  // The library's kernel for a call that library_reason() lets pass; null when it has none.
  const Plan* plan_for(const LinearArgs& call) {
    const auto& [bias, residual, activation] = call.options;
    const Problem problem{
        weight_of(call.w),   matrix_of(call.x), matrix_of(residual ? residual : View(call.out)),
        matrix_of(call.out), bias.dtype,        static_cast<bool>(bias)};
    context.stream();  // makes the device current
    if (!handle) check_cublas(cublasLtCreate(&handle));
    auto it = plans.find(problem);
    if (it == plans.end()) {
      it = plans
               .emplace(std::piecewise_construct, std::forward_as_tuple(problem),
                        std::forward_as_tuple(handle, problem))
               .first;
    }
    return it->second.found() ? &it->second : nullptr;
  }

  void run(const Plan& plan, const LinearArgs& call) {
    plan.run(handle, call, workspace.get(kWorkspace), context.stream());
  }

  // The library's product with its own epilogue.
  Answer fused(const LinearArgs& call) {
    if (std::string reason = library_reason(call); !reason.empty()) return decline(reason);
    const Plan* plan = plan_for(call);
    if (plan == nullptr) return decline("cuBLASLt has no kernel");
    run(*plan, call);
    return {};
  }

  // The library's product as f32 sums in scratch, then our epilogue (silu_gate too), which rounds
  // once. Goes through the rows in parts, to bound the scratch.
  Answer with_epilogue(const LinearArgs& call) {
    if (call.x.scales || call.w.scales) return decline("multiplies values without scales");
    const int64_t width = call.w.dim(0);  // twice out's behind a gate
    const int64_t step = std::max<int64_t>(1, kMaxPartBytes / (width * int64_t(sizeof(float))));
    const auto each_part = [&](const auto& fn) {
      for (int64_t begin = 0; begin < call.out.dim(0); begin += step) {
        const int64_t size = std::min(step, call.out.dim(0) - begin);
        const MutView sums = product_scratch.tensor({size, width}, DType::f32);
        if (!fn(LinearArgs{sums, call.x.slice(0, begin, size), call.w}, begin, size)) return false;
      }
      return true;
    };
    const bool is_empty = call.w.dim(1) == 0;
    std::string reason;
    const bool has_plans = is_empty || each_part([&](const LinearArgs& part, int64_t, int64_t) {
                             reason = library_reason(part);
                             if (reason.empty() && plan_for(part) == nullptr)
                               reason = "cuBLASLt has no kernel";
                             return reason.empty();
                           });
    if (!has_plans) return decline(reason);
    each_part([&](const LinearArgs& part, int64_t begin, int64_t size) {
      if (is_empty)
        fill(context.stream(), part.out, 0.0f);
      else
        run(*plan_for(part), part);
      const auto& [bias, residual, activation] = call.options;
      epilogue(context.stream(), call.out.slice(0, begin, size), part.out, bias,
               residual ? residual.slice(0, begin, size) : View{}, activation);
      return true;
    });
    return {};
  }

  // Mixed types, 8 bits, broadcast rows, or strides the library refuses: dense f32 copies of both
  // factors.
  Answer widened(const LinearArgs& call) {
    LinearArgs wide = call;
    wide.w = as_f32(w_scratch, call.w);
    wide.x = as_f32(x_scratch, call.x);
    const Answer answer = fused(wide);
    return answer.ran ? answer : with_epilogue(wide);
  }

  Answer native_gate(const GatedLinearArgs& call) {
    const auto& [out, x, w] = call;
    if (x.dtype != DType::bf16 || w.dtype != DType::bf16 || out.dtype != DType::bf16)
      return decline("takes bf16 only");
    if (x.dim(0) < kMinGatedRows) return decline("few rows: the library splits the weights better");
    if (w.stride(1) != 1) return decline("takes weights with contiguous rows");
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
    if (const char* reason = sm90_gate_supports(params)) return decline(reason);
    const char* error = sm90_gate(params, context.stream());
    require(error == nullptr, ErrorKind::device, "gated_linear: native: ", error);
    return {};
  }
};

Gemm::Gemm(Context& context)
    : state_(std::make_unique<State>(context)),
      linear_(
          "linear",
          {{"cublaslt", [this](const LinearArgs& c) { return state_->fused(c); }},
           {"cublaslt, epilogue", [this](const LinearArgs& c) { return state_->with_epilogue(c); }},
           {"cublaslt, widened", [this](const LinearArgs& c) { return state_->widened(c); }}}),
      gated_(
          "gated_linear",
          {{"native", [this](const GatedLinearArgs& c) { return state_->native_gate(c); }},
           {"linear and activation", [this](const GatedLinearArgs& c) -> Answer {
              return {.note = run({c.out, c.x, c.w, {.activation = Activation::silu_gate}}).name};
            }}}) {}
Gemm::~Gemm() = default;

Ran Gemm::run(const LinearArgs& call) { return linear_.run(call); }
Ran Gemm::run_gated(const GatedLinearArgs& call) { return gated_.run(call); }

}  // namespace orrery::cuda
