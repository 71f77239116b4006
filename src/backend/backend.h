// The operations a model is made of, and the contract of each. Backend is a non-virtual interface:
// the public calls check shapes, types and devices once for every backend, count flops and bytes,
// and time the call when profiling is on; the private do_* functions are pure arithmetic on
// arguments already known to be good.
//
// Numeric contract of every operation: f32 or bf16 in, f32 accumulation, one rounding out, unless
// the operation says otherwise. "Rows" of a tensor are its last dimension. Outputs come first and
// never overlap inputs unless the operation says so.
//
// Operations that several implementations can compute return who did (Ran), which stats() counts.
//
// One backend serves one thread of control; calls run in order. Buffers it made must not outlive
// it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/calls.h"
#include "base/work_observer.h"
#include "tensor/quantise.h"
#include "tensor/tensor.h"
#include "tensor/view.h"

namespace orrery {

enum class NormKind : uint8_t {
  qwen,      // round(round(x * rsqrt(mean(x^2) + eps)) * w): two roundings in bf16
  nemotron,  // round(w * x * rsqrt(mean(x^2) + eps)): one rounding
  channel,   // round(x / max(|x|_2, 1e-12)) * sqrt(C) * w: the VAE's norm; eps unused
};

struct Norm {
  NormKind kind = NormKind::qwen;
  float eps = 1e-6f;
  bool silu = false;  // applies SiLU to the result
};

struct Term {
  float factor;
  View x;
};

// Memory of a device, in bytes. Zeros where there is only the host's.
struct MemoryState {
  int64_t free = 0;
  int64_t total = 0;
  int64_t peak = 0;  // the most this backend has had at once: buffers and its own scratch
};

// Totals of one operation since the last reset. seconds is 0 unless profiling.
struct OpStats {
  struct Share {
    int64_t calls = 0;
    double seconds = 0;
  };
  int64_t calls = 0;
  double flops = 0;
  double bytes = 0;
  double seconds = 0;
  std::map<std::string, Share> implementations = {};  // by Ran::name; of operations that return Ran
};
using OpTable = std::map<std::string, OpStats, std::less<>>;
double total_flops(const OpTable& table);
void add(OpTable& sum, const OpTable& table);  // operation by operation

class Backend {
 public:
  virtual ~Backend() = default;
  virtual DeviceKind device() const = 0;
  virtual std::string description() const = 0;  // "cpu: 2 threads, avx2"
  virtual std::string driver() const {
    return "";
  }  // "580.65.06, CUDA 13.0"; empty without a device

  // --- memory

  virtual Buffer allocate(size_t bytes) = 0;
  Tensor allocate_tensor(Shape shape, DType dtype);
  // Host and device copies of equal shape and dtype, both contiguous. On the CPU a memcpy.
  void upload(MutView device_out, View host);
  void download(MutView host_out, View device_x);
  virtual void synchronize() {}
  virtual MemoryState memory() const { return {}; }

  // --- uploads beside the calls (weights that take turns on the device)

  // Pinned host memory, which the device reads by itself; backends without a device return plain
  // memory. Called from any thread. Throws Error{out_of_memory} when no more memory can be pinned.
  virtual Buffer allocate_pinned(size_t bytes) { return allocate_host(bytes); }
  // A lane holds one upload at a time.
  int make_lane() { return next_lane_++; }
  // As upload(), while later calls run: begins when the calls made so far are done, so that they
  // may still read `out`, and is seen by calls made after await_upload() of the lane. Until those
  // are done, `host` stays as it is.
  void upload_beside(int lane, MutView device_out, View host);
  virtual void await_upload(int lane) { (void)lane; }

  // --- elementwise and layout

  // out[i] = x[i] with any strides, broadcast (stride 0) in x, and any of f32/bf16/f16 to f32/bf16.
  void copy(MutView out, View x);
  void fill(MutView out, float value);
  // out = sum of factor * x, accumulated in f32 in the given order. 1 to 8 terms of out's shape,
  // any strides; a term may be `out` itself (same strides).
  void lincomb(MutView out, std::span<const Term> terms);
  void lincomb(MutView out, std::initializer_list<Term> terms) {
    lincomb(out, std::span<const Term>(terms.begin(), terms.size()));
  }
  // x[r, :] = x[r, :] + row, in place; x [M, N], row [N].
  void add_row(MutView x, View row);
  // out [M, N] = activation(x); x [M, N], or [M, 2N] for silu_gate. out may be x except for
  // silu_gate.
  void activation(MutView out, View x, Activation kind);
  // x = x clamped to [low, high], in place; NaN stays NaN. Contiguous f32.
  void clamp(MutView x, float low, float high);
  // out u8 = x from [-1, 1] to [0, 255]: rint(255 clamp(x / 2 + 1 / 2, 0, 1)), half to even; NaN
  // gives 0. Contiguous; x f32 of the same shape.
  void to_bytes(MutView out, View x);
  // Whether no value of x (contiguous f32 or bf16) is NaN or infinite. Waits for the device. True
  // in a dry run.
  bool all_finite(View x);
  // out [M, N] = table[ids[m]]; table [V, N] f32/bf16. ids on the host; each in [0, V).
  // A device takes a host table too, of any alignment: the rows are gathered there and brought.
  void gather_rows(MutView out, View table, std::span<const int64_t> ids);

  // --- projections and norms

  // out [M, N] = activation(x [M, K] . w^T + bias) + residual; w [N, K] with row stride >= K, or
  // its transpose view (stride 1 in dim 0). x and out have contiguous rows. w may be bf16 or f16
  // with f32 x. Either may be an operand of 8 bits with its scales, w then with contiguous rows:
  // the product is that of the values times their scales.
  Ran linear(MutView out, Operand x, Operand w, const LinearOptions& options = {});
  // out [M, N] = silu(x g^T) * (x u^T), rounded once; w [2N, K] holds the rows of g, then those of
  // u. Contiguous rows; w as linear() takes it.
  Ran gated_linear(MutView out, Operand x, Operand w);
  // Rows of x normalised, times weight [C]. out may be x.
  void rms_norm(MutView out, View x, View weight, const Norm& norm);
  // Per head: RMS norm with weight [D] (skipped when weight is empty), then rotation
  // y = x * cos + [-x2 | x1] * sin with halves of D. x, out [S, H, D]; cos, sin f32 [S, D / 2].
  // In bf16 the product terms are rounded as in the reference only to within 2 ulp.
  // out may be x; out may lie inside a larger K buffer (any row stride).
  void qk_norm_rope(MutView out, View x, View weight, View cos, View sin, const Norm& norm);

  // --- matrices of 8 bits (tensor/quantise.h has the arithmetic, which is the same to the bit on
  // every backend)

  // out [M, N] f8e4m3 or i8 with f32 scales = x [M, N] f32 or bf16; rows contiguous. The scales are
  // read or made, as `scaling` says.
  void quantise(MutOperand out, View x, Scaling scaling);
  // out [M, N] f32 or bf16 = the values of x times their scales.
  void dequantise(MutView out, Operand x);

  // --- attention

  // out [Sq, H, D] = softmax(scale * q k^T) v; q [Sq, H, D], k, v [Skv, KV, D]; H divisible by KV;
  // query head h reads KV head h / (H / KV). Any row strides, heads contiguous in a row. Skv = 0 or
  // a row without keys gives zeros and lse = -inf. No Sq x Skv buffer exists.
  Ran attention(MutView out, View q, View k, View v, const AttentionPlan& plan);
  // Fills indices i32 [lists, nq, capacity] and counts i32 [lists, nq] of a BlockMask by the rule
  // of BlockSelection; lists = H / heads_per_list, capacity >= all key blocks. scores, if not
  // empty, receives the ranks, f32 [lists, nq, nk]: natural-log scores, or sums of shares.
  Ran select_blocks(MutView indices, MutView counts, View q, View k,
                    const BlockSelection& selection, MutView scores = {});

  // --- convolution

  // out [D', H', W', Cout] from x [D, H, W, Cin] and w [Cout, Cin, kd, kh, kw] (checkpoint order),
  // plus bias [Cout] and residual (shape of out; may be out itself), both optional. Channels are
  // contiguous; x may have larger strides elsewhere. w is immutable for the life of the backend:
  // reordered copies are cached by its address. In bf16 a kernel of three taps in depth may be
  // applied to sums of two frames and of its taps, each rounded to bf16 (Winograd's F(2, 3) along
  // depth).
  Ran conv3d(MutView out, View x, View w, View bias, const Conv3d& conv, View residual = {});
  // 1-D transposed convolution, channels last: out [s T, Cout], x [T, Cin], w [Cin, Cout, k],
  // out[n] = bias + sum over t s + i - padding = n of w[:, :, i] x[t].
  void conv_transpose1d(MutView out, View x, View w, View bias, int64_t stride, int64_t padding);
  // out = x + sin^2(exp(alpha) x) / (exp(beta) + 1e-9), per channel; x [T, C], alpha, beta f32 [C].
  void snake(MutView out, View x, View alpha, View beta);

  // --- execution

  // Runs fn; a backend with graphs records it at the second call with a key and from then on
  // launches the recording, which counts in stats() as fn did. Whatever fn reads and writes must
  // stay at the same addresses for one key. False when a recording took the place of fn.
  bool replay(const std::string& key, const std::function<void()>& fn);
  // Ends all recordings: what they touch may move or go.
  void forget_replays();
  // True when weights that are applied together should lie in one matrix (one GEMM).
  virtual bool fuses_weights() const { return false; }
  // True when the backend computes nothing (dry run): control flow must not depend on values.
  virtual bool is_dry() const { return false; }

  // --- instrumentation

  const OpTable& stats() const { return stats_; }
  void reset_stats() { stats_.clear(); }
  void set_profiling(bool on) { profiling_ = on; }  // times each call; synchronises the device
  bool profiling() const { return profiling_; }
  // Told of every operation from here on; null for none.
  void set_observer(WorkObserver* observer) { observer_ = observer; }
  bool observed() const { return observer_ != nullptr; }

 private:
  template <typename Fn>
  Ran run(std::string_view op, double flops, double bytes, const Fn& fn);
  // Where its work is queued, for observers.
  virtual void* lane() const { return nullptr; }

  virtual void do_replay(const std::string& key, const std::function<void()>& fn) {
    (void)key;
    fn();
  }
  virtual void do_forget_replays() {}
  virtual void do_upload(MutView out, View host) = 0;
  virtual void do_download(MutView out, View x) = 0;
  virtual void do_upload_beside(int lane, MutView out, View host) {
    (void)lane;
    do_upload(out, host);
  }
  virtual void do_copy(MutView out, View x) = 0;
  virtual void do_fill(MutView out, float value) = 0;
  virtual void do_lincomb(MutView out, std::span<const Term> terms) = 0;
  virtual void do_add_row(MutView x, View row) = 0;
  virtual void do_activation(MutView out, View x, Activation kind) = 0;
  virtual void do_clamp(MutView x, float low, float high) = 0;
  virtual void do_to_bytes(MutView out, View x) = 0;
  virtual bool do_all_finite(View x) = 0;
  virtual void do_gather_rows(MutView out, View table, std::span<const int64_t> ids) = 0;
  virtual Ran do_linear(const LinearArgs& call) = 0;
  virtual Ran do_gated_linear(const GatedLinearArgs& call) = 0;
  virtual void do_quantise(MutOperand out, View x, Scaling scaling) = 0;
  virtual void do_dequantise(MutView out, Operand x) = 0;
  virtual void do_rms_norm(MutView out, View x, View weight, const Norm& norm) = 0;
  virtual void do_qk_norm_rope(MutView out, View x, View weight, View cos, View sin,
                               const Norm& norm) = 0;
  virtual Ran do_attention(const AttentionArgs& call) = 0;
  virtual Ran do_select_blocks(const SelectBlocksArgs& call) = 0;
  virtual Ran do_conv3d(const Conv3dArgs& call) = 0;
  virtual void do_conv_transpose1d(MutView out, View x, View w, View bias, int64_t stride,
                                   int64_t padding) = 0;
  virtual void do_snake(MutView out, View x, View alpha, View beta) = 0;

  OpTable stats_;
  std::map<std::string, OpTable> replay_stats_;  // of one run, by key
  bool profiling_ = false;
  WorkObserver* observer_ = nullptr;
  int next_lane_ = 0;
};

}  // namespace orrery
