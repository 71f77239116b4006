#include "cpu/cpu_backend.h"

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "base/cores.h"
#include "base/error.h"
#include "cpu/ops.h"

namespace orrery::cpu {

namespace {

class CpuBackend final : public Backend {
 public:
  CpuBackend(const Kernels& kernels, int threads, std::string linear)
      : context_{kernels, threads}, linear_name_(std::move(linear)) {
    require(linear_name_.empty() || linear_.has(linear_name_), "cpu linear: \"", linear_name_,
            "\" is not one of ", linear_.names());
    // oneDNN asks OpenMP how many threads a call may use: one, also on these.
    context_.pool = std::make_shared<ThreadPool>(threads, [] { omp_set_num_threads(1); });
    context_.threads = context_.pool->size();
  }

  DeviceKind device() const override { return DeviceKind::cpu; }
  std::string description() const override {
    return concat("cpu: ", context_.threads, context_.threads == 1 ? " thread, " : " threads, ",
                  context_.kernels.name);
  }
  Buffer allocate(size_t bytes) override { return allocate_host(bytes); }

 private:
  void do_upload(MutView out, View host) override { copy_bytes(out, host); }
  void do_download(MutView out, View x) override { copy_bytes(out, x); }
  void do_copy(MutView out, View x) override { cpu::copy(context_, out, x); }
  void do_fill(MutView out, float value) override { cpu::fill(context_, out, value); }
  void do_lincomb(MutView out, std::span<const Term> terms) override {
    cpu::lincomb(context_, out, terms);
  }
  void do_add_row(MutView x, View row) override { cpu::add_row(context_, x, row); }
  void do_activation(MutView out, View x, Activation kind) override {
    cpu::activation(context_, out, x, kind);
  }
  void do_clamp(MutView x, float low, float high) override { cpu::clamp(context_, x, low, high); }
  void do_to_bytes(MutView out, View x) override { cpu::to_bytes(context_, out, x); }
  bool do_all_finite(View x) override { return cpu::all_finite(context_, x); }
  void do_gather_rows(MutView out, View table, std::span<const int64_t> ids) override {
    cpu::gather_rows(context_, out, table, ids);
  }
  Ran do_linear(const LinearArgs& call) override { return linear_.run(call, linear_name_); }
  Ran do_gated_linear(const GatedLinearArgs& call) override { return gated_linear_.run(call); }
  void do_quantise(MutOperand out, View x, Scaling scaling) override {
    cpu::quantise(context_, out, x, scaling);
  }
  void do_dequantise(MutView out, Operand x) override { cpu::dequantise(context_, out, x); }
  void do_rms_norm(MutView out, View x, View weight, const Norm& norm) override {
    cpu::rms_norm(context_, out, x, weight, norm);
  }
  void do_qk_norm_rope(MutView out, View x, View weight, View cos, View sin,
                       const Norm& norm) override {
    cpu::qk_norm_rope(context_, out, x, weight, cos, sin, norm);
  }
  Ran do_attention(const AttentionArgs& call) override {
    return attention_.run(call, call.plan.implementation);
  }
  Ran do_select_blocks(const SelectBlocksArgs& call) override { return select_blocks_.run(call); }
  Ran do_conv3d(const Conv3dArgs& call) override { return conv3d_.run(call); }
  void do_conv_transpose1d(MutView out, View x, View w, View bias, int64_t stride,
                           int64_t padding) override {
    cpu::conv_transpose1d(context_, out, x, w, bias, stride, padding);
  }
  void do_snake(MutView out, View x, View alpha, View beta) override {
    cpu::snake(context_, out, x, alpha, beta);
  }

  static void copy_bytes(const MutView& out, const View& x) {
    if (x.bytes() > 0) std::memcpy(out.mut(), x.data, static_cast<size_t>(x.bytes()));
  }

  // Both products in f32, then what joins them.
  Answer multiply_and_gate(const GatedLinearArgs& call) {
    const Tensor both = allocate_host_tensor({call.x.dim(0), call.w.dim(0)}, DType::f32);
    const Ran product = do_linear({both.view, call.x, call.w});
    cpu::activation(context_, call.out, both.view, Activation::silu_gate);
    return {.note = product.name};
  }

  Context context_;
  std::string linear_name_;  // empty: the best that takes the call
  Implementations<LinearArgs> linear_ = linear_implementations(context_);
  Implementations<GatedLinearArgs> gated_linear_{
      "gated_linear", {{"linear and activation", [this](const GatedLinearArgs& c) {
                          return multiply_and_gate(c);
                        }}}};
  Implementations<AttentionArgs> attention_ = attention_implementations(context_);
  Implementations<SelectBlocksArgs> select_blocks_ = select_blocks_implementations(context_);
  Implementations<Conv3dArgs> conv3d_ = conv3d_implementations(context_);
};

}  // namespace

// OpenMP reads OMP_NUM_THREADS.
int default_threads() { return std::min(omp_get_max_threads(), usable_cores()); }

std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options) {
  require(options.num_threads >= 0, "cpu: num_threads is ", options.num_threads,
          ", expected 0 (all) or more");
  const int threads = options.num_threads > 0 ? options.num_threads : default_threads();
  return std::make_unique<CpuBackend>(choose_kernels(options.kernels), threads, options.linear);
}

}  // namespace orrery::cpu
