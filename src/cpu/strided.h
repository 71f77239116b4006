// Loops over tensors of one shape and any strides, reduced to as few dimensions as they allow.
#pragma once

#include <array>
#include <initializer_list>
#include <span>

#include "cpu/context.h"

namespace orrery::cpu {

inline constexpr int kMaxOperands = 9;
using Offsets = std::array<int64_t, kMaxOperands>;  // in elements, one per operand

// Dimensions of size 1 are dropped, the rest ordered by the stride of the first operand, largest
// first, and neighbours merged where every operand allows it. At least one dimension remains.
class StridedLoop {
 public:
  StridedLoop(const Shape& shape, std::span<const View> operands);

  int rank() const { return rank_; }
  int64_t dim(int i) const { return dims_[size_t(i)]; }
  int64_t stride(int operand, int i) const { return strides_[size_t(i)][size_t(operand)]; }
  // Exchanges two dimensions.
  void swap(int i, int j);

  // Number of index tuples of the first `dims` dimensions, and the offsets of one of them.
  int64_t count(int dims) const;
  Offsets offsets(int dims, int64_t index) const;

 private:
  int rank_ = 0;
  std::array<int64_t, kMaxRank> dims_{};
  std::array<Offsets, kMaxRank> strides_{};
  int operands_ = 0;
};

// fn(offsets, n) for runs of at most kChunk elements along the last dimension, on all threads.
// `weight` is the work per element, 1 for a few operations.
template <typename Fn>
void for_runs(const Context& context, const StridedLoop& loop, int64_t weight, const Fn& fn) {
  const int last = loop.rank() - 1;
  const int64_t length = loop.dim(last), run = std::max<int64_t>(1, kChunk / weight);
  const int64_t pieces = (length + run - 1) / run;
  const int64_t grain = std::max<int64_t>(1, 64 * kChunk / weight / std::min(length, run));
  parallel_ranges(context, loop.count(last) * pieces, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t start = unit % pieces * run;
      Offsets offsets = loop.offsets(last, unit / pieces);
      for (int i = 0; i < kMaxOperands; ++i) offsets[size_t(i)] += start * loop.stride(i, last);
      fn(offsets, std::min(run, length - start));
    }
  });
}

}  // namespace orrery::cpu
