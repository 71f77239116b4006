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
  CpuBackend(const Kernels& kernels, int threads, LinearFunction product)
      : context_{kernels, threads, product} {
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
  void do_linear(MutView out, View x, View w, const LinearOptions& options) override {
    cpu::linear(context_, out, x, w, options);
  }
  void do_gated_linear(MutView out, View x, View w) override {
    const Tensor both = allocate_host_tensor({x.dim(0), w.dim(0)}, DType::f32);
    cpu::linear(context_, both.view, x, w, {});
    cpu::activation(context_, out, both.view, Activation::silu_gate);
  }
  void do_rms_norm(MutView out, View x, View weight, const Norm& norm) override {
    cpu::rms_norm(context_, out, x, weight, norm);
  }
  void do_qk_norm_rope(MutView out, View x, View weight, View cos, View sin,
                       const Norm& norm) override {
    cpu::qk_norm_rope(context_, out, x, weight, cos, sin, norm);
  }
  void do_attention(MutView out, View q, View k, View v, const AttentionPlan& plan) override {
    last_attention_ = cpu::attention(context_, out, q, k, v, plan);
  }
  void do_select_blocks(MutView indices, MutView counts, View q, View k,
                        const BlockSelection& selection, MutView scores) override {
    cpu::select_blocks(context_, indices, counts, q, k, selection, scores);
  }
  void do_conv3d(MutView out, View x, View w, View bias, const Conv3d& conv,
                 View residual) override {
    cpu::conv3d(context_, out, x, w, bias, conv, residual);
  }
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

  Context context_;
};

}  // namespace

// OpenMP reads OMP_NUM_THREADS.
int default_threads() { return std::min(omp_get_max_threads(), usable_cores()); }

std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options) {
  require(options.num_threads >= 0, "cpu: num_threads is ", options.num_threads,
          ", expected 0 (all) or more");
  const int threads = options.num_threads > 0 ? options.num_threads : default_threads();
  return std::make_unique<CpuBackend>(choose_kernels(options.kernels), threads,
                                      choose_linear(options.linear));
}

}  // namespace orrery::cpu
