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

#include "cpu/cpu_backend.h"

namespace orrery {
namespace {

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

void linear_bench(benchmark::State& state, int64_t m, int64_t n, int64_t k, DType weight) {
  const Tensor x = random_tensor({m, k}, DType::f32, 1), w = random_tensor({n, k}, weight, 2);
  Tensor out = backend().allocate_tensor({m, n}, DType::f32);
  report(state, timed(state, 2.0 * double(m) * double(n) * double(k),
                      [&] { backend().linear(out.view, x.view, w.view); }));
}

struct Conv {
  const char* name;
  int64_t frames, size, cin, cout;  // frames of the input
  std::array<int64_t, 3> kernel;
};

void conv_bench(benchmark::State& state, const Conv& c) {
  const auto [kd, kh, kw] = c.kernel;
  const Tensor x = random_tensor({c.frames, c.size, c.size, c.cin}, DType::f32, 1),
               w = random_tensor({c.cout, c.cin, kd, kh, kw}, DType::bf16, 2),
               bias = random_tensor({c.cout}, DType::f32, 3);
  const int64_t frames = c.frames - kd + 1;
  Tensor out = backend().allocate_tensor({frames, c.size, c.size, c.cout}, DType::f32);
  Conv3d conv;
  conv.pad_before = conv.pad_after = {0, kh / 2, kw / 2};
  const double flops = 2.0 * double(out.view.numel()) * double(c.cin * kd * kh * kw);
  report(state,
         timed(state, flops, [&] { backend().conv3d(out.view, x.view, w.view, bias.view, conv); }));
}

// The same convolution by one call of oneDNN on the whole image, in its own layout of choice (any)
// or channels last throughout, without reordering activations into and out of it.
void onednn_conv_bench(benchmark::State& state, const Conv& c, bool any_layout) {
  using dnnl::memory;
  const auto [kd, kh, kw] = c.kernel;
  const int64_t frames = c.frames - kd + 1;
  dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const auto data = any_layout ? memory::format_tag::any : memory::format_tag::ndhwc;
  const memory::desc x({1, c.cin, c.frames, c.size, c.size}, memory::data_type::f32, data),
      w({c.cout, c.cin, kd, kh, kw}, memory::data_type::f32, memory::format_tag::any),
      bias({c.cout}, memory::data_type::f32, memory::format_tag::x),
      out({1, c.cout, frames, c.size, c.size}, memory::data_type::f32, data);
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
  const double flops =
      2.0 * double(frames * c.size * c.size * c.cout) * double(c.cin * kd * kh * kw);
  report(
      state, timed(state, flops, [&] {
        forward.execute(
            stream,
            {{DNNL_ARG_SRC, xm}, {DNNL_ARG_WEIGHTS, wm}, {DNNL_ARG_BIAS, bm}, {DNNL_ARG_DST, om}});
        stream.wait();
      }));
  state.SetLabel(primitive.impl_info_str());
}

struct Attention {
  const char* name;
  int64_t queries, keys, heads, kv_heads, d;
  bool causal;
};

void attention_bench(benchmark::State& state, const Attention& a) {
  const Tensor q = random_tensor({a.queries, a.heads, a.d}, DType::f32, 1),
               k = random_tensor({a.keys, a.kv_heads, a.d}, DType::f32, 2),
               v = random_tensor({a.keys, a.kv_heads, a.d}, DType::f32, 3);
  Tensor out = backend().allocate_tensor(q.view.shape, DType::f32);
  AttentionPlan plan;
  plan.scale = float(1 / std::sqrt(double(a.d)));
  plan.causal = a.causal;
  const double flops = (a.causal ? 2.0 : 4.0) * double(a.queries * a.keys) * double(a.heads * a.d);
  report(state,
         timed(state, flops, [&] { backend().attention(out.view, q.view, k.view, v.view, plan); }));
}

// 75% block sparsity, selector included; rates count the dense operations, of_dense the time.
void sparse_attention_bench(benchmark::State& state, const Attention& a) {
  const Tensor q = random_tensor({a.queries, a.heads, a.d}, DType::f32, 1),
               k = random_tensor({a.keys, a.kv_heads, a.d}, DType::f32, 2),
               v = random_tensor({a.keys, a.kv_heads, a.d}, DType::f32, 3);
  Tensor out = backend().allocate_tensor(q.view.shape, DType::f32);
  BlockSelection selection;
  selection.scale = float(1 / std::sqrt(double(a.d)));
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
  const double dense =
      seconds([&] { backend().attention(out.view, q.view, k.view, v.view, plan); });
  plan.mask = &mask;
  const auto sparse = [&] {
    backend().select_blocks(indices.view, counts.view, q.view, k.view, selection);
    backend().attention(out.view, q.view, k.view, v.view, plan);
  };
  const double flops = 4.0 * double(a.queries * a.keys) * double(a.heads * a.d);
  report(state, timed(state, flops, sparse));
  state.counters["of_dense"] = seconds(sparse) / dense;
  state.counters["select_of_dense"] =
      seconds(
          [&] { backend().select_blocks(indices.view, counts.view, q.view, k.view, selection); }) /
      dense;
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
  const struct {
    const char* name;
    int64_t m, n, k;
  } linears[] = {
      {"pico_qkv", 576, 512, 256},        {"pico_gate_up", 576, 1536, 256},
      {"pico_down", 576, 256, 768},       {"nano_q", 1024, 4096, 4096},
      {"nano_gate_up", 1024, 4096, 4096}, {"nano_down", 1024, 4096, 12288},
      {"timestep", 1, 4096, 4096},        {"square_2048", 2048, 2048, 2048},
  };
  for (const auto& l : linears) {
    add(std::string("linear_bf16/") + l.name,
        [l](benchmark::State& s) { linear_bench(s, l.m, l.n, l.k, DType::bf16); });
  }
  add("linear_f32/square_2048",
      [](benchmark::State& s) { linear_bench(s, 2048, 2048, 2048, DType::f32); });
  const Conv convs[] = {
      {"latent_96", 3, 16, 96, 96, {3, 3, 3}},    {"mid_96", 4, 32, 96, 96, {3, 3, 3}},
      {"block1_96", 6, 64, 96, 96, {3, 3, 3}},    {"block2_96_48", 6, 128, 96, 48, {3, 3, 3}},
      {"block2_48", 6, 128, 48, 48, {3, 3, 3}},   {"block3_48_24", 6, 128, 48, 24, {3, 3, 3}},
      {"block3_24", 6, 128, 24, 24, {3, 3, 3}},   {"conv_out_24_12", 6, 128, 24, 12, {3, 3, 3}},
      {"upsample_96", 4, 64, 96, 96, {1, 3, 3}},  {"upsample_48", 4, 128, 48, 48, {1, 3, 3}},
      {"time_96_192", 4, 32, 96, 192, {3, 1, 1}}, {"shortcut_96_48", 4, 128, 96, 48, {1, 1, 1}},
      {"wan_256", 4, 64, 256, 256, {3, 3, 3}},    {"wan_1024", 3, 16, 1024, 1024, {3, 3, 3}},
  };
  for (const Conv& c : convs) {
    add(std::string("conv/") + c.name, [c](benchmark::State& s) { conv_bench(s, c); });
    add(std::string("conv_onednn_any/") + c.name,
        [c](benchmark::State& s) { onednn_conv_bench(s, c, true); });
    add(std::string("conv_onednn_ndhwc/") + c.name,
        [c](benchmark::State& s) { onednn_conv_bench(s, c, false); });
  }
  const Attention attentions[] = {
      {"pico", 576, 640, 4, 2, 64, false},        {"8192", 8192, 8192, 8, 2, 64, false},
      {"2048_128", 2048, 2048, 8, 2, 128, false}, {"vae_640", 256, 256, 1, 1, 640, false},
      {"und_causal", 512, 512, 4, 2, 64, true},
  };
  for (const Attention& a : attentions) {
    add(std::string("attention/") + a.name, [a](benchmark::State& s) { attention_bench(s, a); });
  }
  add("attention_sparse75/8192",
      [a = attentions[1]](benchmark::State& s) { sparse_attention_bench(s, a); });
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
