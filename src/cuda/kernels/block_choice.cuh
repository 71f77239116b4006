// How a row's ranks are ordered and how many of them hold a mass: what both selectors
// (block_select.cu, sm90_select.cu) must do alike.
#pragma once

#include <cstdint>

namespace orrery::cuda {

// Unsigned integers that compare as the floats do.
__device__ __forceinline__ uint32_t sortable(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 becomes 0
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// Where equal ranks fall, smallest first: any number of them is spread evenly over the sequence
// (golden ratio). The product is a bijection, so the order is total.
__device__ __forceinline__ uint32_t spread(int block) { return uint32_t(block) * 2654435769u; }

// How many of the largest of the keys of [begin, end) it takes until the ranks that they stand for
// sum to `mass`; all of them when they do not reach it. Keys are sortable() of finite ranks, none
// negative. `Team` is the threads that call this together: each has team.first() and team.size(),
// and team.sum(x) gives all of them the sum of their x, added in an order that does not change.
// Hence the sum over the keys that reach a bound never shrinks when the bound falls, whatever was
// rounded, and the bits of the bound can be found one by one.
template <typename Team, typename Key>
__device__ __forceinline__ int count_of_mass(const Team& team, int begin, int end, float mass,
                                             const Key& key) {
  const auto rank_of = [](uint32_t k) { return __uint_as_float(k & 0x7fffffffu); };
  const auto sum_from = [&](uint32_t bound) {
    float sum = 0.0f;
    for (int b = begin + team.first(); b < end; b += team.size()) {
      const uint32_t k = key(b);
      if (k >= bound) sum += rank_of(k);
    }
    return team.sum(sum);
  };
  const auto count_from = [&](uint32_t bound) {
    int count = 0;
    for (int b = begin + team.first(); b < end; b += team.size()) count += key(b) >= bound;
    return int(team.sum(float(count)));  // exact: there are fewer than 2^24 blocks
  };
  uint32_t cut = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (sum_from(cut | bit) >= mass) cut |= bit;
  }
  if (cut == 0) return end - begin;
  // The blocks above the cut fall short; of those at it, as many as it takes.
  const int above = count_from(cut + 1), reached = count_from(cut);
  const float missing = (mass - sum_from(cut + 1)) / rank_of(cut);
  return above + max(1, min(reached - above, int(ceilf(missing))));
}

}  // namespace orrery::cuda
