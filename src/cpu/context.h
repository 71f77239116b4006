// What every CPU operation is given: the loops to use, the threads, and memory kept between calls.
// No result depends on the number of threads.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <span>

#include "backend/backend.h"
#include "base/thread_pool.h"
#include "cpu/kernels.h"
#include "tensor/tensor.h"

namespace orrery::cpu {

// Grow-only memory, 64-byte aligned. A pointer is valid until the next need() of the same object.
class Scratch {
 public:
  float* need(int64_t floats);
  // `floats` for each thread; thread t uses the block that of() names.
  void need_each(int threads, int64_t floats);
  float* of(int thread) const { return base_ + thread * each_; }

 private:
  Buffer buffer_;
  float* base_ = nullptr;
  int64_t each_ = 0;
};

struct Context {
  const Kernels& kernels;
  int threads = 1;
  Scratch shared = {};  // one operand for all threads
  Scratch values = {};  // a second one
  Scratch per_thread = {};
  std::shared_ptr<ThreadPool> pool = {};  // of `threads`
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// fn(index, thread) for each index below count, in any order, on up to context.threads threads.
// Must neither throw nor start parallel work of its own.
template <typename Fn>
void parallel_tasks(const Context& context, int64_t count, const Fn& fn) {
  if (context.pool) {
    context.pool->run(count, context.threads, fn);
  } else {
    for (int64_t i = 0; i < count; ++i) fn(i, 0);
  }
}

// fn(begin, end, thread) over [0, count) in pieces of at least `grain`: small work stays on the
// caller.
template <typename Fn>
void parallel_ranges(const Context& context, int64_t count, int64_t grain, const Fn& fn) {
  const int64_t pieces =
      std::clamp<int64_t>(count / std::max<int64_t>(grain, 1), 1, context.threads);
  parallel_tasks(context, pieces, [&](int64_t piece, int thread) {
    const int64_t begin = count * piece / pieces, end = count * (piece + 1) / pieces;
    if (begin < end) fn(begin, end, thread);
  });
}

// Elements handled together: inside the first-level cache with room for several operands.
inline constexpr int64_t kChunk = 512;

Stored stored(DType dtype);

inline const std::byte* at(const void* data, int64_t element, DType dtype) {
  return static_cast<const std::byte*>(data) + element * size_of(dtype);
}
inline std::byte* at(void* data, int64_t element, DType dtype) {
  return static_cast<std::byte*>(data) + element * size_of(dtype);
}

// The n elements from `element` on, `stride` apart, as contiguous f32: in place when they are that
// already, else converted into buffer.
const float* read_row(const Kernels& kernels, float* buffer, const void* data, DType dtype,
                      int64_t element, int64_t n, int64_t stride = 1);
// Where to compute n f32 results that finish_row() then stores: the output itself or buffer.
inline float* result_row(float* buffer, void* data, DType dtype, int64_t element,
                         int64_t stride = 1) {
  return dtype == DType::f32 && stride == 1 ? static_cast<float*>(data) + element : buffer;
}
void finish_row(const Kernels& kernels, const float* row, void* data, DType dtype, int64_t element,
                int64_t n, int64_t stride = 1);

}  // namespace orrery::cpu
