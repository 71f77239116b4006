// Attention for Hopper: the kernel template behind sm90_attention.h.
//
// One CTA is a producer warpgroup, of which one thread feeds tiles of 128 keys through TMA rings,
// and two consumer warpgroups of 64 query rows each. docs/hopper-attention.md has the design.
//
// Operations: 4 Sq Skv head_dim hq, times the share of blocks kept, or half of it when causal.
//
// Bytes: q, k, v and out once, since K and V of a KV head stay in L2; never the bound.
//
// Floor, Sq 44160, Skv 44672, 32/8 heads of 128: 32.3 TFLOP at 989.5 TFLOP/s, 32.7 ms; at the
// 1.61 GHz that an H200's 700 W allow, 37.1 ms.
//
// Best measured there: 42.3 ms dense (763 TFLOP/s, tensor pipe 94% busy); with 184 of 698 blocks
// 14.3 ms for per-head lists, 11.4 ms for lists of four heads.
//
// Reproduce: bench/cuda/build_sm90.sh build/sm90.so, then
// python3 bench/cuda/sm90_attention.py build/sm90.so dense sparse
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "sm90_attention.h"
#include "sm90_attention_work.cuh"

namespace orrery::cuda::sm90 {

// Where all threads of the cluster meet, `phase` being how often they have met before modulo 2. A
// barrier in memory rather than a numbered one, since the roles meet from different code.
template <AttentionConfig C>
__device__ __forceinline__ void meet(uint32_t smem, uint32_t phase) {
  __syncwarp();
  if constexpr (C.cluster == 1) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem + Layout<C>::kMeeting);
    mbarrier_wait(smem + Layout<C>::kMeeting, phase);
  } else {
    cluster_arrive();
    cluster_wait();
  }
}

// ---- Second pass ------------------------------------------------------------------------------
// Item n of this CTA (and, since they share tiles, of its cluster) must be computed again.

template <AttentionConfig C>
__device__ __forceinline__ void mark_redo(uint32_t smem, int n) {
  const uint32_t any = smem + Layout<C>::kRedo;
#pragma unroll
  for (int rank = 0; rank < C.cluster; ++rank) {
    shared_or_remote(map_to_rank(any, rank), 1u);
    shared_or_remote(map_to_rank(any + 4 + n / 32 * 4, rank), 1u << (n % 32));
  }
}

__device__ __forceinline__ bool must_redo(const uint32_t* redo, int n) {
  return (redo[1 + n / 32] >> (n % 32)) & 1;
}

// ---- Producer ---------------------------------------------------------------------------------

// One thread that feeds one ring, and Q to the warpgroups that read it.
template <AttentionConfig C>
struct Producer {
  using L = Layout<C>;
  static constexpr bool kIndependent = C.mapping == RowMapping::kIndependent;
  static constexpr int kBoxKeys = C.sparse ? kListBlock : kTileKeys;

  const AttentionArgs& a;
  const CUtensorMap* map_q;
  const CUtensorMap* map_k;
  const CUtensorMap* map_v;
  int rank;
  int number;     // of this producer, of L::kRings
  Ring<L::kQ> q;  // of warpgroup 0, or of the only one that it feeds
  Ring<L::kK> k;
  Ring<L::kV> v;

  // First keys of the boxes of a tile.
  struct TileKeys {
    int key[kTileKeys / kBoxKeys];
  };

  // All column chunks of a tile into the ring; in a cluster this CTA's chunk, for both CTAs.
  template <class TileRing>
  __device__ __forceinline__ void load_tile(TileRing& to, const CUtensorMap* map,
                                            const TileKeys& keys, int head) {
    to.acquire();
#pragma unroll
    for (int box = 0; box < kTileKeys / kBoxKeys; ++box) {
      const uint32_t box_to = to.buffer() + box * kBoxKeys * kRowBytes;
      if constexpr (C.cluster == 1) {
#pragma unroll
        for (int chunk = 0; chunk < L::kChunks; ++chunk) {
          tma_load_4d(box_to + chunk * L::kTileChunkBytes, map, 0, keys.key[box], chunk, head,
                      to.full(), kEvictLast);
        }
      } else {
        tma_load_4d_multicast(box_to + rank * L::kTileChunkBytes, map, 0, keys.key[box], rank, head,
                              to.full(), 3, kEvictLast);
      }
    }
    to.next();
  }

  __device__ __forceinline__ void load_q(const WorkItem& w, int warpgroup) {
    const Ring<L::kQ> to{q.smem, warpgroup, q.at};
    if (!w.valid) {
      to.wait_empty();
      mbarrier_arrive(to.full());
      return;
    }
    to.acquire();
#pragma unroll
    for (int chunk = 0; chunk < L::kChunks; ++chunk) {
      tma_load_4d(to.buffer() + chunk * L::kQChunkBytes, map_q, 0, w.row, chunk, w.head, to.full(),
                  kEvictFirst);
    }
  }

  // Loads Q, then K one tile ahead of V.
  __device__ __forceinline__ void feed(int item) {
    const WorkItem w = decode_item<C>(a, item, rank, kIndependent ? number : 0);
    TilePlan plan{};
    if (w.valid) plan = plan_tiles<C>(a, w.head, w.row);
    auto tile_keys = [&](int tile) {
      const int ordinal = plan.tiles - 1 - tile;
      if constexpr (C.sparse) {
        return TileKeys{plan.list.key(2 * ordinal), plan.list.key(2 * ordinal + 1)};
      } else {
        return TileKeys{ordinal * kTileKeys};
      }
    };

    TileKeys keys{};
    if (plan.tiles > 0) {
      keys = tile_keys(0);
      load_tile(k, map_k, keys, w.kv_head);
    }
    if constexpr (kIndependent) {
      load_q(w, number);
    } else {
      load_q(w, 0);
      load_q(decode_item<C>(a, item, rank, 1), 1);
    }
    q.next();
    for (int tile = 1; tile < plan.tiles; ++tile) {
      const TileKeys next = tile_keys(tile);
      load_tile(k, map_k, next, w.kv_head);
      load_tile(v, map_v, keys, w.kv_head);
      keys = next;
    }
    if (plan.tiles > 0) load_tile(v, map_v, keys, w.kv_head);
  }
};

// ---- Consumer ---------------------------------------------------------------------------------

// False in every call, since a KV head has at least one query head, but the compiler does not know.
// bench/cuda/build_sm90.sh checks that it does what it is there for.
__device__ __forceinline__ bool never(const AttentionArgs& a) { return a.group <= 0; }

// One warpgroup's 64 rows. A thread holds parts of two rows: lane / 4 and lane / 4 + 8 of its
// warp's 16, called row 0 and row 1 here.
template <AttentionConfig C>
struct Consumer {
  using L = Layout<C>;
  static constexpr int kD = C.head_dim;
  static constexpr bool kIndependent = C.mapping == RowMapping::kIndependent;

  const AttentionArgs& a;
  int warpgroup;
  int warp;  // of the warpgroup
  int lane;
  Ring<L::kQ> q_ring;
  Ring<L::kK> k_ring;
  Ring<L::kV> v_ring;

  uint32_t q[kD / 4];         // A fragments of Q
  float s[kTileKeys / 2];     // scores, then probabilities
  uint32_t p[kTileKeys / 4];  // A fragments of P
  float o[kD / 2];
  float reference[2];  // subtracted from a row's scores, in log2 units
  float sum[2];        // this thread's part of a row's sum of probabilities

  template <class TileRing>
  __device__ __forceinline__ void release(TileRing& ring) {
    ring.template release<C.cluster>(ring.slot(), lane);
    ring.next();
  }

  // Moves Q into registers. As the A operand of every QK product it would otherwise be read from
  // shared memory once a tile.
  __device__ __forceinline__ void take_q() {
    const int row = 16 * warp + lane % 16;
    const uint32_t from = q_ring.buffer() + row * kRowBytes;
#pragma unroll
    for (int step = 0; step < kD / Bf16::kPerStep; ++step) {
      const int unit = 2 * (step % kStepsPerRow) + lane / 16;  // 16-byte unit of the 128-byte row
      load_matrix_x4(q + 4 * step,
                     from + step / kStepsPerRow * L::kQChunkBytes + ((unit ^ (row % 8)) << 4));
    }
  }
  // The loads of take_q() are over only when something has used what they bring: an arrival is not
  // ordered behind loads that nobody waits for.
  __device__ __forceinline__ void release_q() {
    __syncwarp();
    q_ring.template release<1>(q_ring.slot(), lane);
    q_ring.next();
  }

  // S = Q K^T.
  __device__ __forceinline__ void issue_qk() {
    const uint64_t k = k_major_descriptor(k_ring.buffer());
#pragma unroll
    for (int step = 0; step < kD / Bf16::kPerStep; ++step) {
      const int at = step / kStepsPerRow * L::kTileChunkBytes + step % kStepsPerRow * kStepBytes;
      wgmma_rs_k_major(s, q + 4 * step, advance(k, at), step > 0);
    }
    wgmma_commit();
  }

  // O += P V.
  __device__ __forceinline__ void issue_pv() {
    const uint64_t v = mn_major_descriptor(v_ring.buffer(), L::kTileChunkBytes);
#pragma unroll
    for (int step = 0; step < kTileKeys / Bf16::kPerStep; ++step) {
      wgmma_rs_mn_major(o, p + 4 * step, advance(v, step * Bf16::kPerStep * kRowBytes));
    }
    wgmma_commit();
  }

  // Sets scores of keys at or past `limit` in the tile to -inf; for a causal call row r also ends
  // at `causal_limit` + 8 r.
  __device__ __forceinline__ void mask(int limit, int causal_limit) {
    const int column = 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i) {
      const int row = i / 2 % 2;
      const int end = C.causal ? min(limit, causal_limit + 8 * row) : limit;
      if (8 * (i / 4) + i % 2 + column >= end) s[i] = -INFINITY;
    }
  }

  // Largest score of each row, in log2 units.
  __device__ __forceinline__ void row_maxima(float (&top)[2]) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float m[2] = {-INFINITY, -INFINITY};  // two chains
#pragma unroll
      for (int j = 0; j < kTileKeys / 8; ++j) {
        m[j % 2] = fmaxf(m[j % 2], fmaxf(s[4 * j + 2 * row], s[4 * j + 2 * row + 1]));
      }
      m[0] = fmaxf(m[0], m[1]);
      m[0] = fmaxf(m[0], __shfl_xor_sync(0xffffffffu, m[0], 1));
      m[0] = fmaxf(m[0], __shfl_xor_sync(0xffffffffu, m[0], 2));
      top[row] = m[0] * a.scale_log2;
    }
  }

  // Scores to probabilities relative to `reference`, and their sum.
  __device__ __forceinline__ void exponentiate() {
    float base[2], part[2][2] = {};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      base[row] = reference[row] == -INFINITY ? 0.0f : reference[row];
    }
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i) {
      const int row = i / 2 % 2;
      s[i] = exp2_approx(__fmaf_rn(s[i], a.scale_log2, -base[row]));
      part[row][i / 4 % 2] += s[i];
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) sum[row] += part[row][0] + part[row][1];
  }

  // The running maximum, exact for any input. A row's reference only moves when its maximum grows
  // by more than 2^kSlack: the result does not depend on it. Returns whether O must be scaled.
  static constexpr float kSlack = 8.0f;
  __device__ __forceinline__ bool track_maximum(float (&factor)[2]) {
    float top[2];
    row_maxima(top);
    const bool moved =
        __any_sync(0xffffffffu, top[0] > reference[0] + kSlack || top[1] > reference[1] + kSlack);
    if (moved) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float next = fmaxf(reference[row], top[row]);
        factor[row] = exp2_approx(reference[row] - (next == -INFINITY ? 0.0f : next));
        reference[row] = next;
        sum[row] *= factor[row];
      }
    }
    return moved;
  }

  __device__ __forceinline__ void scale_output(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) o[i] *= factor[i / 2 % 2];
  }

  __device__ __forceinline__ void pack_probabilities() {
#pragma unroll
    for (int i = 0; i < kTileKeys / 4; ++i) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
  }

  // One item. With kTracking false the references are fixed after the first tile, kHeadroom above
  // its maxima, and the steady loop needs no maximum: floating point has the range for rows whose
  // later scores exceed the first tile's by less than 2^(kHeadroom + 64), which the sums show at
  // the end. Returns false for a warp with another row, whose item must be done again with
  // kTracking.
  static constexpr float kHeadroom = 32.0f;
  static constexpr float kMaxSum = 0x1p64f;

  template <bool kTracking>
  __device__ __forceinline__ bool attend(const WorkItem& w) {
    q_ring.wait();
    if (!w.valid) {
      release_q();
      return true;
    }
    const bool upper_rows = C.mapping == RowMapping::kRowPair && warpgroup == 1;
    const TilePlan plan = plan_tiles<C>(a, w.head, w.row - (upper_rows ? kRows : 0));
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) o[i] = 0.0f;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      reference[row] = -INFINITY;
      sum[row] = 0.0f;
    }
    if (plan.tiles == 0) {
      release_q();
      finish(w);
      return true;
    }
    take_q();

    // Column c of tile t is visible to row 0 of this thread while c < causal_limit + 128 t; from
    // tile `masked_tiles` on the warpgroup's rows see everything.
    int causal_limit = 0, masked_tiles = 1;
    if constexpr (C.causal) {
      const int visible = w.row + 1 + a.skv - a.sq;  // keys of the warpgroup's first row
      causal_limit = visible + 16 * warp + lane / 4 - (plan.tiles - 1) * kTileKeys;
      masked_tiles = plan.tiles - min(plan.tiles - 1, max(0, visible) / kTileKeys);
    }

    float factor[2] = {1.0f, 1.0f};
    k_ring.wait();
    wgmma_fence();
    issue_qk();
    wgmma_wait<0>();
    pin_registers(s);
    release_q();
    release(k_ring);
    mask(plan.limit, causal_limit);
    row_maxima(reference);
    if constexpr (!kTracking) {
      reference[0] += kHeadroom;
      reference[1] += kHeadroom;
    }
    exponentiate();
    pack_probabilities();

    // QK of this tile and PV of the one before are in flight together; the softmax of this tile
    // runs under the PV product and under the other warpgroup's products, from which this one
    // drifts apart by itself.
    auto step = [&](int tile, auto masked) {
      k_ring.wait();
      wgmma_fence();
      issue_qk();
      v_ring.wait();
      wgmma_fence();
      issue_pv();
      wgmma_wait<1>();
      pin_registers(s);
      release(k_ring);
      if constexpr (masked.value) mask(kTileKeys, causal_limit + tile * kTileKeys);
      bool moved = false;
      if constexpr (kTracking) moved = track_maximum(factor);
      exponentiate();
      pin_registers(s);
      // The wait stands in both branches of never(), so that the exponentials stay above it: the
      // scheduler moves a wait up inside a basic block but not across a branch. Independent
      // warpgroups are bound by their loads and run faster when the packing mixes with the
      // exponentials instead.
      if (!kIndependent && never(a)) {
        wgmma_wait<0>();
        pin_registers(o);
        scale_output(factor);
      } else {
        wgmma_wait<0>();
        pin_registers(o);
      }
      if (kTracking && moved) scale_output(factor);
      release(v_ring);
      pack_probabilities();
    };
    int tile = 1;
    if constexpr (C.causal) {
      for (; tile < masked_tiles; ++tile) step(tile, std::true_type{});
    }
    for (; tile < plan.tiles; ++tile) step(tile, std::false_type{});

    v_ring.wait();
    wgmma_fence();
    issue_pv();
    wgmma_wait<0>();
    pin_registers(o);
    release(v_ring);
    return finish(w) || kTracking;
  }

  // Writes the normalised rows and their LSE; false if a sum is out of the trusted range. The four
  // lanes of a row exchange 4-byte pieces so that each writes 16 bytes.
  __device__ __forceinline__ bool finish(const WorkItem& w) {
    const int piece = lane % 4;
    bool trusted = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[r];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      trusted = trusted && total < kMaxSum && reference[r] > -INFINITY;
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
      const int row = w.row + 16 * warp + lane / 4 + 8 * r;
      const bool inside = row < a.sq;
      if (a.lse != nullptr && inside && piece == 0) {
        a.lse[int64_t{w.head} * a.sq + row] =
            total == 0.0f ? -INFINITY : (reference[r] + log2_approx(total)) * kLn2;
      }
      __nv_bfloat16* to = a.out + row * a.out_stride + int64_t{w.head} * kD;
#pragma unroll
      for (int j = 0; j < kD / 8; j += 4) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (j + i) + 2 * r;
          x[i] = pack_bf16(o[at] * inverse, o[at + 1] * inverse);
        }
        transpose_quad(x, piece);
        if (inside) {
          *reinterpret_cast<uint4*>(to + 8 * (j + piece)) = make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
    }
    return __all_sync(0xffffffffu, trusted);
  }
};

// ---- Kernel -----------------------------------------------------------------------------------

// `Variant::kConfig` is the configuration: a type, since the launch stub that nvcc generates cannot
// name a structural value.
template <class Variant>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ CUtensorMap map_q,
                     const __grid_constant__ CUtensorMap map_k,
                     const __grid_constant__ CUtensorMap map_v, const AttentionArgs a) {
  constexpr AttentionConfig C = Variant::kConfig;
  using L = Layout<C>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = shared_address(shared);
  uint32_t* redo = reinterpret_cast<uint32_t*>(shared + L::kRedo);
  const int rank = C.cluster == 1 ? 0 : static_cast<int>(cluster_rank());
  // Item n of this cluster. Causal items get shorter, so their rounds alternate in direction.
  const int clusters = gridDim.x / C.cluster, cluster = blockIdx.x / C.cluster;
  auto item_of = [&](int n) {
    return n * clusters + (C.causal && n % 2 == 1 ? clusters - 1 - cluster : cluster);
  };

  for (int i = threadIdx.x; i < L::kRedoWords; i += kThreads) redo[i] = 0;
  if (threadIdx.x == 0) {
    constexpr int kReaders = 4 * (L::kRings == 1 ? kConsumers : 1) * C.cluster;
    Ring<L::kQ>::init(smem, 4);
    Ring<L::kK>::init(smem, kReaders);
    Ring<L::kV>::init(smem, kReaders);
    mbarrier_init(smem + L::kMeeting, kThreads / 32);
    mbarrier_init_fence();
    prefetch_tensor_map(&map_q);
    prefetch_tensor_map(&map_k);
    prefetch_tensor_map(&map_v);
  }
  if constexpr (C.cluster == 1) {
    __syncthreads();
  } else {
    cluster_meet();
  }

  // Both roles walk the same items, and after everyone has finished the marked ones again. The
  // meeting is also what keeps a CTA from leaving while its peer can still write into it.
  const auto produce = [&](int warp, int lane) {
    const bool works = warp < L::kRings && lane == 0;
    Producer<C> producer{a,
                         &map_q,
                         &map_k,
                         &map_v,
                         rank,
                         warp,
                         {smem},
                         {smem, warp * C.k_stages},
                         {smem, warp * C.v_stages}};
    if (works) {
      for (int n = 0; item_of(n) < a.items; ++n) producer.feed(item_of(n));
    }
    meet<C>(smem, 0);
    if (redo[0] != 0) {
      if (works) {
        for (int n = 0; item_of(n) < a.items; ++n) {
          if (must_redo(redo, n)) producer.feed(item_of(n));
        }
      }
      meet<C>(smem, 1);
    }
  };
  const auto consume = [&](int self, int warp, int lane) {
    const int ring = L::kRings == 1 ? 0 : self;
    Consumer<C> consumer{
        a, self, warp, lane, {smem, self}, {smem, ring * C.k_stages}, {smem, ring * C.v_stages}};
    for (int n = 0; item_of(n) < a.items; ++n) {
      const WorkItem w = decode_item<C>(a, item_of(n), rank, self);
      // The causal form always tracks: its first tile need not have a key for every row.
      const bool done = consumer.template attend<C.causal>(w);
      if (!done && lane == 0) mark_redo<C>(smem, n);
    }
    meet<C>(smem, 0);
    if constexpr (!Variant::kConfig.causal) {
      if (redo[0] != 0) {
        for (int n = 0; item_of(n) < a.items; ++n) {
          if (must_redo(redo, n)) {
            consumer.template attend<true>(decode_item<C>(a, item_of(n), rank, self));
          }
        }
        meet<C>(smem, 1);
      }
    }
  };
  run_roles(produce, consume);
}

// ---- Launch -----------------------------------------------------------------------------------

template <class Variant>
const char* launch_attention(const Sm90AttentionParams& p, void* stream) {
  constexpr AttentionConfig C = Variant::kConfig;
  CUtensorMap map_q, map_k, map_v;
  const int box = Producer<C>::kBoxKeys;
  const auto map_heads = [&](CUtensorMap* map, const void* base, int64_t rows, int heads,
                             int64_t stride, int box_rows) {
    return encode_head_map(map, base, sizeof(__nv_bfloat16), rows, heads, p.head_dim, stride,
                           box_rows);
  };
  bool mapped = map_heads(&map_q, p.q, p.sq, p.hq, p.q_stride, kRows);
  if (p.skv > 0) {
    mapped = mapped && map_heads(&map_k, p.k, p.skv, p.hkv, p.k_stride, box) &&
             map_heads(&map_v, p.v, p.skv, p.hkv, p.v_stride, box);
  } else {
    map_k = map_v = map_q;  // never read
  }
  if (!mapped) return "the driver refused a tensor map";

  AttentionArgs a{};
  a.out = static_cast<__nv_bfloat16*>(p.out);
  a.lse = p.lse;
  a.indices = p.indices;
  a.counts = p.counts;
  a.out_stride = p.out_stride;
  a.scale_log2 = p.scale * kLog2E;
  a.sq = static_cast<int>(p.sq);
  a.skv = static_cast<int>(p.skv);
  a.hq = p.hq;
  a.group = p.hq / p.hkv;
  a.block_q = p.block_q;
  a.list_rows = static_cast<int>((p.sq + p.block_q - 1) / p.block_q);
  a.blocks_per_entry = p.block_k / kListBlock;
  a.capacity = p.capacity;
  a.heads_per_list = p.heads_per_list;
  constexpr int kItemRows = kRows * (C.mapping == RowMapping::kRowPair ? 2 : 1);
  a.row_blocks = static_cast<int>((p.sq + kItemRows - 1) / kItemRows);
  const int64_t head_rows = int64_t{p.hq} * a.row_blocks;
  const int per_item = C.cluster * (C.mapping == RowMapping::kRowPair ? 1 : 2);
  a.items = static_cast<int>((head_rows + per_item - 1) / per_item);

  // More than one CTA an SM only if a CTA's items would not fit its bit set.
  const int clusters = std::max(persistent_clusters(a.items, C.cluster),
                                (a.items + kMaxItemsPerCta - 1) / kMaxItemsPerCta);
  return launch(attention_kernel<Variant>,
                {.ctas = dim3(static_cast<unsigned>(clusters * C.cluster)),
                 .shared_bytes = Layout<C>::kBytes,
                 .cluster = C.cluster},
                stream, map_q, map_k, map_v, a);
}

}  // namespace orrery::cuda::sm90
