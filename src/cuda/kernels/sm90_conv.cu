// The kernel behind sm90_conv.h.
//
// A CTA makes 128 positions (16 x 8 or 8 x 16 of one frame) x 128 channels of both frames of a
// pair: a producer warpgroup, of which one thread feeds tiles through TMA rings, and two consumer
// warpgroups of 64 positions each. A warpgroup holds two accumulators: t1 u1 and t2 u2, which a
// butterfly turns into y0 and y1 without leaving registers; t0 u0 and t3 u3 are then added. No
// intermediate result reaches memory.
//
// A tile of t is loaded once with its border for all nine taps: a tap is another start address of
// the same 128-byte rows in shared memory. Tiles of u go to two CTAs of a cluster by multicast.
//
// Operations: 36 cin cout a position and output frame, where a direct convolution has 54.
//
// Bytes: t once for each 128 output channels, mostly from L2, u from L2; out and residual once.
// Never the bound.
//
// Floor, 4 frames of 180 x 320, 1024 to 1024 channels: 8.7 TFLOP at 751 TFLOP/s, the rate of an
// 8192 x 8192 x 8192 product in the same process, 11.6 ms.
//
// Best measured there: 12.9 ms with the sums of frames, 1015 TFLOP/s as a direct convolution
// counts; 512 to 512 of 360 x 640 12.8 ms, 256 to 256 3.4 ms.
//
// Reproduce: bench/device_ops conv3d
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "sm90_conv.h"
#include "sm90_pipeline.cuh"

namespace orrery::cuda {
namespace sm90 {
namespace {

using Bf16 = Element<__nv_bfloat16>;

constexpr int kTaps = 9;
constexpr int kChannels = 128;         // of a tile
constexpr int kDepth = Bf16::kPerRow;  // input channels at a time
constexpr int kCluster = 2;

constexpr int kTileBorder = 18 * 10;  // positions of a tile with its border
constexpr int kTBytes = (kTileBorder * kRowBytes + 1023) / 1024 * 1024;
constexpr int kUBytes = kChannels * kRowBytes;
constexpr int kTStages = 3;
constexpr int kUStages = 9;
constexpr int kU = kTStages * kTBytes;
constexpr int kBarriers = kU + kUStages * kUBytes;
constexpr RingShape kTRing{kTStages, kTBytes, 0, kBarriers};
constexpr RingShape kURing{kUStages, kUBytes, kU, kTRing.barriers_end()};
constexpr int kBytes = kURing.barriers_end();
static_assert(kBytes <= kMaxSharedBytes, "the tiles must fit the shared memory of one CTA");

// The order of the four products: those that both outputs need come first.
__device__ __forceinline__ int product_at(int i) { return i < 2 ? i + 1 : i == 2 ? 0 : 3; }

struct Args {
  const __nv_bfloat16* bias;
  const __nv_bfloat16* residual;
  __nv_bfloat16* out;
  int64_t residual_stride, out_stride;
  int frames, rows, columns, cout;
  int pad_rows, pad_columns;
  int depths;                           // of kDepth input channels
  int tile_rows;                        // 8 or 16
  int tiles_down, tiles_across, tiles;  // of a frame, and all
  int channel_tiles;
  int items;  // a cluster takes one at a time: two tiles of the same channels
};

// Of a tile: 16 x 8 positions or 8 x 16.
__host__ __device__ constexpr int columns_of(int tile_rows) { return 24 - tile_rows; }

struct Tile {
  int pair, row, column, channel;
};

__device__ __forceinline__ Tile tile_of(const Args& a, int item, int rank) {
  const int index = item / a.channel_tiles * kCluster + rank;
  const int pair = index / (a.tiles_down * a.tiles_across);
  const int rest = index - pair * (a.tiles_down * a.tiles_across);
  const int down = rest / a.tiles_across;
  return {pair, down * a.tile_rows, (rest - down * a.tiles_across) * columns_of(a.tile_rows),
          item % a.channel_tiles * kChannels};
}

// A tile past the last one reads zeros.
__device__ __forceinline__ void produce(const Args& a, const CUtensorMap* map_t,
                                        const CUtensorMap* map_u, uint32_t smem, int rank,
                                        int cluster, int clusters) {
  Ring<kTRing> t{smem};
  Ring<kURing> u{smem};
  const int border_bytes = (a.tile_rows + 2) * (columns_of(a.tile_rows) + 2) * kRowBytes;
  for (int item = cluster; item < a.items; item += clusters) {
    const Tile tile = tile_of(a, item, rank);
    for (int i = 0; i < 4; ++i) {
      const int product = product_at(i);
      for (int depth = 0; depth < a.depths; ++depth) {
        t.acquire(border_bytes);
        tma_load_4d(t.buffer(), map_t, depth * kDepth, tile.column - a.pad_columns,
                    tile.row - a.pad_rows, 4 * tile.pair + product, t.full(), kEvictFirst);
        t.next();
        for (int tap = 0; tap < kTaps; ++tap) {
          constexpr int kShare = kChannels / kCluster;
          u.acquire();
          tma_load_4d_multicast(u.buffer() + rank * kShare * kRowBytes, map_u, depth * kDepth,
                                tile.channel + rank * kShare, tap, product, u.full(),
                                (1 << kCluster) - 1, kEvictLast);
          u.next();
        }
      }
    }
  }
}

struct Consumer {
  const Args& a;
  int warpgroup;
  int warp;  // of the warpgroup
  int lane;
  int pitch;        // positions between rows of a tile in shared memory
  uint32_t offset;  // of this warpgroup's first position
  Ring<kTRing> t;   // of this CTA alone
  Ring<kURing> u;   // shared by the cluster

  // sum += t u over all taps and depths.
  __device__ __forceinline__ void accumulate(float (&sum)[kChannels / 2]) {
    pin_registers(sum);
    wgmma_fence();
    int last_t = -1, last_u = -1;  // read by the products before the ones just issued
    for (int depth = 0; depth < a.depths; ++depth) {
      t.wait();
      const uint32_t from = t.buffer() + offset;
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
        u.wait();
        const uint64_t x =
            k_major_descriptor(from + (tap / 3 * pitch + tap % 3) * kRowBytes, pitch * kRowBytes);
        const uint64_t w = k_major_descriptor(u.buffer());
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStepsPerRow; ++step) {
          wgmma_ss(sum, advance(x, kStepBytes * step), advance(w, kStepBytes * step), 1);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (last_u >= 0) u.release<kCluster>(last_u, lane);
        if (tap == 0 && last_t >= 0) t.release<1>(last_t, lane);
        last_u = u.slot();
        u.next();
      }
      last_t = t.slot();
      t.next();
    }
    wgmma_wait<0>();
    pin_registers(sum);
    u.release<kCluster>(last_u, lane);
    t.release<1>(last_t, lane);
  }

  // Writes this warpgroup's part of one frame: a lane owns column lane / 4 of two rows.
  __device__ __forceinline__ void store(const Tile& tile, int frame,
                                        const float (&sum)[kChannels / 2]) {
    if (frame >= a.frames) return;
    const bool wide = a.tile_rows == 8;
    const int column = tile.column + lane / 4 + (wide ? 8 * warpgroup : 0);
    const int quad = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.row + 2 * warp + half + (wide ? 0 : 8 * warpgroup);
      const bool valid = row < a.rows && column < a.columns;
      const int64_t at = (int64_t{row} * a.columns + column) * a.cout + tile.channel + 8 * quad;
      uint4 residual[4] = {};
      if (valid && a.residual != nullptr) {
        const __nv_bfloat16* from = a.residual + frame * a.residual_stride + at;
#pragma unroll
        for (int g = 0; g < 4; ++g) residual[g] = *reinterpret_cast<const uint4*>(from + 32 * g);
      }
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        // Eight neighbouring channels a lane in place of two of each eight.
        uint32_t even[4], odd[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          even[i] = __float_as_uint(sum[4 * (4 * g + i) + 2 * half]);
          odd[i] = __float_as_uint(sum[4 * (4 * g + i) + 2 * half + 1]);
        }
        transpose_quad(even, quad);
        transpose_quad(odd, quad);
        uint4 bias{};
        if (a.bias != nullptr)
          bias = *reinterpret_cast<const uint4*>(a.bias + tile.channel + 8 * quad + 32 * g);
        const uint32_t add[4] = {residual[g].x, residual[g].y, residual[g].z, residual[g].w};
        const uint32_t shift[4] = {bias.x, bias.y, bias.z, bias.w};
        uint32_t made[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          made[i] = pack_bf16(__uint_as_float(even[i]) + low_bf16(add[i]) + low_bf16(shift[i]),
                              __uint_as_float(odd[i]) + high_bf16(add[i]) + high_bf16(shift[i]));
        }
        if (valid) {
          *reinterpret_cast<uint4*>(a.out + frame * a.out_stride + at + 32 * g) =
              make_uint4(made[0], made[1], made[2], made[3]);
        }
      }
    }
  }
};

__global__ void __launch_bounds__(kThreads, 1)
    pair_conv_kernel(const __grid_constant__ CUtensorMap map_t,
                     const __grid_constant__ CUtensorMap map_u, const Args a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = shared_address(shared);
  const int rank = static_cast<int>(cluster_rank());
  const int cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;

  if (threadIdx.x == 0) {
    Ring<kTRing>::init(smem, 4 * kConsumers);
    Ring<kURing>::init(smem, 4 * kConsumers * kCluster);
    mbarrier_init_fence();
    prefetch_tensor_map(&map_t);
    prefetch_tensor_map(&map_u);
  }
  cluster_meet();

  run_roles(
      [&](int warp, int lane) {
        if (warp == 0 && lane == 0) produce(a, &map_t, &map_u, smem, rank, cluster, clusters);
      },
      [&](int warpgroup, int warp, int lane) {
        const int pitch = columns_of(a.tile_rows) + 2;
        const int first_position = warpgroup * 8 * (a.tile_rows == 8 ? 1 : pitch);
        Consumer consumer{a,      warpgroup, warp,
                          lane,   pitch,     static_cast<uint32_t>(first_position * kRowBytes),
                          {smem}, {smem}};
        float first[kChannels / 2], second[kChannels / 2];
        for (int item = cluster; item < a.items; item += clusters) {
          const Tile tile = tile_of(a, item, rank);
#pragma unroll
          for (int i = 0; i < kChannels / 2; ++i) first[i] = second[i] = 0;
          consumer.accumulate(first);
          consumer.accumulate(second);
#pragma unroll
          for (int i = 0; i < kChannels / 2; ++i) {
            const float both = first[i] + second[i];
            second[i] = first[i] - second[i];
            first[i] = both;
          }
          consumer.accumulate(first);
          consumer.accumulate(second);
          consumer.store(tile, 2 * tile.pair, first);
          consumer.store(tile, 2 * tile.pair + 1, second);
        }
      });
  // No CTA leaves while its peer can still write into it.
  cluster_meet();
}

}  // namespace
}  // namespace sm90

const char* sm90_pair_conv_supports(const Sm90PairConvParams& p) {
  using namespace sm90;
  if (const char* reason = device_reason()) return reason;
  if (p.cin <= 0 || p.cin % kDepth != 0 || p.cout <= 0 || p.cout % kChannels != 0)
    return "the channels must be multiples of 64 and 128";
  if (!aligned_rows(p.t, p.cin) || !aligned_rows(p.u, p.cin) ||
      !aligned_rows(p.out, p.out_stride) ||
      (p.residual != nullptr && !aligned_rows(p.residual, p.residual_stride)) ||
      (p.bias != nullptr && !aligned_rows(p.bias, 8)))
    return "tensors must be 16-byte aligned";
  return nullptr;
}

const char* sm90_pair_conv(const Sm90PairConvParams& p, void* stream) {
  using namespace sm90;
  if (const char* reason = sm90_pair_conv_supports(p)) return reason;
  Args a{};
  a.bias = static_cast<const __nv_bfloat16*>(p.bias);
  a.residual = static_cast<const __nv_bfloat16*>(p.residual);
  a.out = static_cast<__nv_bfloat16*>(p.out);
  a.residual_stride = p.residual_stride;
  a.out_stride = p.out_stride;
  a.frames = p.frames;
  a.rows = p.rows;
  a.columns = p.columns;
  a.cout = p.cout;
  a.pad_rows = p.pad_rows;
  a.pad_columns = p.pad_columns;
  a.depths = p.cin / kDepth;
  const auto up = [](int x, int y) { return (x + y - 1) / y; };
  const int wide = up(p.rows, 8) * up(p.columns, 16), tall = up(p.rows, 16) * up(p.columns, 8);
  a.tile_rows = wide <= tall ? 8 : 16;
  a.tiles_down = up(p.rows, a.tile_rows);
  a.tiles_across = up(p.columns, columns_of(a.tile_rows));
  a.tiles = p.pairs * a.tiles_down * a.tiles_across;
  a.channel_tiles = p.cout / kChannels;
  a.items = up(a.tiles, kCluster) * a.channel_tiles;
  if (a.items == 0) return nullptr;

  const auto size = [](int64_t n) { return static_cast<uint64_t>(n); };
  const uint64_t row = size(p.cin) * sizeof(__nv_bfloat16);
  const uint64_t line = row * size(p.columns_in), taps = row * size(p.cout);
  const TensorBox t{.base = p.t,
                    .dims = {size(p.cin), size(p.columns_in), size(p.rows_in), size(4 * p.pairs)},
                    .strides = {row, line, line * size(p.rows_in)},
                    .box = {kDepth, static_cast<uint32_t>(columns_of(a.tile_rows) + 2),
                            static_cast<uint32_t>(a.tile_rows + 2), 1}};
  const TensorBox u{.base = p.u,
                    .dims = {size(p.cin), size(p.cout), kTaps, 4},
                    .strides = {row, taps, taps * kTaps},
                    .box = {kDepth, kChannels / kCluster, 1, 1}};
  CUtensorMap map_t, map_u;
  if (!encode_tensor_map(&map_t, t) || !encode_tensor_map(&map_u, u))
    return "the driver refused a tensor map";

  const dim3 ctas(static_cast<unsigned>(persistent_clusters(a.items, kCluster) * kCluster));
  return launch(pair_conv_kernel, {.ctas = ctas, .shared_bytes = kBytes, .cluster = kCluster},
                stream, map_t, map_u, a);
}

}  // namespace orrery::cuda
