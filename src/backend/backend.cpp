#include "backend/backend.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "base/error.h"

namespace orrery {

namespace {

bool is_float(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16; }
bool is_weight(DType dtype) { return is_float(dtype) || dtype == DType::f16; }

struct Checker {
  const char* op;
  DeviceKind device;

  template <typename... Parts>
  void that(bool ok, const Parts&... parts) const {
    require(ok, op, ": ", parts...);
  }
  void on_device(const char* name, const View& x) const {
    that(x.data != nullptr || x.numel() == 0, name, " is empty");
    that(x.device == device, name, " lies on another device than the backend");
  }
  void shape(const char* name, const View& x, const Shape& want) const {
    that(x.shape == want, name, " is ", x.shape, ", expected ", want);
  }
  void rank(const char* name, const View& x, int want) const {
    that(x.rank() == want, name, " is ", x.shape, ", expected ", want, " dimensions");
  }
  void floats(const char* name, const View& x) const {
    that(is_float(x.dtype), name, " is ", name_of(x.dtype), ", expected f32 or bf16");
  }
  void rows(const char* name, const View& x) const {
    that(x.rows_contiguous(), name, " needs a last dimension with stride 1, has ", x.strides);
  }
  // A bias or another weight with one dimension.
  void vector(const char* name, const View& x, int64_t size) const {
    on_device(name, x);
    that(is_weight(x.dtype), name, " is ", name_of(x.dtype), ", expected f32, bf16 or f16");
    shape(name, x, {size});
  }
  // Elements of one type, one after another.
  void plain(const char* name, const View& x, DType dtype) const {
    on_device(name, x);
    that(x.dtype == dtype && x.contiguous(), name, " is ", name_of(x.dtype), " with strides ",
         x.strides, ", expected contiguous ", name_of(dtype));
  }
  // An activation tensor: present, on the device, f32 or bf16, rows contiguous.
  void tensor(const char* name, const View& x) const {
    on_device(name, x);
    floats(name, x);
    rows(name, x);
  }
};

double touched(std::initializer_list<View> views) {
  double bytes = 0;
  for (const View& view : views) {
    if (!view) continue;
    // A broadcast dimension is read once.
    double count = 1;
    for (int i = 0; i < view.rank(); ++i) count *= view.stride(i) == 0 ? 1 : double(view.dim(i));
    bytes += count * double(size_of(view.dtype));
  }
  return bytes;
}

}  // namespace

double total_flops(const OpTable& table) {
  double flops = 0;
  for (const auto& [op, stats] : table) flops += stats.flops;
  return flops;
}

void add(OpTable& sum, const OpTable& table) {
  for (const auto& [op, stats] : table) {
    OpStats& total = sum[op];
    total.calls += stats.calls;
    total.flops += stats.flops;
    total.bytes += stats.bytes;
    total.seconds += stats.seconds;
    for (const auto& [name, share] : stats.implementations) {
      total.implementations[name].calls += share.calls;
      total.implementations[name].seconds += share.seconds;
    }
  }
}

template <typename Fn>
Ran Backend::run(std::string_view op, double flops, double bytes, const Fn& fn) {
  auto it = stats_.find(op);
  if (it == stats_.end()) it = stats_.emplace(std::string(op), OpStats{}).first;
  OpStats& stats = it->second;
  stats.calls += 1;
  stats.flops += flops;
  stats.bytes += bytes;
  if (observer_ != nullptr) observer_->begin(op, lane());
  if (profiling_) synchronize();
  const auto start = std::chrono::steady_clock::now();
  Ran ran;
  if constexpr (std::is_void_v<decltype(fn())>)
    fn();
  else
    ran = fn();
  if (observer_ != nullptr) observer_->end(lane());
  if (profiling_) {
    synchronize();
    ran.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    stats.seconds += ran.seconds;
  }
  if (!ran.name.empty()) {
    OpStats::Share& share = stats.implementations[ran.name];
    share.calls += 1;
    share.seconds += ran.seconds;
  }
  return ran;
}

bool Backend::replay(const std::string& key, const std::function<void()>& fn) {
  const OpTable before = std::exchange(stats_, {});
  bool called = false;
  do_replay(key, [&] {
    called = true;
    fn();
  });
  OpTable& spent = replay_stats_[key];
  if (called) spent = std::move(stats_);
  stats_ = before;
  add(stats_, spent);
  return called;
}

void Backend::forget_replays() {
  replay_stats_.clear();
  do_forget_replays();
}

Tensor Backend::allocate_tensor(Shape shape, DType dtype) {
  Tensor tensor;
  tensor.buffer = allocate(static_cast<size_t>(shape.numel() * size_of(dtype)));
  tensor.view = make_mut_view(tensor.buffer.data(), shape, dtype, device());
  return tensor;
}

namespace {
void check_upload(const Checker& check, const View& out, const View& host) {
  check.on_device("out", out);
  check.shape("host", host, out.shape);
  check.that(host.device == DeviceKind::cpu, "host is not in host memory");
  check.that(host.dtype == out.dtype && host.contiguous() && out.contiguous(),
             "needs equal types and contiguous tensors");
}
}  // namespace

void Backend::upload(MutView out, View host) {
  check_upload({"upload", device()}, out, host);
  run("upload", 0, double(host.bytes()), [&] { do_upload(out, host); });
}

void Backend::upload_beside(int lane, MutView out, View host) {
  const Checker check{"upload_beside", device()};
  check.that(lane >= 0 && lane < next_lane_, "lane ", lane, " was not made");
  check_upload(check, out, host);
  run("upload_beside", 0, double(host.bytes()), [&] { do_upload_beside(lane, out, host); });
}

void Backend::download(MutView out, View x) {
  const Checker check{"download", device()};
  check.on_device("x", x);
  check.shape("out", out, x.shape);
  check.that(out.device == DeviceKind::cpu, "out is not in host memory");
  check.that(x.dtype == out.dtype && x.contiguous() && out.contiguous(),
             "needs equal types and contiguous tensors");
  run("download", 0, double(x.bytes()), [&] { do_download(out, x); });
}

void Backend::copy(MutView out, View x) {
  const Checker check{"copy", device()};
  check.on_device("out", out);
  check.on_device("x", x);
  check.shape("x", x, out.shape);
  check.that(is_float(out.dtype) && is_weight(x.dtype), "cannot convert ", name_of(x.dtype), " to ",
             name_of(out.dtype));
  if (out.numel() == 0) return;
  run("copy", 0, touched({out, x}), [&] { do_copy(out, x); });
}

void Backend::fill(MutView out, float value) {
  const Checker check{"fill", device()};
  check.on_device("out", out);
  check.floats("out", out);
  if (out.numel() == 0) return;
  run("fill", 0, double(out.bytes()), [&] { do_fill(out, value); });
}

void Backend::lincomb(MutView out, std::span<const Term> terms) {
  const Checker check{"lincomb", device()};
  check.on_device("out", out);
  check.floats("out", out);
  check.that(!terms.empty() && terms.size() <= 8, terms.size(), " terms, expected 1 to 8");
  double bytes = double(out.bytes());
  for (const Term& term : terms) {
    check.on_device("term", term.x);
    check.floats("term", term.x);
    check.shape("term", term.x, out.shape);
    check.that(std::isfinite(term.factor), "factor ", term.factor, " is not finite");
    bytes += touched({term.x});
  }
  if (out.numel() == 0) return;
  run("lincomb", 2.0 * double(terms.size()) * double(out.numel()), bytes,
      [&] { do_lincomb(out, terms); });
}

void Backend::add_row(MutView x, View row) {
  const Checker check{"add_row", device()};
  check.tensor("x", x);
  check.rank("x", x, 2);
  check.tensor("row", row);
  check.shape("row", row, {x.dim(1)});
  if (x.numel() == 0) return;
  run("add_row", double(x.numel()), touched({x, x, row}), [&] { do_add_row(x, row); });
}

void Backend::activation(MutView out, View x, Activation kind) {
  const Checker check{"activation", device()};
  check.tensor("out", out);
  check.tensor("x", x);
  check.rank("x", x, 2);
  const int64_t width = kind == Activation::silu_gate ? 2 * out.dim(1) : out.dim(1);
  check.shape("x", x, {out.dim(0), width});
  if (out.numel() == 0) return;
  run("activation", 4.0 * double(out.numel()), touched({out, x}),
      [&] { do_activation(out, x, kind); });
}

void Backend::clamp(MutView x, float low, float high) {
  const Checker check{"clamp", device()};
  check.plain("x", x, DType::f32);
  check.that(low <= high, "the bounds are ", low, " and ", high);
  if (x.numel() == 0) return;
  run("clamp", 2.0 * double(x.numel()), touched({x, x}), [&] { do_clamp(x, low, high); });
}

void Backend::to_bytes(MutView out, View x) {
  const Checker check{"to_bytes", device()};
  check.plain("out", out, DType::u8);
  check.plain("x", x, DType::f32);
  check.shape("out", out, x.shape);
  if (out.numel() == 0) return;
  run("to_bytes", 6.0 * double(x.numel()), touched({out, x}), [&] { do_to_bytes(out, x); });
}

bool Backend::all_finite(View x) {
  const Checker check{"all_finite", device()};
  check.tensor("x", x);
  check.that(x.contiguous(), "x needs contiguous elements, has strides ", x.strides);
  bool finite = true;
  if (x.numel() > 0)
    run("all_finite", double(x.numel()), touched({x}), [&] { finite = do_all_finite(x); });
  return finite;
}

void Backend::gather_rows(MutView out, View table, std::span<const int64_t> ids) {
  const Checker check{"gather_rows", device()};
  check.tensor("out", out);
  if (table.device != DeviceKind::cpu) check.on_device("table", table);
  check.rank("table", table, 2);
  check.that(is_weight(table.dtype), "table is ", name_of(table.dtype));
  check.shape("out", out, {int64_t(ids.size()), table.dim(1)});
  for (int64_t id : ids) {
    check.that(id >= 0 && id < table.dim(0), "id ", id, " outside the table of ", table.dim(0),
               " rows");
  }
  if (out.numel() == 0) return;
  if (table.device == device()) {
    run("gather_rows", 0, 2.0 * double(out.bytes()), [&] { do_gather_rows(out, table, ids); });
    return;
  }
  const Tensor rows = allocate_host_tensor(out.shape, table.dtype);
  const int64_t width = table.dim(1) * size_of(table.dtype),
                step = table.stride(0) * size_of(table.dtype);
  for (size_t i = 0; i < ids.size(); ++i) {
    std::memcpy(rows.view.as<std::byte>() + int64_t(i) * width,
                static_cast<const std::byte*>(table.data) + ids[i] * step, size_t(width));
  }
  const Tensor brought = allocate_tensor(out.shape, table.dtype);
  upload(brought.view, rows.view);
  copy(out, brought.view);
  synchronize();  // both go
}

namespace {
// A factor of a product: plain values, or 8 bits with scales of the right shape.
void check_operand(const Checker& check, const char* name, const Operand& x) {
  check.rank(name, x, 2);
  check.on_device(name, x);
  if (!x.scales) {
    return check.that(!is_narrow(x.dtype), name, " is ", name_of(x.dtype), " without scales");
  }
  check.that(is_narrow(x.dtype), name, " is ", name_of(x.dtype), ", which takes no scales");
  check.rows(name, x);
  check.on_device("scales", x.scales);
  check.shape("scales", x.scales, x.block.shape_for(x.shape));
  check.that(x.scales.dtype == DType::f32, "scales are ", name_of(x.scales.dtype),
             ", expected f32");
}

void check_product(const Checker& check, const Operand& x, const Operand& w) {
  check_operand(check, "x", x);
  check_operand(check, "w", w);
  if (!x.scales) check.tensor("x", x);
  check.that(w.scales || is_weight(w.dtype), "w is ", name_of(w.dtype));
  check.that(w.dim(1) == x.dim(1), "k is ", x.dim(1), " in x but ", w.dim(1), " in w");
  check.that(w.stride(1) == 1 || w.stride(0) == 1 || w.numel() == 0, "w has strides ", w.strides);
}
double product_flops(const View& x, const View& w) {
  return 2.0 * double(x.dim(0)) * double(w.dim(0)) * double(w.dim(1));
}
}  // namespace

Ran Backend::linear(MutView out, Operand x, Operand w, const LinearOptions& options) {
  const Checker check{"linear", device()};
  check.tensor("out", out);
  check_product(check, x, w);
  check.shape("out", out, {x.dim(0), w.dim(0)});
  check.that(options.activation != Activation::silu_gate, "silu_gate is not an epilogue");
  if (options.bias) check.vector("bias", options.bias, w.dim(0));
  if (options.residual) {
    check.tensor("residual", options.residual);
    check.shape("residual", options.residual, out.shape);
  }
  if (out.numel() == 0) return {};
  return run("linear", product_flops(x, w), touched({out, x, w, options.bias, options.residual}),
             [&] {
               return do_linear({out, x, w, options});
             });
}

Ran Backend::gated_linear(MutView out, Operand x, Operand w) {
  const Checker check{"gated_linear", device()};
  check.tensor("out", out);
  check_product(check, x, w);
  check.that(w.dim(0) % 2 == 0, "w has ", w.dim(0), " rows, which are not two halves");
  check.shape("out", out, {x.dim(0), w.dim(0) / 2});
  if (out.numel() == 0) return {};
  return run("gated_linear", product_flops(x, w), touched({out, x, w}), [&] {
    return do_gated_linear({out, x, w});
  });
}

void Backend::quantise(MutOperand out, View x, Scaling scaling) {
  const Checker check{"quantise", device()};
  check.tensor("x", x);
  check.rank("x", x, 2);
  check.shape("out", out, x.shape);
  check.that(static_cast<bool>(out.scales), "out has no scales");
  check_operand(check, "out", out);
  if (out.numel() == 0) return;
  const double reads = scaling == Scaling::amax ? 2 : 1;
  run("quantise", reads * double(x.numel()), touched({out}) + reads * touched({x}),
      [&] { do_quantise(out, x, scaling); });
}

void Backend::dequantise(MutView out, Operand x) {
  const Checker check{"dequantise", device()};
  check.tensor("out", out);
  check.rank("out", out, 2);
  check.shape("x", x, out.shape);
  check.that(static_cast<bool>(x.scales), "x has no scales");
  check_operand(check, "x", x);
  if (out.numel() == 0) return;
  run("dequantise", double(x.numel()), touched({out, x}), [&] { do_dequantise(out, x); });
}

void Backend::rms_norm(MutView out, View x, View weight, const Norm& norm) {
  const Checker check{"rms_norm", device()};
  check.tensor("x", x);
  check.tensor("out", out);
  check.shape("out", out, x.shape);
  check.on_device("weight", weight);
  check.that(is_weight(weight.dtype), "weight is ", name_of(weight.dtype));
  check.shape("weight", weight, {x.dim(-1)});
  if (out.numel() == 0) return;
  run("rms_norm", 4.0 * double(x.numel()), touched({out, x}),
      [&] { do_rms_norm(out, x, weight, norm); });
}

void Backend::qk_norm_rope(MutView out, View x, View weight, View cos, View sin, const Norm& norm) {
  const Checker check{"qk_norm_rope", device()};
  check.tensor("x", x);
  check.tensor("out", out);
  check.rank("x", x, 3);
  check.shape("out", out, x.shape);
  const int64_t d = x.dim(2);
  check.that(d % 2 == 0, "head_dim ", d, " is odd");
  check.that(norm.kind != NormKind::channel && !norm.silu, "takes the qwen or nemotron norm");
  if (weight) check.shape("weight", weight, {d});
  for (const View& table : {cos, sin}) {
    check.on_device("cos/sin", table);
    check.shape("cos/sin", table, {x.dim(0), d / 2});
    check.that(table.dtype == DType::f32 && table.contiguous(), "cos/sin must be contiguous f32");
  }
  if (out.numel() == 0) return;
  run("qk_norm_rope", 10.0 * double(x.numel()), touched({out, x, cos, sin}),
      [&] { do_qk_norm_rope(out, x, weight, cos, sin, norm); });
}

Ran Backend::attention(MutView out, View q, View k, View v, const AttentionPlan& plan) {
  const Checker check{"attention", device()};
  for (const auto& [name, x] : {std::pair{"q", q}, {"k", k}, {"v", v}, {"out", View(out)}}) {
    check.tensor(name, x);
    check.rank(name, x, 3);
    check.that(x.dim(1) <= 1 || x.numel() == 0 || x.stride(1) == x.dim(2), name,
               " needs heads next to each other in a row, has strides ", x.strides);
    check.that(x.dtype == q.dtype, name, " is ", name_of(x.dtype), " but q is ", name_of(q.dtype));
  }
  const int64_t heads = q.dim(1), kv_heads = k.dim(1), d = q.dim(2);
  check.shape("out", out, q.shape);
  check.shape("v", v, k.shape);
  check.that(k.dim(2) == d, "head_dim is ", d, " in q but ", k.dim(2), " in k");
  check.that(kv_heads > 0 && heads % kv_heads == 0, heads, " query heads do not divide into ",
             kv_heads, " key/value heads");
  check.that(std::isfinite(plan.scale), "scale ", plan.scale, " is not finite");
  check.that(!plan.causal || plan.mask == nullptr, "block-sparse attention is not causal");
  if (plan.lse) {
    check.on_device("lse", plan.lse);
    check.shape("lse", plan.lse, {heads, q.dim(0)});
    check.that(plan.lse.dtype == DType::f32 && plan.lse.contiguous(), "lse must be contiguous f32");
  }
  double pairs = double(q.dim(0)) * double(k.dim(0));
  if (plan.causal) pairs *= 0.5;
  if (plan.mask) {
    const BlockMask& mask = *plan.mask;
    check.that(plan.scale > 0, "block-sparse attention needs a positive scale, has ", plan.scale);
    check.that(mask.block_q > 0 && mask.block_k > 0, "blocks are ", mask.block_q, " x ",
               mask.block_k);
    const int64_t rows = (q.dim(0) + mask.block_q - 1) / mask.block_q;
    check.on_device("indices", mask.indices);
    check.on_device("counts", mask.counts);
    check.rank("indices", mask.indices, 3);
    const int64_t lists = mask.indices.dim(0);
    check.that(lists == 1 || (lists > 0 && heads % lists == 0 && lists % kv_heads == 0), lists,
               " block lists for ", heads, " query heads and ", kv_heads,
               " key/value heads; expected one, or as many for each key/value head");
    check.that(mask.indices.dim(1) == rows, mask.indices.dim(1), " list rows for ", rows,
               " query blocks");
    check.shape("counts", mask.counts, {lists, rows});
    check.that(mask.indices.dtype == DType::i32 && mask.counts.dtype == DType::i32 &&
                   mask.indices.contiguous() && mask.counts.contiguous(),
               "block lists must be contiguous i32");
  }
  if (out.numel() == 0) return {};
  // Sparse calls count dense flops here; the dispatch report states the share of blocks kept.
  return run(plan.mask ? "attention_sparse" : "attention", 4.0 * pairs * double(heads) * double(d),
             touched({out, q, k, v}), [&] {
               return do_attention({out, q, k, v, plan});
             });
}

Ran Backend::select_blocks(MutView indices, MutView counts, View q, View k,
                           const BlockSelection& selection, MutView scores) {
  const Checker check{"select_blocks", device()};
  check.tensor("q", q);
  check.tensor("k", k);
  check.rank("q", q, 3);
  check.rank("k", k, 3);
  const int64_t heads = q.dim(1);
  check.that(k.dim(1) > 0 && heads % k.dim(1) == 0, heads, " query heads do not divide into ",
             k.dim(1), " key/value heads");
  check.that(k.dim(2) == q.dim(2), "head_dim is ", q.dim(2), " in q but ", k.dim(2), " in k");
  check.that(selection.block_q % selection.cells() == 0 &&
                 selection.block_k % selection.cells() == 0 && selection.block_q > 0 &&
                 selection.block_k > 0,
             "blocks ", selection.block_q, " x ", selection.block_k, " are not multiples of 16");
  check.that(std::isfinite(selection.scale) && selection.scale > 0, "scale ", selection.scale,
             " is not positive and finite");
  const int64_t sharing = selection.heads_per_list;
  check.that(sharing > 0 && heads / k.dim(1) % sharing == 0, sharing,
             " heads choose together, which must divide the ", heads / k.dim(1),
             " of a key/value head");
  check.that(selection.mass >= 0 && selection.mass < 1, "mass ", selection.mass,
             " is not in [0, 1)");
  const BlockGrid grid = selection.grid(q.dim(0), k.dim(0));
  const int64_t lists = heads / sharing, rows = grid.rows, blocks = grid.blocks;
  check.on_device("indices", indices);
  check.rank("indices", indices, 3);
  check.that(indices.dim(0) == lists && indices.dim(1) == rows && indices.dim(2) >= blocks,
             "indices is ", indices.shape, ", expected [", lists, ", ", rows, ", >= ", blocks, "]");
  check.shape("counts", counts, {lists, rows});
  check.that(indices.dtype == DType::i32 && counts.dtype == DType::i32, "block lists must be i32");
  check.on_device("counts", counts);
  check.rows("indices", indices);
  if (scores) {
    check.on_device("scores", scores);
    check.shape("scores", scores, {lists, rows, blocks});
    check.that(scores.dtype == DType::f32, "scores is ", name_of(scores.dtype), ", expected f32");
  }
  if (indices.numel() == 0) return {};
  const double cells = double((q.dim(0) + 15) / 16) * double((k.dim(0) + 15) / 16);
  return run("select_blocks", 2.0 * cells * double(heads) * double(q.dim(2)), touched({q, k}), [&] {
    return do_select_blocks({indices, counts, q, k, selection, scores});
  });
}

Ran Backend::conv3d(MutView out, View x, View w, View bias, const Conv3d& conv, View residual) {
  const Checker check{"conv3d", device()};
  check.tensor("x", x);
  check.tensor("out", out);
  check.rank("x", x, 4);
  check.rank("out", out, 4);
  check.on_device("w", w);
  check.rank("w", w, 5);
  check.that(is_weight(w.dtype) && w.contiguous(), "w must be contiguous f32, bf16 or f16");
  check.that(w.dim(1) == x.dim(3), "x has ", x.dim(3), " channels but w takes ", w.dim(1));
  check.that(out.dim(3) == w.dim(0), "out has ", out.dim(3), " channels but w makes ", w.dim(0));
  for (int i = 0; i < 3; ++i) {
    const auto a = static_cast<size_t>(i);
    const int64_t padded = x.dim(i) + conv.pad_before[a] + conv.pad_after[a];
    const int64_t reach = conv.dilation[a] * (w.dim(2 + i) - 1) + 1;
    check.that(conv.stride[a] > 0 && padded >= reach, "axis ", i, ": ", padded,
               " padded positions for a kernel that reaches over ", reach);
    check.that(out.dim(i) == (padded - reach) / conv.stride[a] + 1, "axis ", i, ": out has ",
               out.dim(i), " positions, expected ", (padded - reach) / conv.stride[a] + 1);
  }
  if (bias) check.vector("bias", bias, w.dim(0));
  if (residual) {
    check.tensor("residual", residual);
    check.shape("residual", residual, out.shape);
  }
  if (out.numel() == 0) return {};
  return run("conv3d", 2.0 * double(out.numel()) * double(w.numel() / w.dim(0)),
             touched({out, x, w, residual}), [&] {
               return do_conv3d({out, x, w, bias, conv, residual});
             });
}

void Backend::conv_transpose1d(MutView out, View x, View w, View bias, int64_t stride,
                               int64_t padding) {
  const Checker check{"conv_transpose1d", device()};
  check.tensor("x", x);
  check.tensor("out", out);
  check.rank("x", x, 2);
  check.rank("w", w, 3);
  check.on_device("w", w);
  check.that(is_weight(w.dtype) && w.contiguous(), "w must be contiguous f32, bf16 or f16");
  check.that(w.dim(0) == x.dim(1), "x has ", x.dim(1), " channels but w takes ", w.dim(0));
  check.that(stride > 0, "stride is ", stride);
  check.that(padding >= 0, "padding is ", padding);
  check.shape("out", out, {stride * x.dim(0), w.dim(1)});
  if (bias) check.vector("bias", bias, w.dim(1));
  if (out.numel() == 0) return;
  run("conv_transpose1d", 2.0 * double(x.dim(0)) * double(w.numel()), touched({out, x, w}),
      [&] { do_conv_transpose1d(out, x, w, bias, stride, padding); });
}

void Backend::snake(MutView out, View x, View alpha, View beta) {
  const Checker check{"snake", device()};
  check.tensor("x", x);
  check.tensor("out", out);
  check.rank("x", x, 2);
  check.shape("out", out, x.shape);
  check.shape("alpha", alpha, {x.dim(1)});
  check.shape("beta", beta, {x.dim(1)});
  if (out.numel() == 0) return;
  run("snake", 6.0 * double(x.numel()), touched({out, x}), [&] { do_snake(out, x, alpha, beta); });
}

}  // namespace orrery
