#include "cpu/strided.h"

#include <utility>

namespace orrery::cpu {

StridedLoop::StridedLoop(const Shape& shape, std::span<const View> operands)
    : operands_(int(operands.size())) {
  for (int i = 0; i < shape.rank(); ++i) {
    if (shape[i] == 1) continue;
    dims_[size_t(rank_)] = shape[i];
    for (size_t op = 0; op < operands.size(); ++op) {
      strides_[size_t(rank_)][op] = operands[op].stride(i);
    }
    ++rank_;
  }
  if (rank_ == 0) {
    dims_[0] = 1;
    for (size_t op = 0; op < operands.size(); ++op) strides_[0][op] = 1;
    rank_ = 1;
    return;
  }
  for (int i = 1; i < rank_; ++i) {
    for (int j = i; j > 0 && stride(0, j - 1) < stride(0, j); --j) swap(j - 1, j);
  }
  int kept = 0;
  for (int i = 1; i < rank_; ++i) {
    bool merges = true;
    for (int op = 0; op < operands_; ++op) {
      merges = merges && stride(op, kept) == stride(op, i) * dim(i);
    }
    if (merges) {
      dims_[size_t(kept)] *= dim(i);
      strides_[size_t(kept)] = strides_[size_t(i)];
    } else {
      ++kept;
      dims_[size_t(kept)] = dim(i);
      strides_[size_t(kept)] = strides_[size_t(i)];
    }
  }
  rank_ = kept + 1;
}

void StridedLoop::swap(int i, int j) {
  std::swap(dims_[size_t(i)], dims_[size_t(j)]);
  std::swap(strides_[size_t(i)], strides_[size_t(j)]);
}

int64_t StridedLoop::count(int dims) const {
  int64_t count = 1;
  for (int i = 0; i < dims; ++i) count *= dim(i);
  return count;
}

Offsets StridedLoop::offsets(int dims, int64_t index) const {
  Offsets offsets{};
  for (int i = dims - 1; i >= 0; --i) {
    const int64_t position = index % dim(i);
    index /= dim(i);
    for (int op = 0; op < operands_; ++op) offsets[size_t(op)] += position * stride(op, i);
  }
  return offsets;
}

}  // namespace orrery::cpu
