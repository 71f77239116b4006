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

#include "sm90_gate.h"
#include "sm90_pipeline.cuh"

namespace orrery::cuda {
namespace sm90 {
namespace {

using Bf16 = Element<__nv_bfloat16>;

constexpr int kTileRows = kConsumers * kRows;
constexpr int kColumns = 128;          // of a tile
constexpr int kDepth = Bf16::kPerRow;  // of k at a time
constexpr int kCluster = 2;
constexpr int kGroup = 24;  // tiles side by side in m before n moves on
constexpr int kBox = 64;    // rows that one TMA load brings
static_assert(kBox * kCluster == kTileRows && kBox * kCluster == kColumns,
              "each CTA of a cluster brings half of what they share");

// A stage is a tile of x above a tile of w.
constexpr int kXBytes = kTileRows * kRowBytes;
constexpr int kWBytes = 2 * kColumns * kRowBytes;
constexpr int kStages = 4;
constexpr RingShape kRing{kStages, kXBytes + kWBytes, 0, kStages*(kXBytes + kWBytes)};
constexpr int kBytes = kRing.barriers_end();
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
  Ring<kRing> ring{smem};
  for (int item = cluster; item < a.items; item += clusters) {
    const Tile tile = tile_of(a, item, rank);
    for (int depth = 0; depth < a.depths; ++depth) {
      ring.acquire();
      const uint32_t full = ring.full(), x = ring.buffer(), w = x + kXBytes;
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
  int warpgroup;
  int warp;  // of the warpgroup
  int lane;
  Ring<kRing> ring;

  __device__ __forceinline__ void multiply(float (&sum)[kColumns]) {
    int last = -1;  // read by the products before the ones just issued
    for (int depth = 0; depth < a.depths; ++depth) {
      ring.wait();
      const uint64_t x = k_major_descriptor(ring.buffer() + warpgroup * kRows * kRowBytes);
      const uint64_t w = k_major_descriptor(ring.buffer() + kXBytes);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kStepsPerRow; ++step)
        wgmma_ss(sum, advance(x, kStepBytes * step), advance(w, kStepBytes * step), 1);
      wgmma_commit();
      wgmma_wait<1>();
      if (last >= 0) ring.release<kCluster>(last, lane);
      last = ring.slot();
      ring.next();
    }
    wgmma_wait<0>();
    pin_registers(sum);
    ring.release<kCluster>(last, lane);
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
    return __fdividef(gate, 1.0f + exp2_approx(-kLog2E * gate)) * up;
  }
};

__global__ void __launch_bounds__(kThreads, 1)
    gate_kernel(const __grid_constant__ CUtensorMap map_x,
                const __grid_constant__ CUtensorMap map_w, const Args a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = shared_address(shared);
  const int rank = static_cast<int>(cluster_rank());
  const int cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;

  if (threadIdx.x == 0) {
    Ring<kRing>::init(smem, 4 * kConsumers * kCluster);
    mbarrier_init_fence();
    prefetch_tensor_map(&map_x);
    prefetch_tensor_map(&map_w);
  }
  cluster_meet();

  run_roles(
      [&](int warp, int lane) {
        if (warp == 0 && lane == 0) produce(a, &map_x, &map_w, smem, rank, cluster, clusters);
      },
      [&](int warpgroup, int warp, int lane) {
        Consumer consumer{a, warpgroup, warp, lane, {smem}};
        float sum[kColumns];
        for (int item = cluster; item < a.items; item += clusters) {
#pragma unroll
          for (float& value : sum) value = 0;
          consumer.multiply(sum);
          consumer.store(tile_of(a, item, rank), sum);
        }
      });
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
  CUtensorMap map_x, map_w;
  if (!encode_matrix_map(&map_x, p.x, sizeof(__nv_bfloat16), p.m, p.k, p.x_stride, kBox) ||
      !encode_matrix_map(&map_w, p.w, sizeof(__nv_bfloat16), 2 * p.n, p.k, p.w_stride, kBox))
    return "the driver refused a tensor map";
  Args a{};
  a.out = static_cast<__nv_bfloat16*>(p.out);
  a.out_stride = p.out_stride;
  a.m = static_cast<int>(p.m);
  a.n = static_cast<int>(p.n);
  a.depths = static_cast<int>(p.k / kDepth);
  const int most = std::max(1, multiprocessors() / kCluster);  // clusters at once
  const auto up = [](int64_t x, int64_t y) { return static_cast<int>((x + y - 1) / y); };
  const int row_tiles = up(p.m, kTileRows), column_tiles = up(p.n, kColumns);
  const auto items = [&](int rows_at_once) {
    return up(row_tiles, rows_at_once) * up(column_tiles, kCluster / rows_at_once);
  };
  a.rows_at_once = up(items(2), most) <= up(items(1), most) ? 2 : 1;
  a.row_steps = up(row_tiles, a.rows_at_once);
  a.column_steps = up(column_tiles, kCluster / a.rows_at_once);
  a.items = items(a.rows_at_once);
  const dim3 ctas(static_cast<unsigned>(persistent_clusters(a.items, kCluster) * kCluster));
  return launch(gate_kernel, {.ctas = ctas, .shared_bytes = kBytes, .cluster = kCluster}, stream,
                map_x, map_w, a);
}

}  // namespace orrery::cuda
