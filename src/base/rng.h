// Standard normals with the numbers of PyTorch's CPU and CUDA generators.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <span>

#include "orrery/choices.h"

namespace orrery {

// Threads (blocks of 256) that a CUDA generator runs for a large draw on a GPU of 132
// multiprocessors with 2048 threads each: H100 SXM and H200.
inline constexpr int64_t kHopperThreads = 270336;

// One generator of one request: its state goes on from draw to draw. Only the number of elements of
// a draw matters, not their shape. Values do not depend on the machine's vector units; for the CPU
// kind they equal those of PyTorch on x86 with AVX2 bit for bit, for the CUDA kind they lie within
// 5e-6 (PyTorch takes sine and cosine from the GPU's fast approximation).
class NormalGenerator {
 public:
  // Negative seeds mean 2^64 + seed. `cuda_threads`: what a GPU with other multiprocessors runs, a
  // positive multiple of 256; elements beyond that many differ from GPU to GPU.
  explicit NormalGenerator(RngKind kind, int64_t seed, int64_t cuda_threads = kHopperThreads);
  // Fills out with the draw of out.size() elements of a type that is not automatic. An empty draw
  // consumes nothing.
  void fill(std::span<float> out, NoiseType stream = NoiseType::fp32);

 private:
  double next_uniform_f64();
  double next_small();
  void fill_cpu(std::span<float> out, NoiseType stream);
  void fill_cuda(std::span<float> out);

  RngKind kind_;
  uint64_t seed_;
  int64_t cuda_threads_;
  uint64_t offset_ = 0;          // cuda: Philox counter position, a multiple of 4
  std::mt19937 engine_;          // cpu
  std::optional<double> spare_;  // cpu: second half of a pair from a draw below 16 elements
};

}  // namespace orrery
