// Times the CUDA backend's operations at the sizes of Cosmos3-Nano (1280 x 720, 189 frames: 44,160
// rows) against the floors that this device reaches in the same process: its copy bandwidth for
// what moves bytes, its best matrix product for what multiplies. One JSON object a line. Usage:
// device_ops [name part ...]; runs the cases whose names contain one of the parts.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/provenance.h"
#include "conformance/cases.h"
#include "cuda/cuda_backend.h"

namespace {

using namespace orrery;
using conformance::Layout;
using conformance::Scale;

constexpr int64_t kRows = 44160;
constexpr int64_t kHidden = 4096;
constexpr int64_t kKeys = 44672;

class Bench {
 public:
  Bench(Backend& gpu, std::vector<std::string> only, std::string command)
      : gpu_(gpu), only_(std::move(only)), command_(std::move(command)) {
    // "cuda: NAME, ..., driver for CUDA ..., ..."
    const std::string description = gpu_.description();
    const size_t driver = description.find("driver");
    device_ = description.substr(6, description.find(',') - 6);
    driver_ = description.substr(driver);
    const int64_t n = int64_t{1} << 22;
    noise_ = gpu_.allocate_tensor({n}, DType::bf16);
    Tensor host = allocate_host_tensor({n}, DType::bf16);
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < n; ++i) host.view.as<bf16>()[i] = to_bf16(normal(generator));
    gpu_.upload(noise_.view, host.view);
  }

  bool wants(const std::string& name) const {
    return only_.empty() || std::any_of(only_.begin(), only_.end(), [&](const std::string& part) {
             return name.find(part) != std::string::npos;
           });
  }

  // Normal values (a 4 Mi pattern, repeated).
  Tensor random(Shape shape, DType dtype = DType::bf16) {
    Tensor tensor = gpu_.allocate_tensor(shape, dtype);
    const MutView flat = tensor.view.reshape({shape.numel()});
    for (int64_t at = 0; at < flat.dim(0); at += noise_.view.dim(0)) {
      const int64_t size = std::min(noise_.view.dim(0), flat.dim(0) - at);
      gpu_.copy(flat.slice(0, at, size), noise_.view.slice(0, 0, size));
    }
    return tensor;
  }

  // Median seconds of one call: batches long enough for the clock, after one untimed.
  double seconds(const std::function<void()>& fn, double budget = 0.15) {
    const auto run = [&](int count) {
      gpu_.synchronize();
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < count; ++i) fn();
      gpu_.synchronize();
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() /
             count;
    };
    run(1);
    const double once = run(1);
    const int count = std::clamp(int(0.01 / once), 1, 200);
    const int batches = std::clamp(int(budget / (once * count)), 3, 15);
    std::vector<double> times;
    for (int i = 0; i < batches; ++i) times.push_back(run(count));
    std::nth_element(times.begin(), times.begin() + batches / 2, times.end());
    return times[size_t(batches / 2)];
  }

  struct Peer {
    const char* name;
    double value;
  };
  // value and peer's value are times, so their ratio is how much faster this backend is. floor:
  // what this device could reach (0: none known).
  void report(const std::string& name, double value, const char* unit, double floor,
              const std::string& note = "", const Peer* peer = nullptr) {
    std::printf(
        "{\"bench\": \"device_ops\", \"case\": \"%s\", \"device\": \"%s\", \"driver\": \"%s\", "
        "\"commit\": \"%s\", "
        "\"date\": \"%s\", \"command\": \"%s\", \"value\": %.5g, \"unit\": \"%s\", \"floor\": %s, "
        "\"peer\": %s, "
        "\"peer_value\": %s, \"ratio\": %s, \"note\": \"%s\"}\n",
        name.c_str(), device_.c_str(), driver_.c_str(), measured_commit().c_str(), today().c_str(),
        command_.c_str(), value, unit, number(floor).c_str(),
        peer ? concat('"', peer->name, '"').c_str() : "null",
        number(peer ? peer->value : 0).c_str(), number(peer ? peer->value / value : 0).c_str(),
        note.c_str());
    std::fflush(stdout);
  }

  // Cases whose floor is bytes over bandwidth, or flops over the matrix rate; milliseconds.
  void bytes(const std::string& name, double count, const std::function<void()>& fn) {
    if (!wants(name)) return;
    guard(name, [&] {
      const double s = seconds(fn);
      report(name, s * 1e3, "ms", count / bandwidth_ * 1e3,
             concat(int64_t(count / s / 1e9), " GB/s"));
    });
  }
  void flops(const std::string& name, double count, const std::function<Ran()>& fn) {
    if (!wants(name)) return;
    guard(name, [&] {
      const Ran ran = fn();
      const double s = seconds([&] { fn(); });
      report(name, s * 1e3, "ms", count / matrix_rate_ * 1e3,
             concat(int64_t(count / s / 1e12), " TFLOP/s", ran.name.empty() ? "" : ", ", ran.name,
                    ran.note.empty() ? "" : ", ", ran.note));
    });
  }

  void guard(const std::string& name, const std::function<void()>& fn) {
    try {
      fn();
    } catch (const Error& error) {
      std::printf("{\"bench\": \"device_ops\", \"case\": \"%s\", \"error\": \"%s\"}\n",
                  name.c_str(), error.what());
    }
  }

  void measure_ceilings() {
    Tensor a = random({int64_t{1} << 30}),
           b = gpu_.allocate_tensor({int64_t{1} << 30}, DType::bf16);
    bandwidth_ = 2.0 * double(a.view.bytes()) / seconds([&] { gpu_.copy(b.view, a.view); });
    report("ceiling: copy", bandwidth_ / 1e12, "TB/s", 0);
    const Tensor x = random({8192, 8192}), w = random({8192, 8192}),
                 out = gpu_.allocate_tensor({8192, 8192}, DType::bf16);
    matrix_rate_ =
        2.0 * 8192.0 * 8192.0 * 8192.0 / seconds([&] { gpu_.linear(out.view, x.view, w.view); });
    report("ceiling: product of 8192", matrix_rate_ / 1e12, "TFLOP/s", 0);
  }

 private:
  Backend& gpu_;
  std::vector<std::string> only_;
  std::string command_, device_, driver_;
  Tensor noise_;
  double bandwidth_ = 0, matrix_rate_ = 0;

  static std::string number(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.5g", value);
    return value > 0 ? text : "null";
  }
};

// The tensors of a case of the conformance suite, for as long as it is timed.
class Tensors {
 public:
  explicit Tensors(Bench& bench) : bench_(bench) {}
  conformance::Make make() {
    return [this](const conformance::Wanted& wanted) {
      made_.push_back(bench_.random(wanted.shape, wanted.dtype));
      return made_.back().view;
    };
  }

 private:
  Bench& bench_;
  std::vector<Tensor> made_;
};

double size(const Tensor& t) { return double(t.view.bytes()); }

void layout_cases(Bench& bench, Backend& gpu) {
  if (!bench.wants("copy")) return;
  const Tensor x = bench.random({kRows, kHidden}),
               y = gpu.allocate_tensor({kRows, 2 * kHidden}, DType::bf16);
  bench.bytes("copy: rows into wider rows", 2 * size(x),
              [&] { gpu.copy(y.view.slice(1, 128, kHidden), x.view); });
  bench.bytes("copy: transpose", 2 * size(x), [&] {
    gpu.copy(y.view.reshape({2, kHidden, kRows}).select(0, 0), x.view.permute({1, 0}));
  });
  const Tensor wide = gpu.allocate_tensor({kRows, kHidden}, DType::f32);
  bench.bytes("copy: bf16 to f32", size(x) + size(wide), [&] { gpu.copy(wide.view, x.view); });
  // Nearest upsampling of a decoder block: 4 x 180 x 320 x 512 to twice the height and width.
  const Tensor small = bench.random({4, 180, 1, 320, 1, 512}),
               large = gpu.allocate_tensor({4, 180, 2, 320, 2, 512}, DType::bf16);
  bench.bytes("copy: nearest upsampling", size(small) + size(large),
              [&] { gpu.copy(large.view, View(small.view).expand(2, 2).expand(4, 2)); });
  const Tensor latent = bench.random({48, 48, 46, 80}),
               tokens = gpu.allocate_tensor({kRows, 192}, DType::bf16);
  bench.bytes("copy: patchify 48x48x46x80", 2 * size(latent), [&] {
    gpu.copy(tokens.view.reshape({48, 23, 40, 2, 2, 48}),
             View(latent.view).reshape({48, 48, 23, 2, 40, 2}).permute({1, 2, 4, 3, 5, 0}));
  });
}

void row_cases(Bench& bench, Backend& gpu) {
  const Tensor x = bench.random({kRows, kHidden}),
               y = gpu.allocate_tensor({kRows, kHidden}, DType::bf16);
  const Tensor weight = bench.random({kHidden});
  const Norm norm;
  bench.bytes("rms_norm 4096", 2 * size(x),
              [&] { gpu.rms_norm(y.view, x.view, weight.view, norm); });
  bench.bytes("lincomb of 2", 3 * size(x), [&] {
    gpu.lincomb(y.view, {{0.5f, x.view}, {2.0f, y.view}});
  });
  if (bench.wants("lincomb of 4")) {
    const Tensor a = bench.random({kRows, 192}, DType::f32),
                 b = bench.random({kRows, 192}, DType::f32),
                 c = bench.random({kRows, 192}, DType::f32),
                 d = bench.random({kRows, 192}, DType::f32);
    bench.bytes("lincomb of 4 (f32, 192 wide)", 5 * size(a), [&] {
      gpu.lincomb(a.view, {{0.5f, a.view}, {0.1f, b.view}, {0.1f, c.view}, {0.1f, d.view}});
    });
  }
  bench.bytes("add_row", 2 * size(x), [&] { gpu.add_row(y.view, weight.view); });
  if (bench.wants("qk_norm_rope")) {
    const Tensor qkv = bench.random({kRows, 6144}),
                 k = gpu.allocate_tensor({kKeys, 8, 128}, DType::bf16),
                 q = gpu.allocate_tensor({kRows, 32, 128}, DType::bf16);
    const Tensor cos = bench.random({kRows, 64}, DType::f32),
                 sin = bench.random({kRows, 64}, DType::f32);
    const Tensor head = bench.random({128});
    bench.bytes("qk_norm_rope q", 2 * size(q) + 2 * size(cos), [&] {
      gpu.qk_norm_rope(q.view, qkv.view.slice(1, 0, 4096).reshape({kRows, 32, 128}), head.view,
                       cos.view, sin.view, norm);
    });
    bench.bytes("qk_norm_rope k into the key buffer", 2.0 * kRows * 1024 * 2 + 2 * size(cos), [&] {
      gpu.qk_norm_rope(k.view.slice(0, kKeys - kRows, kRows),
                       qkv.view.slice(1, 4096, 1024).reshape({kRows, 8, 128}), head.view, cos.view,
                       sin.view, norm);
    });
  }
  if (bench.wants("silu_gate")) {
    const Tensor gate_up = bench.random({kRows, 2 * 12288}),
                 out = gpu.allocate_tensor({kRows, 12288}, DType::bf16);
    bench.bytes("silu_gate 12288", size(gate_up) + size(out),
                [&] { gpu.activation(out.view, gate_up.view, Activation::silu_gate); });
  }
  for (int64_t channels : {256, 512, 1024}) {
    const std::string name = concat("rms_norm channel + silu ", channels);
    if (!bench.wants(name)) continue;
    const Tensor a = bench.random({4, 360, 640, channels}), w = bench.random({channels});
    bench.bytes(name, 2 * size(a), [&] {
      gpu.rms_norm(a.view, a.view, w.view, {NormKind::channel, 0, true});
    });
  }
  if (bench.wants("snake")) {
    const Tensor a = bench.random({197 * 1920, 320}), alpha = bench.random({320}, DType::f32);
    bench.bytes("snake 378240 x 320", 2 * size(a),
                [&] { gpu.snake(a.view, a.view, alpha.view, alpha.view); });
  }
}

void product_cases(Bench& bench, Backend& gpu) {
  for (const auto& c : conformance::linear_cases(Scale::device)) {
    const std::string name = "linear " + c.name;
    if (!bench.wants(name)) continue;
    Tensors tensors(bench);
    const LinearArgs call = arguments(c, tensors.make());
    bench.flops(name, c.flops(),
                [&] { return gpu.linear(call.out, call.x, call.w, call.options); });
  }
  for (const auto& c : conformance::gated_linear_cases(Scale::device)) {
    const std::string name = "gated linear " + c.name();
    if (!bench.wants(name)) continue;
    Tensors tensors(bench);
    const GatedLinearArgs call = arguments(c, tensors.make());
    const Tensor both = gpu.allocate_tensor({c.m, 2 * c.n}, c.dtype);
    bench.flops(name, c.flops(), [&] { return gpu.gated_linear(call.out, call.x, call.w); });
    bench.flops(name + ", as product and activation", c.flops(), [&] {
      const Ran product = gpu.linear(both.view, call.x, call.w);
      gpu.activation(call.out, both.view, Activation::silu_gate);
      return product;
    });
  }
}

void attention_cases(Bench& bench, Backend& gpu) {
  for (const auto& c : conformance::attention_cases(Scale::device)) {
    const std::string name = "attention " + c.name;
    if (!bench.wants(name)) continue;
    Tensors tensors(bench);
    const auto call = arguments(c, DType::bf16, Layout::contiguous, tensors.make());
    AttentionPlan plan;
    plan.scale = c.scale();
    const auto run = [&] { return gpu.attention(call.out, call.q, call.k, call.v, plan); };
    if (c.d > 128) {  // nobody else runs it
      bench.flops(name, c.flops(), run);
      continue;
    }
    const auto time = [&](const char* implementation) {
      plan.implementation = implementation;
      return bench.seconds([&] { run(); });
    };
    bench.guard(name, [&] {
      // Turn about, so that both see the same clocks.
      const double native = time("native"), cudnn = time("cudnn"), again = time("native"),
                   cudnn_again = time("cudnn"), s = std::min(native, again);
      const Bench::Peer peer{"cudnn", std::min(cudnn, cudnn_again) * 1e3};
      bench.report(name, s * 1e3, "ms", 0, concat(int64_t(c.flops() / s / 1e12), " TFLOP/s"),
                   &peer);
    });
  }
  for (DType dtype : {DType::bf16, DType::f32}) {
    const std::string name = concat("select_blocks 44160 x 44672 ", name_of(dtype));
    if (!bench.wants(name)) continue;
    const Tensor q = bench.random({kRows, 32, 128}, dtype),
                 k = bench.random({kKeys, 8, 128}, dtype);
    const Tensor indices = gpu.allocate_tensor({32, 690, 698}, DType::i32),
                 counts = gpu.allocate_tensor({32, 690}, DType::i32);
    BlockSelection selection;
    selection.protected_keys = 512;
    selection.scale = 1.0f / std::sqrt(128.0f);
    bench.bytes(name, size(q) + size(k),
                [&] { gpu.select_blocks(indices.view, counts.view, q.view, k.view, selection); });
  }
}

void convolution_cases(Bench& bench, Backend& gpu) {
  const auto time = [&](const std::string& name, const conformance::ConvCase& c,
                        const conformance::ConvVariant& variant) {
    if (!bench.wants(name)) return;
    bench.guard(name, [&] {
      Tensors tensors(bench);
      const Conv3dArgs call = arguments(c, variant, tensors.make());
      bench.flops(name, c.flops(), [&] {
        return gpu.conv3d(call.out, call.x, call.w, call.bias, call.conv, call.residual);
      });
    });
  };
  for (const auto& c : conformance::conv_cases(Scale::device)) {
    const std::string name = "conv3d " + c.name;
    const DType dtype = DType::bf16;
    time(name, c, {dtype, dtype, Layout::contiguous, true});
    if (c.kernel[0] == 3 && c.kernel[1] == 3 && c.cout == c.x[3])
      time(name + " + residual", c, {dtype, dtype, Layout::contiguous, true, true});
  }
  const conformance::ConvCase full{
      "", {6, 90, 160, 256}, 256, {3, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {0, 1, 1}, {0, 1, 1}}};
  time("conv3d f32 [6, 90, 160, 256] to 256 by 3x3x3", full, {DType::f32, DType::f32});
  if (bench.wants("conv_transpose1d")) {
    const Tensor x = bench.random({197, 5120}), w = bench.random({5120, 2560, 16}),
                 out = gpu.allocate_tensor({197 * 8, 2560}, DType::bf16);
    bench.flops("conv_transpose1d 197 x 5120 to 2560, 8x", 2.0 * 197 * 5120 * 2560 * 16, [&] {
      gpu.conv_transpose1d(out.view, x.view, w.view, {}, 8, 4);
      return Ran{};
    });
  }
}

// Weights from a mapped file in the page cache, as a checkpoint is read.
void transfer_cases(Bench& bench, Backend& gpu) {
  if (!bench.wants("transfer")) return;
  const int64_t bytes = int64_t{2} << 30;
  char path[] = "/tmp/orrery_transfer_XXXXXX";
  const int file = mkstemp(path);
  require(file >= 0, "transfer: cannot create ", path);
  unlink(path);
  std::vector<char> block(size_t{64} << 20, 'x');
  for (int64_t at = 0; at < bytes; at += int64_t(block.size())) {
    require(write(file, block.data(), block.size()) == ssize_t(block.size()),
            "transfer: cannot write ", path);
  }
  void* mapped = mmap(nullptr, size_t(bytes), PROT_READ, MAP_SHARED, file, 0);
  require(mapped != MAP_FAILED, "transfer: cannot map ", path);
  const Tensor device = gpu.allocate_tensor({bytes}, DType::u8);
  const View host = make_view(mapped, {bytes}, DType::u8);
  const auto once = [&](const std::function<void()>& fn) {
    const auto start = std::chrono::steady_clock::now();
    fn();
    gpu.synchronize();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const double first = once([&] { gpu.upload(device.view, host); });
  const double second = once([&] { gpu.upload(device.view, host); });
  bench.report("transfer: upload of a fresh mapping", double(bytes) / first / 1e9, "GB/s", 0);
  bench.report("transfer: upload again", double(bytes) / second / 1e9, "GB/s", 0);
  Tensor back = allocate_host_tensor({bytes}, DType::u8);
  once([&] { gpu.download(back.view, device.view); });
  const double down = once([&] { gpu.download(back.view, device.view); });
  bench.report("transfer: download", double(bytes) / down / 1e9, "GB/s", 0);
  munmap(mapped, size_t(bytes));
  close(file);
}

void replay_case(Bench& bench, Backend& gpu) {
  if (!bench.wants("replay")) return;
  const Tensor x = bench.random({64, 64}), y = gpu.allocate_tensor({64, 64}, DType::bf16);
  const auto step = [&] {
    for (int i = 0; i < 100; ++i) gpu.lincomb(y.view, {{1.0f, x.view}, {0.5f, x.view}});
  };
  bench.report("100 small calls, one by one", bench.seconds(step) * 1e6, "us", 0);
  bench.report("100 small calls, replay", bench.seconds([&] { gpu.replay("small", step); }) * 1e6,
               "us", 0);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::vector<std::string> only(argv + 1, argv + argc);
    std::string command = "device_ops";
    for (const std::string& part : only) command += " '" + part + "'";
    const auto gpu = cuda::make_cuda_backend();
    Bench bench(*gpu, only, command);
    bench.measure_ceilings();
    for (const auto& cases : {layout_cases, row_cases, product_cases, attention_cases,
                              convolution_cases, transfer_cases, replay_case}) {
      cases(bench, *gpu);
    }
    return 0;
  } catch (const Error& error) {
    std::fprintf(stderr, "device_ops: %s\n", error.what());
    return 1;
  }
}
