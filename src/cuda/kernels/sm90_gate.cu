// The kernel behind sm90_gate.h.
//
// A CTA makes 128 rows x 128 columns: a producer warpgroup, of which one thread feeds a ring of
// tiles through TMA, and two consumer warpgroups of 64 rows. The tile of w is 128 rows of g above
// 128 rows of u, so that one 64 x 256 accumulator holds both factors of each result in the same
// thread. Two CTAs of a cluster share w or x by multicast, whichever leaves fewer of them idle at
// the end. Neighbouring clusters work on the same few rows of x and then walk through w, so that
// both come from L2.
//
// Operations: 4 m n k. Bytes: x, w and out once; the two products, twice the output, never reach
// memory. Never the bound.
//
// Floor, m 44160, n 12288, k 4096: 8.9 TFLOP at 751 TFLOP/s, the rate of an 8192 x 8192 x 8192
// product in the same process, 11.8 ms.
//
// Best measured there: 13.4 ms, 12.6 ms inside a layer; m 5760 1.68 ms.
//
// Reproduce: bench/device_ops gated
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "sm90.cuh"
#include "sm90_gate.h"
#include "sm90_host.h"

namespace orrery::cuda {
namespace sm90 {
namespace {

constexpr int kRows = 64;  // of a warpgroup
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kTileRows = kConsumers * kRows;
constexpr int kColumns = 128;  // of a tile
constexpr int kDepth = 64;     // of k at a time, 128 bytes
constexpr int kRowBytes = 2 * kDepth;
constexpr int kCluster = 2;
constexpr int kGroup = 24;  // tiles side by side in m before n moves on
constexpr int kBox = 64;    // rows that one TMA load brings
static_assert(kBox * kCluster == kTileRows && kBox * kCluster == kColumns,
              "each CTA of a cluster brings half of what they share");

// Registers a thread after reallocation; a CTA of 384 threads starts with 168 each.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

constexpr int kXBytes = kTileRows * kRowBytes;
constexpr int kWBytes = 2 * kColumns * kRowBytes;
constexpr int kStages = 4;
constexpr int kX = 0;
constexpr int kW = kX + kStages * kXBytes;
constexpr int kFull = kW + kStages * kWBytes;
constexpr int kEmpty = kFull + 8 * kStages;
constexpr int kBytes = kEmpty + 8 * kStages;
static_assert(kBytes <= kMaxSharedBytes, "the tiles must fit the shared memory of one CTA");

struct Args {
  __nv_bfloat16* out;
  int64_t out_stride;
  int m, n;
  int depths;                   // of kDepth
  int rows_at_once;             // tiles of a cluster in m: 2 share w, 1 shares x
  int row_steps, column_steps;  // of clusters in m and n
  int items;
};

struct Tile {
  int row, column;
};

__device__ __forceinline__ Tile tile_of(const Args& a, int item, int rank) {
  const int steps = kGroup / a.rows_at_once;
  const int group = item / (steps * a.column_steps);
  const int rest = item - group * steps * a.column_steps;
  const int wide = min(steps, a.row_steps - group * steps);
  const int row = group * steps + rest % wide, column = rest / wide;
  return a.rows_at_once == 2 ? Tile{(2 * row + rank) * kTileRows, column * kColumns}
                             : Tile{row * kTileRows, (2 * column + rank) * kColumns};
}

__device__ __forceinline__ void produce(const Args& a, const CUtensorMap* map_x,
                                        const CUtensorMap* map_w, uint32_t smem, int rank,
                                        int cluster, int clusters) {
  constexpr uint16_t kAll = (1 << kCluster) - 1;
  constexpr int kBoxBytes = kBox * kRowBytes;
  const bool shares_w = a.rows_at_once == 2;
  RingPosition<kStages> ring;
  for (int item = cluster; item < a.items; item += clusters) {
    const Tile tile = tile_of(a, item, rank);
    for (int depth = 0; depth < a.depths; ++depth) {
      const uint32_t full = smem + kFull + 8 * ring.stage;
      const uint32_t x = smem + kX + ring.stage * kXBytes, w = smem + kW + ring.stage * kWBytes;
      mbarrier_wait(smem + kEmpty + 8 * ring.stage, ring.phase ^ 1);
      mbarrier_arrive_expect(full, kXBytes + kWBytes);
      const int column = depth * kDepth;
      // Both halves of a tile for this CTA, or this CTA's half of a shared one for both.
      const auto bring = [&](uint32_t to, const CUtensorMap* map, int row, bool shared) {
        if (shared) {
          tma_load_4d_multicast(to + rank * kBoxBytes, map, column, row + rank * kBox, 0, 0, full,
                                kAll, kEvictLast);
        } else {
          tma_load_4d(to, map, column, row, 0, 0, full, kEvictLast);
          tma_load_4d(to + kBoxBytes, map, column, row + kBox, 0, 0, full, kEvictLast);
        }
      };
      bring(x, map_x, tile.row, !shares_w);
      bring(w, map_w, tile.column, shares_w);
      bring(w + kWBytes / 2, map_w, a.n + tile.column, shares_w);
      ring.next();
    }
  }
}

struct Consumer {
  const Args& a;
  uint32_t smem;
  int warpgroup;
  int warp;  // of the warpgroup
  int lane;
  RingPosition<kStages> ring;

  // Tells the producers of the cluster that this warp has read the buffer.
  __device__ __forceinline__ void release(int stage) {
    if (lane < kCluster) mbarrier_arrive_remote(map_to_rank(smem + kEmpty + 8 * stage, lane));
  }

  __device__ __forceinline__ void multiply(float (&sum)[kColumns]) {
    int last = -1;  // read by the products before the ones just issued
    for (int depth = 0; depth < a.depths; ++depth) {
      mbarrier_wait(smem + kFull + 8 * ring.stage, ring.phase);
      const uint64_t x =
          k_major_descriptor(smem + kX + ring.stage * kXBytes + warpgroup * kRows * kRowBytes);
      const uint64_t w = k_major_descriptor(smem + kW + ring.stage * kWBytes);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kDepth / 16; ++step)
        wgmma_ss(sum, advance(x, 32 * step), advance(w, 32 * step), 1);
      wgmma_commit();
      wgmma_wait<1>();
      if (last >= 0) release(last);
      last = ring.stage;
      ring.next();
    }
    wgmma_wait<0>();
    pin_registers(sum);
    release(last);
  }

  // A lane owns two rows; register 4 j + {0, 1} is a gate, 64 registers on is its factor.
  __device__ __forceinline__ void store(const Tile& tile, const float (&sum)[kColumns]) {
    const int quad = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.row + warpgroup * kRows + 16 * warp + lane / 4 + 8 * half;
      __nv_bfloat16* to = a.out + int64_t{row} * a.out_stride + tile.column + 8 * quad;
#pragma unroll
      for (int g = 0; g < kColumns / 32; ++g) {
        uint32_t made[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (4 * g + i) + 2 * half;
          made[i] = pack_bf16(gated(sum[at], sum[at + 64]), gated(sum[at + 1], sum[at + 65]));
        }
        // Eight neighbouring columns a lane in place of two of each eight.
        transpose_quad(made, quad);
        if (row < a.m && tile.column < a.n)
          *reinterpret_cast<uint4*>(to + 32 * g) = make_uint4(made[0], made[1], made[2], made[3]);
      }
    }
  }

  __device__ __forceinline__ static float gated(float gate, float up) {
    constexpr float kLog2E = 1.4426950408889634f;
    return __fdividef(gate, 1.0f + exp2_approx(-kLog2E * gate)) * up;
  }
};

__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    gate_kernel(const __grid_constant__ CUtensorMap map_x,
                const __grid_constant__ CUtensorMap map_w, const Args a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = shared_address(shared);
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  const int warp = warp_uniform(threadIdx.x / 32 % 4);
  const int lane = threadIdx.x % 32;
  const int rank = static_cast<int>(cluster_rank());
  const int cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem + kFull + 8 * i, 1);
      mbarrier_init(smem + kEmpty + 8 * i, 4 * kConsumers * kCluster);
    }
    mbarrier_init_fence();
    prefetch_tensor_map(&map_x);
    prefetch_tensor_map(&map_w);
  }
  cluster_meet();

  if (warpgroup == 0) {
    release_registers<kProducerRegisters>();
    if (warp == 0 && lane == 0) produce(a, &map_x, &map_w, smem, rank, cluster, clusters);
  } else {
    claim_registers<kConsumerRegisters>();
    Consumer consumer{a, smem, warpgroup - 1, warp, lane, {}};
    float sum[kColumns];
    for (int item = cluster; item < a.items; item += clusters) {
#pragma unroll
      for (float& value : sum) value = 0;
      consumer.multiply(sum);
      consumer.store(tile_of(a, item, rank), sum);
    }
  }
  // No CTA leaves while its peer can still write into it.
  cluster_meet();
}

}  // namespace
}  // namespace sm90

const char* sm90_gate_supports(const Sm90GateParams& p) {
  using namespace sm90;
  if (const char* reason = device_reason()) return reason;
  if (p.n <= 0 || p.n % kColumns != 0 || p.k <= 0 || p.k % kDepth != 0)
    return "n and k must be multiples of 128 and 64";
  if (p.m <= 0 || p.m > kMaxRows || p.n > kMaxRows) return "m and n must be at most 2^30";
  if (!aligned_rows(p.x, p.x_stride) || !aligned_rows(p.w, p.w_stride) ||
      !aligned_rows(p.out, p.out_stride))
    return "tensors must be 16-byte aligned with row strides of a multiple of 8 elements";
  return nullptr;
}

const char* sm90_gate(const Sm90GateParams& p, void* stream) {
  using namespace sm90;
  if (const char* reason = sm90_gate_supports(p)) return reason;
  static PerDevice prepared;
  if (const char* error =
          prepared.allow_shared_memory(reinterpret_cast<const void*>(gate_kernel), kBytes)) {
    return error;
  }
  const auto size = [](int64_t n) { return static_cast<uint64_t>(n); };
  CUtensorMap map_x, map_w;
  if (!encode_bf16_map(&map_x, p.x, {size(p.k), size(p.m), 1, 1},
                       {size(p.x_stride) * 2, size(p.x_stride) * 2, size(p.x_stride) * 2},
                       {kDepth, kBox, 1, 1}) ||
      !encode_bf16_map(&map_w, p.w, {size(p.k), size(2 * p.n), 1, 1},
                       {size(p.w_stride) * 2, size(p.w_stride) * 2, size(p.w_stride) * 2},
                       {kDepth, kBox, 1, 1}))
    return "the driver refused a tensor map";
  Args a{};
  a.out = static_cast<__nv_bfloat16*>(p.out);
  a.out_stride = p.out_stride;
  a.m = static_cast<int>(p.m);
  a.n = static_cast<int>(p.n);
  a.depths = static_cast<int>(p.k / kDepth);
  const int sms = multiprocessors();
  const int most = std::max(1, sms / kCluster);  // clusters at once
  const auto up = [](int64_t x, int64_t y) { return static_cast<int>((x + y - 1) / y); };
  const int row_tiles = up(p.m, kTileRows), column_tiles = up(p.n, kColumns);
  const auto items = [&](int rows_at_once) {
    return up(row_tiles, rows_at_once) * up(column_tiles, kCluster / rows_at_once);
  };
  a.rows_at_once = up(items(2), most) <= up(items(1), most) ? 2 : 1;
  a.row_steps = up(row_tiles, a.rows_at_once);
  a.column_steps = up(column_tiles, kCluster / a.rows_at_once);
  a.items = items(a.rows_at_once);
  const int clusters = std::min(a.items, most);
  gate_kernel<<<static_cast<unsigned>(clusters * kCluster), kThreads, kBytes,
                static_cast<cudaStream_t>(stream)>>>(map_x, map_w, a);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace orrery::cuda
