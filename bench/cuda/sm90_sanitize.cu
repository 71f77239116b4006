// Small calls of every Hopper kernel, checked on the host in double: the program to run under
// compute-sanitizer.
//
//   nvcc -std=c++20 -O1 -lineinfo -I src -gencode arch=compute_90a,code=sm_90a \
//       bench/cuda/sm90_sanitize.cu src/cuda/kernels/sm90_*.cu -o build/sm90_sanitize
//   compute-sanitizer --tool memcheck|racecheck|synccheck|initcheck build/sm90_sanitize
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "cuda/kernels/sm90_attention.h"
#include "cuda/kernels/sm90_conv.h"
#include "cuda/kernels/sm90_gate.h"
#include "cuda/kernels/sm90_select.h"

namespace {

using orrery::cuda::Sm90AttentionParams;
using orrery::cuda::Sm90SelectParams;

void require(const char* error) {
  if (error != nullptr) {
    std::printf("FAILED: %s\n", error);
    std::exit(1);
  }
}

void require(cudaError_t error) {
  require(error == cudaSuccess ? nullptr : cudaGetErrorString(error));
}

// Device memory of exactly the size asked for, so that memcheck sees every step over its end.
template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t count) : count_(count) {
    require(cudaMalloc(&data_, std::max<size_t>(1, count) * sizeof(T)));
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
    require(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }
  T* get() const { return data_; }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    require(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

std::vector<__nv_bfloat16> random_tensor(size_t count, unsigned seed, float gain) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<__nv_bfloat16> values(count);
  for (__nv_bfloat16& x : values) x = __float2bfloat16(normal(generator) * gain);
  return values;
}

struct Case {
  int sq, skv, hq, hkv, d;
  bool causal = false;
  int block_q = 0;  // 0: dense
  int sharing = 1;
  float gain = 1;
};

// Lists from the selector itself, so that both run.
bool run(const Case& c) {
  const auto q = random_tensor(size_t(c.sq) * c.hq * c.d, 1, c.gain);
  const auto k = random_tensor(size_t(c.skv) * c.hkv * c.d, 2, 1);
  const auto v = random_tensor(size_t(c.skv) * c.hkv * c.d, 3, 1);
  const Buffer device_q(q), device_k(k), device_v(v);
  const Buffer<__nv_bfloat16> device_out(q.size());
  const Buffer<float> device_lse(size_t(c.sq) * c.hq);

  Sm90AttentionParams p;
  p.q = device_q.get();
  p.k = device_k.get();
  p.v = device_v.get();
  p.out = device_out.get();
  p.lse = device_lse.get();
  p.sq = c.sq;
  p.skv = c.skv;
  p.hq = c.hq;
  p.hkv = c.hkv;
  p.head_dim = c.d;
  p.q_stride = p.out_stride = c.hq * c.d;
  p.k_stride = p.v_stride = c.hkv * c.d;
  p.scale = 1.0f / std::sqrt(float(c.d));
  p.causal = c.causal;

  const int block_q = std::max(64, c.block_q), rows = (c.sq + block_q - 1) / block_q;
  const int blocks = (c.skv + 63) / 64, budget = std::min(3, blocks), lists = c.hq / c.sharing;
  const Buffer<int32_t> indices(size_t(lists) * rows * budget), counts(size_t(lists) * rows);
  Sm90SelectParams s;
  s.q = p.q;
  s.k = p.k;
  s.sq = p.sq;
  s.skv = p.skv;
  s.hq = p.hq;
  s.hkv = p.hkv;
  s.head_dim = p.head_dim;
  s.q_stride = p.q_stride;
  s.k_stride = p.k_stride;
  s.scale = p.scale;
  s.block_q = block_q;
  s.heads_per_list = c.sharing;
  s.tail_begin = blocks;
  s.budget = budget;
  s.dense_tail_begin = rows;
  s.indices = indices.get();
  s.counts = counts.get();
  s.capacity = budget;
  const Buffer<uint8_t> workspace(orrery::cuda::sm90_select_workspace(s));
  s.workspace = workspace.get();
  if (c.block_q > 0) {
    require(orrery::cuda::sm90_select(s, nullptr));
    p.indices = indices.get();
    p.counts = counts.get();
    p.block_q = block_q;
    p.capacity = budget;
    p.heads_per_list = c.sharing;
  }
  require(orrery::cuda::sm90_attention(p, nullptr));
  require(cudaDeviceSynchronize());

  const auto out = device_out.read();
  const auto lse = device_lse.read();
  std::vector<int32_t> chosen;
  if (c.block_q > 0) chosen = indices.read();
  double error = 0, norm = 0, lse_error = 0;
  std::vector<double> score(c.skv), sum(c.d);
  for (int h = 0; h < c.hq; ++h) {
    const int kv = h / (c.hq / c.hkv);
    for (int i = 0; i < c.sq; ++i) {
      std::vector<bool> keep(blocks, c.block_q == 0);
      for (int b = 0; b < budget && c.block_q > 0; ++b) {
        keep[chosen[(size_t(h / c.sharing) * rows + i / block_q) * budget + b]] = true;
      }
      double top = -std::numeric_limits<double>::infinity(), total = 0;
      for (int j = 0; j < c.skv; ++j) {
        score[j] = -std::numeric_limits<double>::infinity();
        if (!keep[j / 64] || (c.causal && j > i + c.skv - c.sq)) continue;
        double dot = 0;
        for (int x = 0; x < c.d; ++x) {
          dot += double(__bfloat162float(q[(size_t(i) * c.hq + h) * c.d + x])) *
                 double(__bfloat162float(k[(size_t(j) * c.hkv + kv) * c.d + x]));
        }
        score[j] = dot * p.scale;
        top = std::max(top, score[j]);
      }
      std::fill(sum.begin(), sum.end(), 0.0);
      for (int j = 0; j < c.skv; ++j) {
        if (std::isinf(score[j])) continue;
        const double weight = std::exp(score[j] - top);
        total += weight;
        for (int x = 0; x < c.d; ++x) {
          sum[x] += weight * double(__bfloat162float(v[(size_t(j) * c.hkv + kv) * c.d + x]));
        }
      }
      for (int x = 0; x < c.d; ++x) {
        const double want = total > 0 ? sum[x] / total : 0;
        const double got = __bfloat162float(out[(size_t(i) * c.hq + h) * c.d + x]);
        error += (got - want) * (got - want);
        norm += want * want;
      }
      const double got_lse = lse[size_t(h) * c.sq + i];
      if (total > 0) {
        const double want_lse = top + std::log(total);
        lse_error =
            std::max(lse_error, std::fabs(got_lse - want_lse) / std::max(1.0, std::fabs(want_lse)));
      } else if (!std::isinf(got_lse)) {
        lse_error = 1;
      }
    }
  }
  error = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
  const bool right = error < 4e-3 && lse_error < 1e-4;
  std::printf("%s sq %d skv %d heads %d/%d of %d%s block_q %d sharing %d gain %g: %.2e, lse %.1e\n",
              right ? "ok    " : "WRONG ", c.sq, c.skv, c.hq, c.hkv, c.d, c.causal ? " causal" : "",
              c.block_q, c.sharing, c.gain, error, lse_error);
  return right;
}

// Of all values: the root of the squared error over that of the squared value.
class Difference {
 public:
  void add(double got, double want) {
    error_ += (got - want) * (got - want);
    norm_ += want * want;
  }
  bool small(const char* what) const {
    const double relative = std::sqrt(error_ / norm_);
    const bool right = relative < 4e-3;
    std::printf("%s %s: %.2e\n", right ? "ok    " : "WRONG ", what, relative);
    return right;
  }

 private:
  double error_ = 0, norm_ = 0;
};

double at(const std::vector<__nv_bfloat16>& values, size_t index) {
  return __bfloat162float(values[index]);
}

bool run_gate(int m, int n, int k) {
  const auto x = random_tensor(size_t(m) * k, 4, 1), w = random_tensor(size_t(2) * n * k, 5, 0.1f);
  const Buffer device_x(x), device_w(w);
  const Buffer<__nv_bfloat16> device_out(size_t(m) * n);
  orrery::cuda::Sm90GateParams p;
  p.x = device_x.get();
  p.w = device_w.get();
  p.out = device_out.get();
  p.x_stride = p.w_stride = p.k = k;
  p.out_stride = p.n = n;
  p.m = m;
  require(orrery::cuda::sm90_gate(p, nullptr));
  require(cudaDeviceSynchronize());
  const auto out = device_out.read();
  Difference difference;
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double gate = 0, up = 0;
      for (int c = 0; c < k; ++c) {
        gate += at(x, size_t(i) * k + c) * at(w, size_t(j) * k + c);
        up += at(x, size_t(i) * k + c) * at(w, size_t(n + j) * k + c);
      }
      difference.add(at(out, size_t(i) * n + j), gate / (1 + std::exp(-gate)) * up);
    }
  }
  return difference.small("gated projection");
}

bool run_pair_conv(int pairs, int frames, int rows, int columns, int cin, int cout) {
  const size_t plane_in = size_t(rows) * columns * cin, plane = size_t(rows) * columns * cout;
  const auto t = random_tensor(4 * pairs * plane_in, 6, 1),
             u = random_tensor(size_t(36) * cin * cout, 7, 0.1f), bias = random_tensor(cout, 8, 1),
             residual = random_tensor(frames * plane, 9, 1);
  const Buffer device_t(t), device_u(u), device_bias(bias), device_residual(residual);
  const Buffer<__nv_bfloat16> device_out(frames * plane);
  orrery::cuda::Sm90PairConvParams p;
  p.t = device_t.get();
  p.u = device_u.get();
  p.bias = device_bias.get();
  p.residual = device_residual.get();
  p.out = device_out.get();
  p.residual_stride = p.out_stride = int64_t(plane);
  p.pairs = pairs;
  p.frames = frames;
  p.rows = p.rows_in = rows;
  p.columns = p.columns_in = columns;
  p.pad_rows = p.pad_columns = 1;
  p.cin = cin;
  p.cout = cout;
  require(orrery::cuda::sm90_pair_conv(p, nullptr));
  require(cudaDeviceSynchronize());
  const auto out = device_out.read();
  Difference difference;
  for (int f = 0; f < frames; ++f) {
    for (int y = 0; y < rows; ++y) {
      for (int x = 0; x < columns; ++x) {
        for (int c = 0; c < cout; ++c) {
          const size_t to = f * plane + (size_t(y) * columns + x) * cout + c;
          double sum = at(bias, c) + at(residual, to);
          for (int product = f % 2; product < 3 + f % 2; ++product) {
            const double sign = f % 2 == 1 && product == 2 ? -1 : 1;
            for (int tap = 0; tap < 9; ++tap) {
              const int row = y + tap / 3 - 1, column = x + tap % 3 - 1;
              if (row < 0 || row >= rows || column < 0 || column >= columns) continue;
              const size_t from =
                  (4 * (f / 2) + product) * plane_in + (size_t(row) * columns + column) * cin;
              const size_t weights = (size_t(product * 9 + tap) * cout + c) * cin;
              for (int d = 0; d < cin; ++d) sum += sign * at(t, from + d) * at(u, weights + d);
            }
          }
          difference.add(at(out, to), sum);
        }
      }
    }
  }
  return difference.small("convolution of pairs of frames");
}

}  // namespace

int main() {
  bool right = true;
  for (const auto [m, n, k] : {std::array{300, 256, 128}, {70, 384, 64}, {1100, 128, 64}})
    right = run_gate(m, n, k) && right;
  right = run_pair_conv(1, 1, 9, 17, 64, 128) && right;
  right = run_pair_conv(2, 4, 17, 9, 128, 128) && right;
  right = run_pair_conv(3, 5, 10, 16, 64, 256) && right;
  for (const int d : {64, 128}) {
    for (const Case& c : {
             Case{.sq = 130, .skv = 300, .hq = 1, .hkv = 1, .d = d},
             Case{.sq = 130, .skv = 300, .hq = 4, .hkv = 1, .d = d},
             Case{.sq = 130, .skv = 700, .hq = 4, .hkv = 1, .d = d, .gain = 300},
             Case{.sq = 70, .skv = 0, .hq = 4, .hkv = 1, .d = d},
             Case{.sq = 200, .skv = 200, .hq = 2, .hkv = 1, .d = d, .causal = true},
             Case{.sq = 200, .skv = 330, .hq = 4, .hkv = 1, .d = d, .block_q = 64},
             Case{.sq = 200, .skv = 330, .hq = 3, .hkv = 3, .d = d, .block_q = 64, .gain = 300},
             Case{.sq = 200, .skv = 330, .hq = 4, .hkv = 1, .d = d, .block_q = 64, .sharing = 2},
             Case{.sq = 200, .skv = 330, .hq = 4, .hkv = 1, .d = d, .block_q = 64, .sharing = 4},
             Case{.sq = 200, .skv = 330, .hq = 4, .hkv = 1, .d = d, .block_q = 128},
             Case{.sq = 200, .skv = 330, .hq = 4, .hkv = 1, .d = d, .block_q = 128, .sharing = 2},
             // Several tiles of pooled keys for each warpgroup of the selector.
             Case{.sq = 70, .skv = 8300, .hq = 2, .hkv = 1, .d = d, .block_q = 64},
             Case{.sq = 70, .skv = 8300, .hq = 2, .hkv = 1, .d = d, .block_q = 64, .sharing = 2},
             // More than one item a CTA.
             Case{.sq = 300, .skv = 130, .hq = 64, .hkv = 16, .d = d, .gain = 300},
             Case{.sq = 300, .skv = 130, .hq = 64, .hkv = 16, .d = d, .block_q = 64},
             Case{.sq = 300, .skv = 130, .hq = 64, .hkv = 16, .d = d, .block_q = 64, .sharing = 2},
         }) {
      right = run(c) && right;
    }
  }
  std::printf(right ? "all right\n" : "FAILED\n");
  return right ? 0 : 1;
}
