// Random weights in place of files: for benchmarks and made checkpoints.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "model/weight_memory.h"

namespace orrery {

// The values of random weights: vectors named like norms are 1, all others are cut from one block
// of normals, each at another offset, with a deviation that keeps activations of order one.
class RandomCuts {
 public:
  static constexpr int64_t kBlock = int64_t{1} << 22;
  static constexpr float kDeviation = 0.02f;
  static bool is_ones(std::string_view name);
  // kBlock standard normals.
  static std::vector<float> normals(uint64_t seed);
  // Calls piece(at, from, count) for each run of a tensor's `count` values, elements [from, from +
  // count) of the block.
  void next(int64_t count,
            const std::function<void(int64_t at, int64_t from, int64_t count)>& piece);

 private:
  int64_t next_ = 0;
};

// Made on the backend. A rank's slice has the values that the whole has there. Weights of 8 bits
// are refused.
WeightStore random_weights(Backend& backend, const VisitFunction& visit, const HoldRule& hold,
                           uint64_t seed, const Shard& shard = {});

// As random_weights(), into a block whose `write` side lies in host memory; without one the slots
// are set and nothing is written.
void random_block(Backend& backend, const VisitFunction& visit, const HoldRule& hold, uint64_t seed,
                  const Shard& shard, WeightBlock& block);

}  // namespace orrery
