// The cases of the operations, once for tests and benchmarks: shapes, types and layouts, and how
// the tensors of a call are made from them. A test holds small cases against the reference
// (harness.h); a benchmark times those at the sizes of the models.
#pragma once

#include <array>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "backend/calls.h"
#include "base/error.h"

namespace orrery::conformance {

enum class Scale : uint8_t {
  test,    // every path in little time
  cpu,     // the shipped model and layers of Cosmos3-Nano
  device,  // Cosmos3-Nano at 1280 x 720, 189 frames: 44,160 rows
};

// How a tensor lies in memory.
enum class Layout : uint8_t {
  contiguous,
  pitched,     // rows of the last dimension in longer rows, not at their start
  odd,         // the same at odd addresses
  outer_gaps,  // gaps between slices of the first dimension only
};

// A tensor of a call. `size` scales its normal numbers; 0 makes an output.
struct Wanted {
  Shape shape;
  DType dtype = DType::f32;
  Layout layout = Layout::contiguous;
  double size = 1;
};
using Make = std::function<MutView(const Wanted&)>;

// ---- linear and gated_linear ----------------------------------------------------------------

struct LinearCase {
  std::string name;
  int64_t m, n, k;
  DType x, w, out;
  Layout layout = Layout::contiguous;
  bool transposed = false;  // w is a view of [K, N]
  bool has_residual = false;
  Activation activation = Activation::none;

  double flops() const { return 2.0 * double(m) * double(n) * double(k); }
};

inline LinearArgs arguments(const LinearCase& c, const Make& make) {
  LinearArgs call;
  call.out = make({{c.m, c.n}, c.out, c.layout, 0});
  call.x = make({{c.m, c.k}, c.x, c.layout});
  call.w = c.transposed ? View(make({{c.k, c.n}, c.w, c.layout})).permute({1, 0})
                        : View(make({{c.n, c.k}, c.w, c.layout}));
  if (c.has_residual) call.options.residual = make({{c.m, c.n}, c.out});
  call.options.activation = c.activation;
  return call;
}

std::vector<LinearCase> linear_cases(Scale scale);

struct GatedLinearCase {
  int64_t m, n, k;
  DType dtype = DType::bf16;
  Layout layout = Layout::contiguous;

  std::string name() const { return concat(m, " x ", k, " x 2 x ", n); }
  double flops() const { return 4.0 * double(m) * double(n) * double(k); }
};

inline GatedLinearArgs arguments(const GatedLinearCase& c, const Make& make) {
  const MutView out = make({{c.m, c.n}, c.dtype, c.layout, 0});
  const View x = make({{c.m, c.k}, c.dtype, c.layout});
  return {out, x, make({{2 * c.n, c.k}, c.dtype, c.layout, 0.2})};
}

std::vector<GatedLinearCase> gated_linear_cases(Scale scale);

// ---- attention and its choice of blocks -----------------------------------------------------

struct AttentionCase {
  std::string name;
  int64_t queries, keys, heads, kv_heads, d;
  bool causal = false;

  float scale() const { return 1 / std::sqrt(float(d)); }
  double flops() const {
    return (causal ? 2.0 : 4.0) * double(queries) * double(keys) * double(heads * d);
  }
};

struct AttentionTensors {
  MutView out;
  View q, k, v;
};

inline AttentionTensors arguments(const AttentionCase& c, DType dtype, Layout layout,
                                  const Make& make) {
  const MutView out = make({{c.queries, c.heads, c.d}, dtype, layout, 0});
  const View q = make({{c.queries, c.heads, c.d}, dtype, layout});
  const View k = make({{c.keys, c.kv_heads, c.d}, dtype, layout});
  return {out, q, k, make({{c.keys, c.kv_heads, c.d}, dtype, layout})};
}

std::vector<AttentionCase> attention_cases(Scale scale);

// ---- convolution ----------------------------------------------------------------------------

struct ConvCase {
  std::string name;
  Shape x;  // [D, H, W, Cin]
  int64_t cout;
  std::array<int64_t, 3> kernel;
  Conv3d conv;

  Shape out() const {
    Shape shape{0, 0, 0, cout};
    for (int d = 0; d < 3; ++d) {
      const auto i = size_t(d);
      const int64_t padded = x[d] + conv.pad_before[i] + conv.pad_after[i];
      shape[d] = (padded - conv.dilation[i] * (kernel[i] - 1) - 1) / conv.stride[i] + 1;
    }
    return shape;
  }
  // Terms of one result.
  double depth() const { return double(x[3] * kernel[0] * kernel[1] * kernel[2]); }
  double flops() const { return 2.0 * double(out().numel()) * depth(); }
};

struct ConvVariant {
  DType x, w;
  Layout layout = Layout::contiguous;
  bool has_bias = false, has_residual = false;
};

inline Conv3dArgs arguments(const ConvCase& c, const ConvVariant& v, const Make& make) {
  Conv3dArgs call;
  call.out = make({c.out(), v.x, v.layout, 0});
  call.x = make({c.x, v.x, v.layout});
  call.w =
      make({{c.cout, c.x[3], c.kernel[0], c.kernel[1], c.kernel[2]}, v.w, Layout::contiguous, 0.3});
  if (v.has_bias) call.bias = make({{c.cout}, v.x});
  if (v.has_residual) call.residual = make({c.out(), v.x, v.layout});
  call.conv = c.conv;
  return call;
}

std::vector<ConvCase> conv_cases(Scale scale);

}  // namespace orrery::conformance
