// Attention as the contract says it, for every shape: any head_dim, grouped heads, causal, block
// lists, LSE, no keys. The rung that faster kernels are checked against, and what f32 runs on.
//
// Layout: q, out [Sq, H, D], k, v [Skv, KV, D], heads contiguous in a row, any row stride. One warp
// owns one query row of one head: 32 keys at a time, a lane per key for the scores, then a lane per
// value column; query and accumulator live in shared memory as f32, so no Sq x Skv buffer exists.
// Flops: 4 Sq Skv H D. Bytes: K and V once per query row from the caches. No floor is claimed: it
// is bound by uncached loads and exists to be right.
//
// softmax_rows: the middle of the two-GEMM form for wide heads. Scores f32 [M, N] read twice (the
// second time from cache), probabilities written once.
#include "cuda/kernels.h"
#include "cuda/kernels/common.cuh"

namespace orrery::cuda {

namespace {

struct ReferenceShape {
  int64_t sq, skv, heads, group, d;
  int64_t q_row, k_row, v_row, out_row;
  float scale;
  bool causal;
  const int32_t* indices;  // null: every key
  const int32_t* counts;
  int64_t heads_per_list, list_rows, capacity, block_q, block_k;
};

template <typename T>
__global__ void attention_reference_kernel(T* out, const T* q, const T* k, const T* v, float* lse,
                                           ReferenceShape s) {
  extern __shared__ float memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t task = int64_t(blockIdx.x) * warps + warp;
  if (task >= s.sq * s.heads) return;
  const int64_t head = task / s.sq, row = task - head * s.sq;
  float* query = memory + int64_t(warp) * 2 * s.d;
  float* sum_of_values = query + s.d;
  q += row * s.q_row + head * s.d;
  k += head / s.group * s.d;
  v += head / s.group * s.d;
  for (int64_t i = lane; i < s.d; i += 32) {
    query[i] = to_f32(q[i]);
    sum_of_values[i] = 0.0f;
  }
  __syncwarp();

  // Keys in order, 32 at a time; with lists, the keys of the listed blocks one after another, so
  // that a list of every block groups them as no list does: the same result, bit for bit.
  const int32_t* list = nullptr;
  int64_t keys = s.causal ? min(s.skv, row + s.skv - s.sq + 1) : s.skv;
  if (s.indices) {
    const int64_t which = head / s.heads_per_list * s.list_rows + row / s.block_q;
    list = s.indices + which * s.capacity;
    const int64_t count = s.counts[which];
    // Only the last block of all may be short, and lists ascend.
    keys = count == 0
               ? 0
               : (count - 1) * s.block_k + min(s.block_k, s.skv - list[count - 1] * s.block_k);
  }
  float top = -INFINITY, total = 0.0f;
  for (int64_t first = 0; first < keys; first += 32) {
    const int64_t position = first + lane;
    int64_t key = position;
    float score = -INFINITY;
    if (position < keys) {
      if (list) key = list[position / s.block_k] * s.block_k + position % s.block_k;
      const T* row_of_k = k + key * s.k_row;
      // Several partial sums: their errors grow with the square root of a part, not of the whole.
      constexpr int kParts = 8;
      float part[kParts] = {};
      int64_t i = 0;
      for (; i + kParts <= s.d; i += kParts) {
#pragma unroll
        for (int n = 0; n < kParts; ++n)
          part[n] = fmaf(query[i + n], to_f32(row_of_k[i + n]), part[n]);
      }
      for (; i < s.d; ++i) part[0] = fmaf(query[i], to_f32(row_of_k[i]), part[0]);
      score = ((part[0] + part[1]) + (part[2] + part[3]) +
               ((part[4] + part[5]) + (part[6] + part[7]))) *
              s.scale;
    }
    const float new_top = fmaxf(top, warp_max(score));
    // A row of -inf scores so far keeps its weights at zero instead of exp(-inf + inf).
    const float base = new_top == -INFINITY ? 0.0f : new_top;
    const float correction = expf(top - base);
    const float weight = position < keys ? expf(score - base) : 0.0f;
    total = total * correction + warp_sum(weight);
    top = new_top;
    for (int64_t i = lane; i < s.d; i += 32) sum_of_values[i] *= correction;
    const int count = int(min(int64_t{32}, keys - first));
    for (int j = 0; j < count; ++j) {
      const float w = __shfl_sync(kAllLanes, weight, j);
      const T* row_of_v = v + __shfl_sync(kAllLanes, key, j) * s.v_row;
      for (int64_t i = lane; i < s.d; i += 32)
        sum_of_values[i] = fmaf(w, to_f32(row_of_v[i]), sum_of_values[i]);
    }
  }

  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  out += row * s.out_row + head * s.d;
  for (int64_t i = lane; i < s.d; i += 32) out[i] = from_f32<T>(sum_of_values[i] * inverse);
  if (lse && lane == 0) lse[head * s.sq + row] = top + logf(total);
}

constexpr int kSoftmaxThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kSoftmaxThreads)
    softmax_kernel(T* out, const float* scores, float* lse, int64_t columns, int64_t out_row,
                   int64_t scores_row, float scale) {
  __shared__ float shared[32];
  out += blockIdx.x * out_row;
  scores += blockIdx.x * scores_row;
  float top = -INFINITY;
  for (int64_t i = threadIdx.x; i < columns; i += kSoftmaxThreads)
    top = fmaxf(top, scale * scores[i]);
  top = block_max<kSoftmaxThreads>(top, shared);
  const float base = top == -INFINITY ? 0.0f : top;
  float total = 0.0f;
  for (int64_t i = threadIdx.x; i < columns; i += kSoftmaxThreads)
    total += expf(scale * scores[i] - base);
  total = block_sum<kSoftmaxThreads>(total, shared);
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  for (int64_t i = threadIdx.x; i < columns; i += kSoftmaxThreads) {
    out[i] = from_f32<T>(expf(scale * scores[i] - base) * inverse);
  }
  if (lse && threadIdx.x == 0) lse[blockIdx.x] = top + logf(total);
}

}  // namespace

void attention_reference(Stream stream, MutView out, View q, View k, View v,
                         const AttentionPlan& plan) {
  ReferenceShape s{};
  s.sq = q.dim(0);
  s.skv = k.dim(0);
  s.heads = q.dim(1);
  s.group = q.dim(1) / k.dim(1);
  s.d = q.dim(2);
  s.q_row = q.stride(0);
  s.k_row = k.stride(0);
  s.v_row = v.stride(0);
  s.out_row = out.stride(0);
  s.scale = plan.scale;
  s.causal = plan.causal;
  if (plan.mask) {
    s.indices = static_cast<const int32_t*>(plan.mask->indices.data);
    s.counts = static_cast<const int32_t*>(plan.mask->counts.data);
    s.heads_per_list = plan.mask->heads_per_list(q.dim(1));
    s.list_rows = plan.mask->indices.dim(1);
    s.capacity = plan.mask->indices.dim(2);
    s.block_q = plan.mask->block_q;
    s.block_k = plan.mask->block_k;
  }
  const int64_t bytes_per_warp = 2 * s.d * int64_t(sizeof(float));
  const int warps = int(std::clamp<int64_t>(48 * 1024 / bytes_per_warp, 1, 8));
  const unsigned blocks = unsigned(ceil_div<int64_t>(s.sq * s.heads, warps));
  auto* lse = static_cast<float*>(plan.lse.mut());
  with_type(q.dtype, [&](auto type) {
    using T = decltype(type);
    attention_reference_kernel<T>
        <<<blocks, unsigned(32 * warps), size_t(warps * bytes_per_warp), stream>>>(
            static_cast<T*>(out.mut()), static_cast<const T*>(q.data),
            static_cast<const T*>(k.data), static_cast<const T*>(v.data), lse, s);
  });
  check_launch();
}

void softmax_rows(Stream stream, MutView probabilities, View scores, float scale, float* lse) {
  with_type(probabilities.dtype, [&](auto type) {
    using T = decltype(type);
    softmax_kernel<T><<<unsigned(scores.dim(0)), kSoftmaxThreads, 0, stream>>>(
        static_cast<T*>(probabilities.mut()), static_cast<const float*>(scores.data), lse,
        scores.dim(1), probabilities.stride(0), scores.stride(0), scale);
  });
  check_launch();
}

}  // namespace orrery::cuda
