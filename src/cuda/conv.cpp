#include "cuda/conv.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "cuda/kernels.h"
#include "cuda/kernels/sm90_conv.h"

namespace orrery::cuda {

namespace {

// The view as [batch, channels, space...], which is cuDNN's order of dimensions; the strides say
// that channels are innermost. Strides of dimensions of size 1 carry no meaning: they become what a
// dense tensor would have, since engines look at them.
struct Layout {
  Shape dims, strides;
};

Layout layout_of(int64_t batch, int64_t batch_stride, int64_t channels,
                 std::initializer_list<std::pair<int64_t, int64_t>> space) {
  Layout layout;
  layout.dims = {batch, channels};
  layout.strides = {batch_stride, 1};
  for (const auto& [size, stride] : space) {
    layout.dims.push_back(size);
    layout.strides.push_back(stride);
  }
  int64_t dense = channels;
  for (int d = layout.dims.rank() - 1; d >= 0; --d) {
    if (d == 1) continue;
    if (layout.dims[d] == 1) layout.strides[d] = dense;
    dense = layout.strides[d] * layout.dims[d];
  }
  return layout;
}

bool merges(const View& x, int outer, int inner) {
  return x.dim(outer) == 1 || x.dim(inner) == 1 ||
         x.stride(outer) == x.stride(inner) * x.dim(inner);
}

// Stride of two merged dimensions.
int64_t merged_stride(const View& x, int outer, int inner) {
  return x.dim(inner) == 1 ? x.stride(outer) : x.stride(inner);
}

int64_t alignment_of(const View& x) {
  const auto address = int64_t(reinterpret_cast<uintptr_t>(x.data));
  return std::min<int64_t>(16, address & -address);
}

// What cuDNN's engines can be trusted with: some write past the rows of a tensor with gaps, or read
// 16 bytes from an odd address, whatever strides and alignment they are told.
bool is_dense(const View& x) { return !x || (x.contiguous() && alignment_of(x) == 16); }

bool is_plain(const Conv3d& conv) {
  return conv.stride == std::array<int64_t, 3>{1, 1, 1} &&
         conv.pad_before == std::array<int64_t, 3>{} && conv.pad_after == std::array<int64_t, 3>{};
}

// [positions, C] when the outer dimensions allow it.
std::optional<View> as_rows(const View& t) {
  if (!t) return View{};
  if (!merges(t, 1, 2)) return std::nullopt;
  const int64_t plane = t.dim(1) * t.dim(2), inner = merged_stride(t, 1, 2);
  if (t.dim(0) != 1 && plane != 1 && t.stride(0) != plane * inner) return std::nullopt;
  View rows = t;
  rows.shape = {t.dim(0) * plane, t.dim(3)};
  rows.strides = {plane == 1 ? t.stride(0) : inner, 1};
  return rows;
}

// Gathered columns of the convolution in time, at most this much at once.
constexpr int64_t kMaxColumnBytes = int64_t{64} << 20;

// Sums of frames for the convolution of pairs, at most about this much at once.
constexpr int64_t kMaxPairBytes = int64_t{256} << 20;
constexpr int64_t kPairRows = 8;  // of a tile

constexpr const char* kRowsApart = "takes tensors whose positions are the rows of a matrix";

int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

}  // namespace

// A call whose w is seen as [Cout, kd, kh, kw, Cin], and whose x is f32 where w is.
struct Convolution::Problem : Conv3dArgs {
  // How the three space axes reach cuDNN: a kernel of depth 1 makes depth a batch, one of height
  // and width 1 makes a plane of (depth, positions); two-dimensional engines are more and faster.
  enum class Fold { planes, columns, none };
  Fold fold() const {
    if (w.dim(1) == 1 && conv.stride[0] == 1 && conv.pad_before[0] == 0 && conv.pad_after[0] == 0)
      return Fold::planes;
    const bool flat =
        w.dim(2) == 1 && w.dim(3) == 1 && conv.stride[1] == 1 && conv.stride[2] == 1 &&
        conv.pad_before[1] + conv.pad_after[1] + conv.pad_before[2] + conv.pad_after[2] == 0;
    if (flat && merges(x, 1, 2) && merges(out, 1, 2) && (!residual || merges(residual, 1, 2)))
      return Fold::columns;
    return Fold::none;
  }

  Layout layout(const View& t) const {
    switch (fold()) {
      case Fold::planes:
        return layout_of(t.dim(0), t.stride(0), t.dim(3),
                         {{t.dim(1), t.stride(1)}, {t.dim(2), t.stride(2)}});
      case Fold::columns:
        return layout_of(1, 0, t.dim(3),
                         {{t.dim(0), t.stride(0)}, {t.dim(1) * t.dim(2), merged_stride(t, 1, 2)}});
      case Fold::none: break;
    }
    return layout_of(1, 0, t.dim(3),
                     {{t.dim(0), t.stride(0)}, {t.dim(1), t.stride(1)}, {t.dim(2), t.stride(2)}});
  }

  Layout filter_layout() const {
    const int64_t cout = w.dim(0), cin = w.dim(4), kd = w.dim(1), kh = w.dim(2), kw = w.dim(3);
    switch (fold()) {
      case Fold::planes: return layout_of(cout, kh * kw * cin, cin, {{kh, kw * cin}, {kw, cin}});
      case Fold::columns: return layout_of(cout, kd * cin, cin, {{kd, cin}, {1, cin}});
      case Fold::none: break;
    }
    return layout_of(cout, kd * kh * kw * cin, cin,
                     {{kd, kh * kw * cin}, {kh, kw * cin}, {kw, cin}});
  }

  std::vector<int64_t> axes(const std::array<int64_t, 3>& values, int64_t neutral) const {
    switch (fold()) {
      case Fold::planes: return {values[1], values[2]};
      case Fold::columns: return {values[0], neutral};
      case Fold::none: break;
    }
    return {values[0], values[1], values[2]};
  }

  std::vector<int64_t> key() const {
    std::vector<int64_t> k;
    const auto push = [&](const View& t) {
      k.push_back(t ? int64_t(t.dtype) : -1);
      if (!t) return;
      k.push_back(alignment_of(t));
      for (int d = 0; d < t.rank(); ++d) {
        k.push_back(t.dim(d));
        k.push_back(t.stride(d));
      }
    };
    for (const View& t : {View(out), x, w, bias, residual}) push(t);
    for (const auto& values : {conv.stride, conv.dilation, conv.pad_before, conv.pad_after}) {
      k.insert(k.end(), values.begin(), values.end());
    }
    return k;
  }
};

// A planned graph and the ids of its tensors; no graph when cuDNN has no engine.
struct Convolution::Plan {
  std::unique_ptr<CudnnGraph> graph;
  int64_t x = 0, w = 0, bias = 0, residual = 0, out = 0;
  std::string note;
};

Convolution::Convolution(Context& context, CudnnHandle& handle, Gemm& gemm)
    : context_(context),
      handle_(handle),
      gemm_(gemm),
      workspace_(context),
      wide_(context),
      dense_x_(context),
      dense_out_(context),
      dense_residual_(context),
      pairs_(context),
      list_("conv3d", {{"pairs of frames", [this](const Problem& p) { return pairs(p); }},
                       {"gemm", [this](const Problem& p) { return pointwise(p); }},
                       {"gemm of columns", [this](const Problem& p) { return columns(p); }},
                       {"cudnn", [this](const Problem& p) { return cudnn(p); }},
                       {"direct", [this](const Problem& p) { return direct(p); }}}) {}
Convolution::~Convolution() = default;

void Convolution::forget(const void* data, size_t bytes) {
  const void* end = static_cast<const std::byte*>(data) + bytes;
  for (auto it = weights_.lower_bound({data, Form{}});
       it != weights_.end() && it->first.first < end;) {
    // The entry leaves the map before its own memory is released, which calls here again.
    const Tensor derived = std::move(it->second);
    it = weights_.erase(it);
  }
}

View Convolution::derived(const View& w, Form form) {
  const bool pairs = form == Form::pairs;
  const DType dtype = form == Form::f32 ? DType::f32 : DType::bf16;
  const Shape shape = pairs ? Shape{4, w.dim(2), w.dim(3), w.dim(0), w.dim(4)} : w.shape;
  Tensor& tensor = weights_[{w.data, form}];
  if (tensor.view && tensor.view.shape == shape) return tensor.view;
  context_.require_eager("the first use of a convolution's weights");
  tensor.buffer = context_.allocate(size_t(shape.numel() * size_of(dtype)));
  tensor.view = make_mut_view(tensor.buffer.data(), shape, dtype, DeviceKind::cuda);
  if (!pairs) {
    copy(context_.stream(), tensor.view, w);
    return tensor.view;
  }
  const View taps = w.permute({1, 2, 3, 0, 4});
  constexpr float kFactors[4][3] = {{1, 0, 0}, {0.5f, 0.5f, 0.5f}, {0.5f, -0.5f, 0.5f}, {0, 0, 1}};
  for (int64_t product = 0; product < 4; ++product) {
    std::vector<Term> terms;
    for (int64_t tap = 0; tap < 3; ++tap) {
      const float factor = kFactors[product][tap];
      if (factor != 0) terms.push_back({factor, taps.select(0, tap)});
    }
    lincomb(context_.stream(), tensor.view.select(0, product), terms);
  }
  return tensor.view;
}

View Convolution::dense_filter(const Problem& p) {
  return derived(p.w, p.x.dtype == DType::f32 ? Form::f32 : Form::bf16);
}

// Three taps in time, two frames at once: two thirds of the products, and of the power they take.
// Works in bands of rows, since t is twice as large as x.
Answer Convolution::pairs(const Problem& p) {
  const Conv3d& conv = p.conv;
  const View& w = p.w;
  const int64_t cin = p.x.dim(3), cout = p.out.dim(3), frames = p.out.dim(0), width = p.x.dim(2);
  const auto rows_dense = [](const View& t) {
    return !t ||
           (t.dtype == DType::bf16 && t.stride(3) == 1 && t.stride(2) == t.dim(3) &&
            t.stride(1) == t.dim(2) * t.dim(3) && t.stride(0) % 8 == 0 && alignment_of(t) == 16);
  };
  const bool fits = w.dtype == DType::bf16 && w.dim(1) == 3 && w.dim(2) == 3 && w.dim(3) == 3 &&
                    conv.stride == std::array<int64_t, 3>{1, 1, 1} &&
                    conv.dilation == std::array<int64_t, 3>{1, 1, 1} && rows_dense(p.x) &&
                    rows_dense(p.out) && rows_dense(p.residual) &&
                    (!p.bias || (p.bias.dtype == DType::bf16 && alignment_of(p.bias) == 16));
  if (!fits) return decline("takes dense bf16, three taps an axis, each next to the other");
  Sm90PairConvParams params;
  params.cin = int(cin);
  params.cout = int(cout);
  params.bias = p.bias.data;
  params.out_stride = std::max<int64_t>(p.out.stride(0), 8);
  params.residual_stride = p.residual ? p.residual.stride(0) : 0;
  params.columns_in = int(width);
  params.columns = int(p.out.dim(2));
  params.pad_columns = int(conv.pad_before[2]);
  params.out = p.out.mut();
  params.residual = p.residual.data;
  if (const char* reason = sm90_pair_conv_supports(params)) return decline(reason);

  params.u = derived(w, Form::pairs).data;
  const int64_t pairs = ceil_div(frames, 2), height = p.out.dim(1);
  const int64_t row_bytes = 4 * width * cin * size_of(DType::bf16),
                budget = kMaxPairBytes / row_bytes;
  // As many pairs as fit whole; else one, in bands of rows that tiles fill.
  const int64_t group = std::clamp<int64_t>(budget / p.x.dim(1), 1, pairs);
  const int64_t bands = ceil_div(height, std::max(budget - 2, kPairRows));
  const int64_t band = ceil_div(ceil_div(height, bands), kPairRows) * kPairRows;
  for (int64_t pair = 0; pair < pairs; pair += group) {
    params.pairs = int(std::min(group, pairs - pair));
    params.frames = int(std::min<int64_t>(2 * params.pairs, frames - 2 * pair));
    for (int64_t row = 0; row < height; row += band) {
      const int64_t rows = std::min(band, height - row);
      const int64_t begin = std::max<int64_t>(0, row - conv.pad_before[1]);
      const int64_t end = std::min(p.x.dim(1), row - conv.pad_before[1] + rows + 2);
      const MutView t = pairs_.tensor({params.pairs, 4, end - begin, width, cin}, DType::bf16);
      pair_frames(context_.stream(), t, p.x, 2 * pair - conv.pad_before[0], begin);
      params.t = t.data;
      params.rows_in = int(end - begin);
      params.rows = int(rows);
      params.pad_rows = int(begin - (row - conv.pad_before[1]));
      const auto part = [&](const View& all) {
        return all.slice(0, 2 * pair, params.frames).slice(1, row, rows).data;
      };
      params.out = const_cast<void*>(part(p.out));
      params.residual = p.residual ? part(p.residual) : nullptr;
      const char* error = sm90_pair_conv(params, context_.stream());
      require(error == nullptr, ErrorKind::device, "cuda: convolution of pairs of frames: ", error);
    }
  }
  return {};
}

Answer Convolution::pointwise(const Problem& p) {
  if (p.w.numel() != p.w.dim(0) * p.w.dim(4) || !is_plain(p.conv))
    return decline("takes kernels of one position");
  const std::optional<View> out = as_rows(p.out), x = as_rows(p.x), residual = as_rows(p.residual);
  if (!out || !x || !residual) return decline(kRowsApart);
  const View w = dense_filter(p).reshape({p.w.dim(0), p.w.dim(4)});
  return {
      .note =
          gemm_.run({MutView::cast(*out), *x, w, {.bias = p.bias, .residual = *residual}}).name};
}

// A kernel that is a line in time: its few frames side by side are the rows of a product. Several
// times faster than the engines that cuDNN has for this.
Answer Convolution::columns(const Problem& p) {
  const int64_t taps = p.w.dim(1), cin = p.w.dim(4);
  Conv3d flat = p.conv;
  flat.stride[0] = 1;
  if (p.w.dim(2) != 1 || p.w.dim(3) != 1 || taps == 1 || !is_plain(flat))
    return decline("takes kernels that are a line in time");
  const std::optional<View> out = as_rows(p.out), residual = as_rows(p.residual);
  if (!out || !residual) return decline(kRowsApart);
  const View w = dense_filter(p).reshape({p.w.dim(0), taps * cin});
  // Overlapping windows: frame d' of tap n is frame d' stride + n dilation.
  View windows = p.x;
  windows.shape = {p.out.dim(0), p.x.dim(1), p.x.dim(2), taps, cin};
  windows.strides = {p.x.stride(0) * p.conv.stride[0], p.x.stride(1), p.x.stride(2),
                     p.x.stride(0) * p.conv.dilation[0], 1};
  const int64_t plane = p.x.dim(1) * p.x.dim(2),
                frame_bytes = plane * taps * cin * size_of(p.x.dtype);
  const int64_t step = std::clamp<int64_t>(kMaxColumnBytes / frame_bytes, 1, p.out.dim(0));
  for (int64_t begin = 0; begin < p.out.dim(0); begin += step) {
    const int64_t frames = std::min(step, p.out.dim(0) - begin), rows = frames * plane;
    const MutView columns = dense_x_.tensor({frames, p.x.dim(1), p.x.dim(2), taps, cin}, p.x.dtype);
    copy(context_.stream(), columns, windows.slice(0, begin, frames));
    const View added = *residual ? residual->slice(0, begin * plane, rows) : View{};
    gemm_.run({MutView::cast(out->slice(0, begin * plane, rows)),
               columns.reshape({rows, taps * cin}),
               w,
               {.bias = p.bias, .residual = added}});
  }
  return {};
}

const Convolution::Plan& Convolution::plan_for(const Problem& p) {
  std::unique_ptr<Plan>& slot = plans_[p.key()];
  if (slot) return *slot;
  context_.require_eager("the first convolution of a shape");
  slot = std::make_unique<Plan>();
  Plan& plan = *slot;
  try {
    plan.graph = std::make_unique<CudnnGraph>(handle_);
    CudnnGraph& graph = *plan.graph;
    const auto describe = [&](const View& t, const Layout& layout,
                              CudnnGraph::Place place = CudnnGraph::Place::device) {
      const bool is_inner = place == CudnnGraph::Place::inner;
      return graph.tensor({layout.dims, layout.strides, is_inner ? DType::f32 : t.dtype, place,
                           is_inner ? 16 : alignment_of(t)});
    };
    const Layout y = p.layout(p.out);
    plan.x = describe(p.x, p.layout(p.x));
    plan.w = describe(p.w, p.filter_layout());
    plan.out = describe(p.out, y);
    // conv -> + residual -> + bias, f32 in between, one rounding at the end. In this order cuDNN
    // has its fastest engines.
    const int adds = (p.bias ? 1 : 0) + (p.residual ? 1 : 0);
    int64_t value = adds ? describe(p.out, y, CudnnGraph::Place::inner) : plan.out;
    graph.convolution(value, plan.x, plan.w,
                      {p.axes(p.conv.stride, 1), p.axes(p.conv.dilation, 1),
                       p.axes(p.conv.pad_before, 0), p.axes(p.conv.pad_after, 0)});
    if (p.residual) {
      plan.residual = describe(p.residual, p.layout(p.residual));
      const int64_t sum = p.bias ? describe(p.out, y, CudnnGraph::Place::inner) : plan.out;
      graph.add(sum, value, plan.residual);
      value = sum;
    }
    if (p.bias) {
      Layout layout = y;
      for (int d = 0; d < layout.dims.rank(); ++d) {
        if (d != 1) layout.dims[d] = 1;
        layout.strides[d] = d == 1 ? 1 : p.bias.dim(0);
      }
      plan.bias = describe(p.bias, layout);
      graph.add(plan.out, value, plan.bias);
    }
    const bool found = graph.plan(p.x.dtype == DType::f32);
    plan.note = graph.engine();
    if (!found) plan.graph.reset();
  } catch (const Error& error) {
    // cuDNN refuses what it does not support while the graph is described.
    plan.note = error.what();
    plan.graph.reset();
  }
  return plan;
}

void Convolution::run_plan(const Problem& p, const Plan& plan) {
  std::vector<CudnnGraph::Binding> bindings{
      {plan.x, p.x.data}, {plan.w, p.w.data}, {plan.out, p.out.data}};
  if (p.bias) bindings.push_back({plan.bias, p.bias.data});
  if (p.residual) bindings.push_back({plan.residual, p.residual.data});
  plan.graph->run(bindings, workspace_.get(size_t(plan.graph->workspace_bytes())));
}

Answer Convolution::cudnn(const Problem& p) {
  if (p.x.dtype != p.out.dtype) return decline("takes one type");
  if (!is_dense(p.bias)) return decline("takes a bias at a multiple of 16 bytes");
  Problem dense = p;
  dense.w = dense_filter(p);
  if (!is_dense(p.out)) dense.out = dense_out_.tensor(p.out.shape, p.out.dtype);
  if (!is_dense(p.residual))
    dense.residual = dense_residual_.tensor(p.residual.shape, p.residual.dtype);
  if (!is_dense(p.x)) dense.x = dense_x_.tensor(p.x.shape, p.x.dtype);
  const Plan* plan = &plan_for(dense);
  const bool pads = !plan->graph && p.conv.pad_before != p.conv.pad_after;
  if (pads) {
    // Few engines take unequal padding: pad in memory instead.
    Shape shape = p.x.shape;
    for (int d = 0; d < 3; ++d)
      shape[d] += p.conv.pad_before[size_t(d)] + p.conv.pad_after[size_t(d)];
    dense.x = dense_x_.tensor(shape, p.x.dtype);
    dense.conv.pad_before = dense.conv.pad_after = {};
    plan = &plan_for(dense);
  }
  if (!plan->graph) return decline(plan->note);
  const Stream stream = context_.stream();
  if (pads) {
    const MutView to = MutView::cast(dense.x);
    MutView inside = to;
    for (int d = 0; d < 3; ++d) inside = inside.slice(d, p.conv.pad_before[size_t(d)], p.x.dim(d));
    fill(stream, to, 0.0f);
    copy(stream, inside, p.x);
  } else if (dense.x.data != p.x.data) {
    copy(stream, MutView::cast(dense.x), p.x);
  }
  if (p.residual && dense.residual.data != p.residual.data)
    copy(stream, MutView::cast(dense.residual), p.residual);
  run_plan(dense, *plan);
  if (dense.out.data != p.out.data) copy(stream, p.out, dense.out);
  return {.note = plan->note};
}

Answer Convolution::direct(const Problem& p) {
  conv_direct(context_.stream(), p.out, p.x, dense_filter(p), p.bias, p.conv, p.residual);
  return {};
}

Ran Convolution::run(const Conv3dArgs& call) {
  Problem p{call};
  p.w = call.w.permute({0, 2, 3, 4, 1});
  if (p.x.dtype == DType::bf16 && p.w.dtype != DType::bf16) {
    const MutView wide = wide_.tensor(p.x.shape, DType::f32);
    copy(context_.stream(), wide, p.x);
    p.x = wide;
  }
  return list_.run(p);
}

}  // namespace orrery::cuda
