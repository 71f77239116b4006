// What is special to the CPU backend; the contract of its operations is tested in
// tests/conformance.
#include "cpu/cpu_backend.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "base/error.h"

namespace orrery::cpu {
namespace {

Tensor random_tensor(Backend& backend, Shape shape, DType dtype, uint32_t seed) {
  Tensor host = allocate_host_tensor(shape, DType::f32);
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < host.view.numel(); ++i) host.view.as<float>()[i] = normal(engine);
  Tensor tensor = backend.allocate_tensor(shape, dtype);
  backend.copy(tensor.view, host.view);
  return tensor;
}

// The most memory the process has held; -1 where the system does not say.
int64_t peak_kib() {
  std::FILE* status = std::fopen("/proc/self/status", "r");
  char line[256];
  int64_t peak = -1;
  while (status && std::fgets(line, sizeof line, status)) std::sscanf(line, "VmHWM: %ld", &peak);
  if (status) std::fclose(status);
  return peak;
}

// Bytes of the results of every operation that shares work between threads.
std::vector<std::byte> run_everything(int threads) {
  const auto backend = make_cpu_backend({.num_threads = threads});
  std::vector<std::byte> bytes;
  const auto keep = [&](const Tensor& t) {
    const auto* data = t.view.as<std::byte>();
    bytes.insert(bytes.end(), data, data + t.view.bytes());
  };
  for (DType dtype : {DType::f32, DType::bf16}) {
    const auto make = [&](Shape shape, uint32_t seed) {
      return random_tensor(*backend, shape, dtype, seed);
    };
    const auto output = [&](Shape shape) { return backend->allocate_tensor(shape, dtype); };
    {
      const Tensor x = make({203, 517}, 1), w = random_tensor(*backend, {300, 517}, DType::bf16, 2);
      const Tensor out = output({203, 300});
      LinearOptions options;
      options.activation = Activation::silu;
      backend->linear(out.view, x.view, w.view, options);
      keep(out);
      const Tensor normed = output({203, 517}), scale = make({517}, 3);
      backend->rms_norm(normed.view, x.view, scale.view, {NormKind::channel, 0, true});
      keep(normed);
      const Tensor sum = output({203, 517});
      backend->lincomb(sum.view, {{0.3f, x.view}, {1.7f, normed.view}});
      keep(sum);
      const Tensor turned = output({517, 203});
      backend->copy(turned.view, View(sum.view).permute({1, 0}));
      keep(turned);
    }
    {
      const Tensor x = make({3, 21, 45, 24}, 4), w = make({40, 24, 3, 3, 3}, 5),
                   out = output({3, 21, 45, 40});
      backend->conv3d(out.view, x.view, w.view, {}, {{1, 1, 1}, {1, 1, 1}, {2, 1, 1}, {0, 1, 1}});
      keep(out);
    }
    for (bool causal : {false, true}) {
      const Tensor q = make({333, 4, 32}, 6), k = make({700, 2, 32}, 7), v = make({700, 2, 32}, 8);
      const Tensor out = output({333, 4, 32});
      AttentionPlan plan;
      plan.scale = 0.2f;
      plan.causal = causal;
      backend->attention(out.view, q.view, k.view, v.view, plan);
      keep(out);
    }
    {
      const Tensor q = make({500, 2, 16}, 9), k = make({2000, 1, 16}, 10);
      const Tensor ids = backend->allocate_tensor({2, 8, 32}, DType::i32),
                   counts = backend->allocate_tensor({2, 8}, DType::i32),
                   scores = backend->allocate_tensor({2, 8, 32}, DType::f32);
      std::memset(ids.view.mut(), 0, size_t(ids.view.bytes()));
      BlockSelection selection;
      selection.scale = 0.25f;
      backend->select_blocks(ids.view, counts.view, q.view, k.view, selection, scores.view);
      keep(ids);
      keep(scores);
    }
    {
      const Tensor x = make({400, 32}, 11), w = make({32, 24, 8}, 12), out = output({1600, 24});
      backend->conv_transpose1d(out.view, x.view, w.view, {}, 4, 2);
      keep(out);
      const Tensor alpha = random_tensor(*backend, {24}, DType::f32, 13);
      const Tensor wave = output({1600, 24});
      backend->snake(wave.view, out.view, alpha.view, alpha.view);
      keep(wave);
    }
  }
  return bytes;
}

// B84: the same bytes with 1 and with 8 threads, and again.
TEST(CpuBackend, BytesDoNotDependOnTheNumberOfThreads) {
  const std::vector<std::byte> one = run_everything(1);
  ASSERT_FALSE(one.empty());
  for (int threads : {2, 3, 8})
    EXPECT_TRUE(run_everything(threads) == one) << threads << " threads";
  EXPECT_TRUE(run_everything(8) == one) << "second run";
}

// Ranks of one process: each thread's backend keeps to its own number of threads, and oneDNN, which
// all share, to each call's.
TEST(CpuBackend, BackendsOfSeveralThreadsDoNotDisturbEachOther) {
  const std::vector<std::byte> alone = run_everything(1);
  const int before = omp_get_max_threads();
  std::array<std::vector<std::byte>, 3> bytes;
  std::array<int, 3> left{};
  std::vector<std::thread> ranks;
  for (size_t rank = 0; rank < bytes.size(); ++rank) {
    ranks.emplace_back([&, rank] {
      bytes[rank] = run_everything(int(rank) + 1);
      left[rank] = omp_get_max_threads();
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (size_t rank = 0; rank < bytes.size(); ++rank) {
    EXPECT_TRUE(bytes[rank] == alone) << rank;
    EXPECT_EQ(left[rank], before) << "the limit of a call outlived it";
  }
}

// A checkpoint is mapped as it lies in the file: weights may start at any byte.
TEST(CpuBackend, WeightsMayBeMisaligned) {
  const auto backend = make_cpu_backend({.num_threads = 2});
  const Tensor x = random_tensor(*backend, {5, 24}, DType::f32, 1),
               image = random_tensor(*backend, {1, 4, 4, 8}, DType::f32, 2);
  for (DType dtype : {DType::f32, DType::bf16}) {
    const Tensor w = random_tensor(*backend, {10, 24}, dtype, 3),
                 kernel = random_tensor(*backend, {6, 8, 1, 3, 3}, dtype, 4),
                 gain = random_tensor(*backend, {24}, dtype, 5);
    const auto shifted = [](const Tensor& t, std::vector<std::byte>& storage) {
      storage.resize(size_t(t.view.bytes()) + 1);
      std::memcpy(storage.data() + 1, t.view.data, size_t(t.view.bytes()));
      return make_view(storage.data() + 1, t.view.shape, t.view.dtype);
    };
    std::vector<std::byte> w_bytes, kernel_bytes, gain_bytes;
    const View odd_w = shifted(w, w_bytes), odd_kernel = shifted(kernel, kernel_bytes),
               odd_gain = shifted(gain, gain_bytes);
    const auto compute = [&](const View& a, const View& b, const View& c) {
      const Tensor product = backend->allocate_tensor({5, 10}, DType::f32),
                   map = backend->allocate_tensor({1, 2, 2, 6}, DType::f32),
                   row = backend->allocate_tensor({5, 24}, DType::f32),
                   table = backend->allocate_tensor({2, 24}, DType::f32);
      const std::vector<int64_t> ids{9, 0};
      backend->linear(product.view, x.view, a);
      backend->conv3d(map.view, image.view, b, {}, {});
      backend->rms_norm(row.view, x.view, c, {});
      backend->gather_rows(table.view, a, ids);
      std::vector<float> all;
      for (const Tensor* t : {&product, &map, &row, &table}) {
        all.insert(all.end(), t->view.as<float>(), t->view.as<float>() + t->view.numel());
      }
      return all;
    };
    EXPECT_EQ(compute(odd_w, odd_kernel, odd_gain), compute(w.view, kernel.view, gain.view));
  }
}

// B56: no Sq x Skv buffer.
TEST(CpuBackend, AttentionMemoryDoesNotGrowWithTheSquare) {
  const auto backend = make_cpu_backend({.num_threads = 1});
  const Tensor q = random_tensor(*backend, {512, 1, 8}, DType::f32, 1),
               k = random_tensor(*backend, {1 << 16, 1, 8}, DType::f32, 2),
               out = backend->allocate_tensor({512, 1, 8}, DType::f32);
  AttentionPlan plan;
  plan.scale = 0.3f;
  const int64_t before = peak_kib();
  if (before < 0) GTEST_SKIP() << "no /proc/self/status here";
  backend->attention(out.view, q.view, k.view, k.view, plan);
  // Packed keys and values: 65536 x (8 + 16) floats, 6 MiB. 512 x 65536 scores would be 128 MiB
  // more.
  EXPECT_LT(peak_kib() - before, 16 * 1024);
}

// A key of minus infinity has no weight; a row of nothing else has no keys.
TEST(CpuBackend, ScoresOfMinusInfinityAreNoKeys) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto backend = make_cpu_backend({.num_threads = 1});
  const Tensor q = backend->allocate_tensor({1, 1, 8}, DType::f32),
               k = backend->allocate_tensor({3, 1, 8}, DType::f32),
               v = backend->allocate_tensor({3, 1, 8}, DType::f32),
               out = backend->allocate_tensor({1, 1, 8}, DType::f32),
               lse = backend->allocate_tensor({1, 1}, DType::f32);
  backend->fill(q.view, 1.0f);
  backend->fill(k.view, -kInfinity);
  backend->fill(v.view, 5.0f);
  AttentionPlan plan;
  plan.scale = 1;
  plan.lse = lse.view;
  for (const char* name : {"native", "reference"}) {
    plan.implementation = name;
    backend->fill(k.view, -kInfinity);
    backend->attention(out.view, q.view, k.view, v.view, plan);
    EXPECT_EQ(out.view.as<float>()[0], 0.0f) << name;
    EXPECT_EQ(lse.view.as<float>()[0], -kInfinity) << name;
    backend->fill(k.view.slice(0, 1, 1), 0.25f);  // score 2
    backend->attention(out.view, q.view, k.view, v.view, plan);
    EXPECT_EQ(out.view.as<float>()[0], 5.0f) << name;
    EXPECT_EQ(lse.view.as<float>()[0], 2.0f) << name;
  }
}

TEST(CpuBackend, UnknownKernelsAreRefused) {
  try {
    make_cpu_backend({.num_threads = 1, .kernels = "mmx"});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("mmx"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("generic"), std::string::npos);
  }
  EXPECT_THROW(make_cpu_backend({.num_threads = -1}), Error);
}

TEST(CpuBackend, UnknownLinearIsRefused) {
  try {
    make_cpu_backend({.linear = "magma"});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
    EXPECT_STREQ(error.what(), "cpu linear: \"magma\" is not one of onednn, reference");
  }
}

// A checkpoint's f16 and bf16 weights stay where they are: what is widened at a time is bounded.
TEST(CpuBackend, LinearWidensWeightsInBands) {
  const auto backend = make_cpu_backend({.num_threads = 1});
  const Tensor x = random_tensor(*backend, {4, 1024}, DType::f32, 1);
  const Tensor w = backend->allocate_tensor({32 << 10, 1024}, DType::bf16),  // 64 MiB
      out = backend->allocate_tensor({4, 32 << 10}, DType::f32);
  backend->fill(w.view, 0.5f);
  backend->fill(out.view, 0.0f);
  const int64_t before = peak_kib();
  if (before < 0) GTEST_SKIP() << "no /proc/self/status here";
  backend->linear(out.view, x.view, w.view);
  // A band of 2 Mi floats and oneDNN's own copies, and what a sanitizer shadows them with; all
  // weights would be 128 MiB.
  EXPECT_LT(peak_kib() - before, 64 * 1024);
}

TEST(CpuBackend, DescribesItself) {
  const auto backend = make_cpu_backend({.num_threads = 3, .kernels = "generic"});
  EXPECT_EQ(backend->description(), "cpu: 3 threads, generic");
  EXPECT_EQ(backend->device(), DeviceKind::cpu);
}

}  // namespace
}  // namespace orrery::cpu
