// The operations of the CPU backend at the shapes of the shipped model and of Cosmos3-Nano, against
// oneDNN's large matrix product measured in the same process.
//
//   ops_bench --benchmark_filter=conv
//
// Columns: GFLOP/s by the wall clock, and of_ceiling, that rate over the ceiling's. cpu_of_ceiling
// takes the processor time of all threads on both sides, which other load on the machine disturbs
// less.
#include <benchmark/benchmark.h>

#include <chrono>
#include <cmath>
#include <ctime>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>
#include <random>
#include <string>

#include "conformance/cases.h"
#include "cpu/cpu_backend.h"

namespace orrery {
namespace {

using conformance::Layout;
using conformance::Scale;

struct Rate {
  double wall = 0, cpu = 0;  // flops per second
};

// Runs state's loop around fn and returns flops per second of either clock.
template <typename Fn>
Rate timed(benchmark::State& state, double flops, const Fn& fn) {
  fn();  // packs weights, grows scratch memory
  const std::clock_t cpu = std::clock();
  const auto wall = std::chrono::steady_clock::now();
  for (auto _ : state) fn();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - wall).count();
  const double cpu_seconds = double(std::clock() - cpu) / CLOCKS_PER_SEC;
  const double total = flops * double(state.iterations());
  return {total / seconds, total / cpu_seconds};
}

// A 2048^3 single-precision product of oneDNN: what a large matrix product reaches on this machine.
Rate sgemm(double seconds) {
  constexpr int64_t n = 2048;
  static std::vector<float> a(n * n, 0.5f), b(n * n, 0.25f), c(n * n);
  Rate best;
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [](auto since) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
  };
  do {
    const std::clock_t cpu = std::clock();
    const auto wall = std::chrono::steady_clock::now();
    dnnl::sgemm('N', 'N', n, n, n, 1.0f, a.data(), n, b.data(), n, 0.0f, c.data(), n);
    const double flops = 2.0 * double(n * n * n);
    best.wall = std::max(best.wall, flops / elapsed(wall));
    best.cpu = std::max(best.cpu, flops * CLOCKS_PER_SEC / double(std::clock() - cpu));
  } while (elapsed(begin) < seconds);
  return best;
}

const Rate& ceiling() {
  static const Rate rate = (sgemm(0.2), sgemm(1.5));  // the first calls warm up
  return rate;
}

void report(benchmark::State& state, const Rate& rate) {
  state.counters["GFLOP/s"] = rate.wall * 1e-9;
  state.counters["of_ceiling"] = rate.wall / ceiling().wall;
  state.counters["cpu_of_ceiling"] = rate.cpu / ceiling().cpu;
}

Backend& backend() {
  static const std::unique_ptr<Backend> instance = cpu::make_cpu_backend();
  return *instance;
}

Tensor random_tensor(Shape shape, DType dtype, uint32_t seed) {
  Tensor host = allocate_host_tensor(shape, DType::f32);
  std::minstd_rand engine(seed + 1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (int64_t i = 0; i < host.view.numel(); ++i) host.view.as<float>()[i] = uniform(engine);
  Tensor tensor = backend().allocate_tensor(shape, dtype);
  backend().copy(tensor.view, host.view);
  return tensor;
}

void ceiling_bench(benchmark::State& state) {
  constexpr int64_t n = 2048;
  for (auto _ : state) benchmark::DoNotOptimize(sgemm(0));
  state.counters["GFLOP/s"] = ceiling().wall * 1e-9;
  state.counters["n"] = n;
}

// The tensors of a case of the conformance suite, for as long as it is timed.
class Tensors {
 public:
  conformance::Make make() {
    return [this](const conformance::Wanted& wanted) {
      made_.push_back(random_tensor(wanted.shape, wanted.dtype, uint32_t(made_.size() + 1)));
      return made_.back().view;
    };
  }

 private:
  std::vector<Tensor> made_;
};

void linear_bench(benchmark::State& state, const conformance::LinearCase& c) {
  Tensors tensors;
  const LinearArgs call = arguments(c, tensors.make());
  report(state, timed(state, c.flops(), [&] { backend().linear(call.out, call.x, call.w); }));
}

void gated_linear_bench(benchmark::State& state, const conformance::GatedLinearCase& c) {
  Tensors tensors;
  const GatedLinearArgs call = arguments(c, tensors.make());
  report(state, timed(state, c.flops(), [&] { backend().gated_linear(call.out, call.x, call.w); }));
}

void conv_bench(benchmark::State& state, const conformance::ConvCase& c) {
  Tensors tensors;
  const conformance::ConvVariant variant{DType::f32, DType::bf16, Layout::contiguous, true};
  const Conv3dArgs call = arguments(c, variant, tensors.make());
  report(state, timed(state, c.flops(),
                      [&] { backend().conv3d(call.out, call.x, call.w, call.bias, call.conv); }));
}

// The same convolution by one call of oneDNN on the whole image, in its own layout of choice (any)
// or channels last throughout, without reordering activations into and out of it.
void onednn_conv_bench(benchmark::State& state, const conformance::ConvCase& c, bool any_layout) {
  using dnnl::memory;
  const auto [kd, kh, kw] = c.kernel;
  const int64_t frames = c.out()[0], height = c.x[1], width = c.x[2], cin = c.x[3];
  dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const auto data = any_layout ? memory::format_tag::any : memory::format_tag::ndhwc;
  const memory::desc x({1, cin, c.x[0], height, width}, memory::data_type::f32, data),
      w({c.cout, cin, kd, kh, kw}, memory::data_type::f32, memory::format_tag::any),
      bias({c.cout}, memory::data_type::f32, memory::format_tag::x),
      out({1, c.cout, frames, height, width}, memory::data_type::f32, data);
  const dnnl::convolution_forward::desc desc(dnnl::prop_kind::forward_inference,
                                             dnnl::algorithm::convolution_direct, x, w, bias, out,
                                             {1, 1, 1}, {0, kh / 2, kw / 2}, {0, kh / 2, kw / 2});
  const dnnl::convolution_forward::primitive_desc primitive(desc, engine);
  memory xm(primitive.src_desc(), engine), wm(primitive.weights_desc(), engine),
      bm(primitive.bias_desc(), engine), om(primitive.dst_desc(), engine);
  for (memory* m : {&xm, &wm, &bm}) {
    std::fill_n(static_cast<float*>(m->get_data_handle()), m->get_desc().get_size() / sizeof(float),
                0.5f);
  }
  dnnl::convolution_forward forward(primitive);
  report(
      state, timed(state, c.flops(), [&] {
        forward.execute(
            stream,
            {{DNNL_ARG_SRC, xm}, {DNNL_ARG_WEIGHTS, wm}, {DNNL_ARG_BIAS, bm}, {DNNL_ARG_DST, om}});
        stream.wait();
      }));
  state.SetLabel(primitive.impl_info_str());
}

void attention_bench(benchmark::State& state, const conformance::AttentionCase& c) {
  Tensors tensors;
  const auto call = arguments(c, DType::f32, Layout::contiguous, tensors.make());
  AttentionPlan plan;
  plan.scale = c.scale();
  plan.causal = c.causal;
  report(state, timed(state, c.flops(),
                      [&] { backend().attention(call.out, call.q, call.k, call.v, plan); }));
}

// 75% block sparsity, selector included; rates count the dense operations, of_dense the time.
void sparse_attention_bench(benchmark::State& state, const conformance::AttentionCase& a) {
  Tensors tensors;
  const auto call = arguments(a, DType::f32, Layout::contiguous, tensors.make());
  BlockSelection selection;
  selection.scale = a.scale();
  const int64_t rows = (a.queries + 63) / 64, blocks = (a.keys + 63) / 64;
  Tensor indices = backend().allocate_tensor({a.heads, rows, blocks}, DType::i32);
  Tensor counts = backend().allocate_tensor({a.heads, rows}, DType::i32);
  const BlockMask mask{64, 64, indices.view, counts.view};
  AttentionPlan plan;
  plan.scale = selection.scale;
  const auto seconds = [](const auto& fn) {
    fn();
    const std::clock_t begin = std::clock();
    fn();
    return double(std::clock() - begin) / CLOCKS_PER_SEC;
  };
  const auto attend = [&] { backend().attention(call.out, call.q, call.k, call.v, plan); };
  const auto select = [&] {
    backend().select_blocks(indices.view, counts.view, call.q, call.k, selection);
  };
  const double dense = seconds(attend);
  plan.mask = &mask;
  const auto sparse = [&] {
    select();
    attend();
  };
  report(state, timed(state, a.flops(), sparse));
  state.counters["of_dense"] = seconds(sparse) / dense;
  state.counters["select_of_dense"] = seconds(select) / dense;
}

// Bandwidth-bound operations: GB/s read and written.
void bandwidth(benchmark::State& state, double bytes, const std::function<void()>& fn) {
  const Rate rate = timed(state, bytes, fn);
  state.counters["GB/s"] = rate.wall * 1e-9;
  state.counters["cpu_GB/s"] = rate.cpu * 1e-9;
}

void norm_bench(benchmark::State& state, Shape shape, NormKind kind, bool silu) {
  const Tensor x = random_tensor(shape, DType::f32, 1),
               w = random_tensor({shape[shape.rank() - 1]}, DType::f32, 2);
  Tensor out = backend().allocate_tensor(shape, DType::f32);
  bandwidth(state, 2.0 * double(x.view.bytes()), [&] {
    backend().rms_norm(out.view, x.view, w.view, {kind, 1e-6f, silu});
  });
}

void transpose_bench(benchmark::State& state, Shape shape) {
  const Tensor x = random_tensor(shape, DType::f32, 1);
  Tensor out = backend().allocate_tensor({shape[1], shape[0]}, DType::f32);
  bandwidth(state, 2.0 * double(x.view.bytes()), [&] {
    backend().copy(out.view, View(x.view).permute({1, 0}));
  });
}

void lincomb_bench(benchmark::State& state, int64_t n) {
  const Tensor x = random_tensor({n}, DType::f32, 1), y = random_tensor({n}, DType::f32, 2);
  Tensor out = backend().allocate_tensor({n}, DType::f32);
  bandwidth(state, 3.0 * double(x.view.bytes()), [&] {
    backend().lincomb(out.view, {{0.5f, x.view}, {2.0f, y.view}});
  });
}

void register_all() {
  const auto add = [](const std::string& name, const auto& fn) {
    benchmark::RegisterBenchmark(name.c_str(), fn)->Unit(benchmark::kMillisecond)->UseRealTime();
  };
  add("ceiling/sgemm_2048", ceiling_bench);
  for (const auto& c : conformance::linear_cases(Scale::cpu)) {
    add("linear_" + c.name, [c](benchmark::State& s) { linear_bench(s, c); });
  }
  for (const auto& c : conformance::gated_linear_cases(Scale::cpu)) {
    add("gated_linear/" + c.name(), [c](benchmark::State& s) { gated_linear_bench(s, c); });
  }
  for (const auto& c : conformance::conv_cases(Scale::cpu)) {
    add("conv/" + c.name, [c](benchmark::State& s) { conv_bench(s, c); });
    add("conv_onednn_any/" + c.name, [c](benchmark::State& s) { onednn_conv_bench(s, c, true); });
    add("conv_onednn_ndhwc/" + c.name,
        [c](benchmark::State& s) { onednn_conv_bench(s, c, false); });
  }
  const auto attentions = conformance::attention_cases(Scale::cpu);
  for (const auto& c : attentions) {
    add("attention/" + c.name, [c](benchmark::State& s) { attention_bench(s, c); });
  }
  add("attention_sparse75/" + attentions[1].name,
      [c = attentions[1]](benchmark::State& s) { sparse_attention_bench(s, c); });
  add("norm/qwen_256", [](benchmark::State& s) {
    norm_bench(s, {576, 256}, NormKind::qwen, false);
  });
  add("norm/channel_silu_24", [](benchmark::State& s) {
    norm_bench(s, {4, 128, 128, 24}, NormKind::channel, true);
  });
  add("norm/channel_silu_96", [](benchmark::State& s) {
    norm_bench(s, {4, 64, 64, 96}, NormKind::channel, true);
  });
  add("copy/transpose", [](benchmark::State& s) { transpose_bench(s, {4096, 768}); });
  add("lincomb/two_terms", [](benchmark::State& s) { lincomb_bench(s, 1 << 20); });
}

}  // namespace
}  // namespace orrery

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  orrery::register_all();
  benchmark::RunSpecifiedBenchmarks();
}
