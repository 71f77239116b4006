// The kernels behind attention_8bit.h: one template, values in bf16 or s8.
//
// Operations: 4 Sq Skv 128 hq. Bytes: never the bound.
//
// Floor, Sq 44160, Skv 44672, 32/8 heads of 128, at 1.61 GHz: 27.9 ms with bf16 values (1536 clocks
// a tile of 128 x 128), 18.6 ms with s8 values (1024 clocks, as many as its exponentials take).
//
// Reproduce: python3 bench/cuda/attention_8bit.py
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "attention_8bit.h"
#include "cuda/kernels/sm90_pipeline.cuh"
#include "wgmma_8bit.cuh"

namespace orrery::cuda::sm90 {

struct Config8 {
  bool int8_values;
  int consumers;  // warpgroups of 64 rows
  int producer_registers;
  int consumer_registers;
  bool turns;   // consumers begin their exponentials one after another
  int cluster;  // CTAs that share K and V tiles by multicast, each with a head of the KV head
  int k_stages;
  int v_stages;
};

constexpr int kD8 = 128;
constexpr int kTile8 = 128;  // keys

template <Config8 C>
struct Layout8 {
  static constexpr int kQBytes = kRows * kD8;
  static constexpr int kKBytes = kTile8 * kD8;
  static constexpr int kVBytes = kTile8 * kD8 * (C.int8_values ? 1 : 2);
  static constexpr int kKAt = C.consumers * kQBytes;
  static constexpr int kVAt = kKAt + C.k_stages * kKBytes;
  static constexpr int kScalesAt = kVAt + C.v_stages * kVBytes;  // two floats a K buffer
  static constexpr RingShape kQ{1, kQBytes, 0, kScalesAt + 8 * C.k_stages, C.consumers};
  static constexpr RingShape kK{C.k_stages, kKBytes, kKAt, kQ.barriers_end()};
  static constexpr RingShape kV{C.v_stages, kVBytes, kVAt, kK.barriers_end()};
  static constexpr int kBytes = kV.barriers_end();
  static_assert(kBytes <= kMaxSharedBytes, "the tiles must fit the shared memory of one CTA");
};

struct Args8 {
  __nv_bfloat16* out;
  const float* q_scale;
  const float* k_scale;
  const float* v_scale;
  int sq, skv, hq, hkv, group;
  int row_blocks;  // of the rows of a CTA
  int items;       // a cluster takes one at a time
  int tiles;
  int key_blocks;  // of 64 keys
};

struct Item8 {
  int head, kv_head, row;
};

template <Config8 C>
__device__ __forceinline__ Item8 item8(const Args8& a, int item, int rank, int warpgroup) {
  const int pairs = a.group / C.cluster, per_kv_head = a.row_blocks * pairs;
  const int kv_head = item / per_kv_head, rest = item - kv_head * per_kv_head;
  const int row_block = rest / pairs;
  const int head = kv_head * a.group + (rest - row_block * pairs) * C.cluster + rank;
  return {head, kv_head, (C.consumers * row_block + warpgroup) * kRows};
}

// ---- Producer ---------------------------------------------------------------------------------

template <Config8 C>
struct Producer8 {
  using L = Layout8<C>;
  const Args8& a;
  const CUtensorMap* map_q;
  const CUtensorMap* map_k;
  const CUtensorMap* map_v;
  int rank;
  Ring<L::kQ> q;
  Ring<L::kK> k;
  Ring<L::kV> v;

  // This CTA's half of the tile's keys, for both CTAs; the scales for its own consumers.
  __device__ __forceinline__ void load_k(int tile, int head) {
    const float* from = a.k_scale + int64_t{head} * a.key_blocks;
    const float first = __ldg(from + 2 * tile);
    const float second = 2 * tile + 1 < a.key_blocks ? __ldg(from + 2 * tile + 1) : first;
    k.wait_empty();
    store_shared(k.smem + L::kScalesAt + 8 * k.slot(), first, second);
    mbarrier_arrive_expect(k.full(), L::kKBytes);
    if constexpr (C.cluster == 1) {
      tma_load_4d(k.buffer(), map_k, 0, tile * kTile8, 0, head, k.full(), kEvictLast);
    } else {
      tma_load_4d_multicast(k.buffer() + rank * (L::kKBytes / 2), map_k, 0,
                            tile * kTile8 + rank * (kTile8 / 2), 0, head, k.full(), 3, kEvictLast);
    }
    k.next();
  }

  // s8: half of the channels. bf16: half of the columns.
  __device__ __forceinline__ void load_v(int tile, int head) {
    v.acquire();
    const int key = tile * kTile8;
    if constexpr (C.cluster == 1) {
      if constexpr (C.int8_values) {
        tma_load_4d(v.buffer(), map_v, key, 0, head, 0, v.full(), kEvictLast);
      } else {
        tma_load_4d(v.buffer(), map_v, 0, key, 0, head, v.full(), kEvictLast);
        tma_load_4d(v.buffer() + L::kVBytes / 2, map_v, 0, key, 1, head, v.full(), kEvictLast);
      }
    } else {
      const uint32_t to = v.buffer() + rank * (L::kVBytes / 2);
      if constexpr (C.int8_values) {
        tma_load_4d_multicast(to, map_v, key, rank * (kD8 / 2), head, 0, v.full(), 3, kEvictLast);
      } else {
        tma_load_4d_multicast(to, map_v, 0, key, rank, head, v.full(), 3, kEvictLast);
      }
    }
    v.next();
  }

  __device__ __forceinline__ void feed(int item) {
    const Item8 w = item8<C>(a, item, rank, 0);
    load_k(a.tiles - 1, w.kv_head);
#pragma unroll
    for (int warpgroup = 0; warpgroup < C.consumers; ++warpgroup) {
      const Ring<L::kQ> to{q.smem, warpgroup, q.at};
      to.acquire();
      tma_load_4d(to.buffer(), map_q, 0, w.row + warpgroup * kRows, 0, w.head, to.full(),
                  kEvictFirst);
    }
    q.next();
    for (int tile = a.tiles - 2; tile >= 0; --tile) {
      load_k(tile, w.kv_head);
      load_v(tile + 1, w.kv_head);
    }
    load_v(0, w.kv_head);
  }

  __device__ __forceinline__ static void store_shared(uint32_t address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
  }
};

// ---- Consumer ---------------------------------------------------------------------------------

// False in every call; as never() in sm90_attention.cuh.
__device__ __forceinline__ bool never8(const Args8& a) { return a.group <= 0; }

// One warpgroup's 64 rows. A thread holds parts of two rows: lane / 4 and lane / 4 + 8 of its
// warp's 16, called row 0 and row 1 here. Register i of the scores is of row i / 2 % 2, and of the
// tile's first 64 keys if i < 32.
template <Config8 C>
struct Consumer8 {
  using L = Layout8<C>;
  static constexpr int kScores = kTile8 / 2;
  const Args8& a;
  int warpgroup;
  int warp;  // of the warpgroup
  int lane;
  Ring<L::kQ> q_ring;
  Ring<L::kK> k_ring;
  Ring<L::kV> v_ring;

  // Scores, then what they become; with s8 values also the product with V. Two halves, each of its
  // own instruction: the first 64 keys or channels, and the others.
  int32_t s[2][kScores / 2];
  uint32_t p[C.int8_values ? kTile8 / 8 : kTile8 / 4];  // A fragments of P
  float o[kD8 / 2];
  float q_scale[2];
  float k_scale[2];    // of the tile
  float reference[2];  // of a row, in log2 units
  float factor[2];     // of the tile's product and codes: 2^(its maximum - reference)
  float sum[2];

  template <class TileRing>
  __device__ __forceinline__ void release(TileRing& ring) {
    ring.template release<C.cluster>(ring.slot(), lane);
    ring.next();
  }

  __device__ __forceinline__ void take_q(const Item8& w) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = min(w.row + 16 * warp + lane / 4 + 8 * r, a.sq - 1);
      q_scale[r] = __ldg(a.q_scale + int64_t{w.head} * a.sq + row);
    }
  }

  // Left alone, the warpgroups fall into step: all take exponentials, then all wait for products.
  // In turn, the products of one run under the exponentials of the others. Turns overlap: the
  // compiler ends one after a third of its exponentials, and ending it after a half or all of them
  // is slower.
  __device__ __forceinline__ void begin_turn() {
    if constexpr (C.turns) named_barrier_sync(1 + warpgroup, 256);
  }
  __device__ __forceinline__ void end_turn() {
    if constexpr (C.turns) named_barrier_arrive(1 + (warpgroup + 1) % C.consumers, 256);
  }

  __device__ __forceinline__ void release_q() {
    __syncwarp();
    q_ring.template release<1>(q_ring.slot(), lane);
    q_ring.next();
  }

  // Scores of half of the tile's keys.
  __device__ __forceinline__ void issue_qk(int half) {
    const uint64_t q = k_major_descriptor(q_ring.buffer());
    const uint64_t k =
        advance(k_major_descriptor(k_ring.smem + L::kKAt),
                static_cast<uint32_t>(k_ring.slot() * L::kKBytes + half * (L::kKBytes / 2)));
#pragma unroll
    for (int step = 0; step < kStepsPerRow; ++step) {
      wgmma_s8_ss(s[half], advance(q, step * kStepBytes), advance(k, step * kStepBytes), step > 0);
    }
    wgmma_commit();
  }

  // With s8 values: the product for half of the channels.
  __device__ __forceinline__ void issue_pv(int half) {
    const uint64_t v =
        advance(k_major_descriptor(v_ring.smem + L::kVAt),
                static_cast<uint32_t>(v_ring.slot() * L::kVBytes + half * (L::kVBytes / 2)));
#pragma unroll
    for (int step = 0; step < kStepsPerRow; ++step) {
      wgmma_u8s8_rs(s[half], p + 4 * step, advance(v, step * kStepBytes), step > 0);
    }
    wgmma_commit();
  }
  // With bf16 values: O += P V.
  __device__ __forceinline__ void issue_pv() {
    const uint64_t v = advance(mn_major_descriptor(v_ring.smem + L::kVAt, L::kVBytes / 2),
                               static_cast<uint32_t>(v_ring.slot() * L::kVBytes));
#pragma unroll
    for (int step = 0; step < kTile8 / 16; ++step) {
      wgmma_rs_mn_major(o, p + 4 * step, advance(v, step * 16 * kRowBytes));
    }
    wgmma_commit();
  }

  // Before the K buffer is released.
  __device__ __forceinline__ void take_k_scales() {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(k_scale[0]), "=f"(k_scale[1])
                 : "r"(k_ring.smem + L::kScalesAt + 8 * k_ring.slot())
                 : "memory");
  }

  // Keys of the tile from `limit` on get the lowest score.
  __device__ __forceinline__ void mask(int limit) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (8 * (i / 4) + i % 2 + 2 * (lane % 4) >= limit) at(i) = INT32_MIN;
    }
  }

  __device__ __forceinline__ int32_t& at(int i) { return s[i / (kScores / 2)][i % (kScores / 2)]; }

  // The largest of this thread's scores of each row and half, in units of q_scale. As a tree: a
  // chain would wait for every result.
  __device__ __forceinline__ void half_maxima(int half, float (&top)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto x = [&](int i) { return s[half][i / 2 * 4 + i % 2 + 2 * r]; };  // i < 16
      int m[5];
#pragma unroll
      for (int i = 0; i < 5; ++i) m[i] = __vimax3_s32(x(3 * i), x(3 * i + 1), x(3 * i + 2));
      const int all = max(__vimax3_s32(m[0], m[1], m[2]), __vimax3_s32(m[3], m[4], x(15)));
      top[r] = __int2float_rn(all) * k_scale[half];
    }
  }
  __device__ __forceinline__ void join_halves(float (&top)[2], const float (&other)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], other[r]) * q_scale[r];
  }
  // Of the whole row.
  __device__ __forceinline__ static void join_maxima(float (&top)[2]) {
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
      float other[2];  // both under way before either is used
      asm("shfl.sync.bfly.b32 %0, %2, %4, 0x1f, 0xffffffff;\n"
          "shfl.sync.bfly.b32 %1, %3, %4, 0x1f, 0xffffffff;"
          : "=&f"(other[0]), "=&f"(other[1])
          : "f"(top[0]), "f"(top[1]), "r"(distance));
      top[0] = fmaxf(top[0], other[0]);
      top[1] = fmaxf(top[1], other[1]);
    }
  }

  static constexpr int kStep = kScores / 4;
  // Scores of a step to logarithms, in place: score * scale + base, and -inf for a masked score
  // whatever the scale.
  template <bool kMasked>
  __device__ __forceinline__ void take_logarithms(int step, const float (&base)[2]) {
#pragma unroll
    for (int i = kStep * step; i < kStep * (step + 1); ++i) {
      const int r = i / 2 % 2;
      const float scale = q_scale[r] * k_scale[step / 2];
      const float x = __fmaf_rn(__int2float_rn(at(i)), scale, base[r]);
      at(i) = __float_as_int(kMasked && at(i) == INT32_MIN ? -INFINITY : x);
    }
  }

  // Two neighbouring probabilities in units of the largest's 255th, rounded: 1024 + x in half
  // precision has the rounded x in its low bits.
  __device__ __forceinline__ uint32_t round_pair(int i) {
    const __half2 pair = __floats2half2_rn(exp2_approx(__int_as_float(at(i))),
                                           exp2_approx(__int_as_float(at(i + 1))));
    const __half2 rounded = __hadd2_rn(pair, __half2half2(1024));
    return reinterpret_cast<const uint32_t&>(rounded);
  }

  static constexpr float kRise = 7.994353436858858f;  // log2 255
  // With s8 values: scores to codes of the probabilities over 2^top, and their sum.
  template <bool kMasked>
  __device__ __forceinline__ void quantise_probabilities(const float (&top)[2]) {
    const float base[2] = {kRise - top[0], kRise - top[1]};
    uint32_t codes[2] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      take_logarithms<kMasked>(step, base);
#pragma unroll
      for (int n = 0; n < 4; ++n) {  // fragment: row n % 2, keys of half n / 2 of the step
        const int i = kStep * step + n / 2 * 8 + n % 2 * 2;
        const uint32_t four = __byte_perm(round_pair(i), round_pair(i + 4), 0x6420);
        p[4 * step + n] = four;
        codes[n % 2] = __dp4a(four, 0x01010101u, codes[n % 2]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = exp2_approx(top[r] - reference[r]);
      sum[r] = __fmaf_rn(factor[r], __uint2float_rn(codes[r]), sum[r]);
    }
  }

  // With bf16 values: probabilities over the reference, in place.
  template <bool kMasked>
  __device__ __forceinline__ void exponentiate(float (&top)[2]) {
    float base[2] = {-reference[0], -reference[1]}, part[2][2] = {};
    const bool moves = exceeds_reference(top);
    take_logarithms<kMasked>(0, base);
    if (moves) {
      raise_reference(top);
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        at(i) = __float_as_int(__int_as_float(at(i)) - base[i / 2 % 2] - reference[i / 2 % 2]);
      }
      base[0] = -reference[0];
      base[1] = -reference[1];
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = kStep * step; i < kStep * (step + 1); ++i) {
        const float x = exp2_approx(__int_as_float(at(i)));
        part[i / 2 % 2][i % 2] += x;
        at(i) = __float_as_int(x);
      }
      if (step < 3) take_logarithms<kMasked>(step + 1, base);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += part[r][0] + part[r][1];
  }
  __device__ __forceinline__ void pack_probabilities() {
#pragma unroll
    for (int i = 0; i < kTile8 / 4; ++i) {
      p[i] = pack_bf16(__int_as_float(at(2 * i)), __int_as_float(at(2 * i + 1)));
    }
  }

  __device__ __forceinline__ void scale_output(int r, float by) {
    sum[r] *= by;
#pragma unroll
    for (int i = 0; i < kD8 / 2; ++i) {
      if (i / 2 % 2 == r) o[i] *= by;
    }
  }

  // A row's reference only moves when a score exceeds it by more than 2^kSlack: f32 has the range,
  // and the result does not depend on it. With bf16 values `top` need not be joined, and the
  // product in flight, which adds to O, must have ended before O is scaled.
  static constexpr float kSlack = 64.0f;
  __device__ __forceinline__ bool exceeds_reference(const float (&top)[2]) const {
    return __any_sync(0xffffffffu,
                      top[0] > reference[0] + kSlack || top[1] > reference[1] + kSlack);
  }
  __device__ __forceinline__ void raise_reference(float (&top)[2]) {
    if constexpr (!C.int8_values) {
      wgmma_wait<0>();
      pin_registers(o);
      join_maxima(top);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float next = fmaxf(reference[r], top[r]);
      scale_output(r, exp2_approx(reference[r] - next));
      reference[r] = next;
    }
  }

  // O += half of the product of a tile times its factor.
  __device__ __forceinline__ void promote(int half) {
#pragma unroll
    for (int i = 0; i < kD8 / 4; ++i) {
      float& to = o[half * (kD8 / 4) + i];
      to = __fmaf_rn(__int2float_rn(s[half][i]), factor[i / 2 % 2], to);
    }
  }

  // The scores in flight and the largest of each row among them.
  template <bool kMasked, bool kJoined>
  __device__ __forceinline__ void take_scores(float (&top)[2]) {
    float other[2];
    take_k_scales();
    if constexpr (!kMasked) {
      wgmma_wait<1>();
      pin_registers(s[0]);
      half_maxima(0, top);
    }
    wgmma_wait<0>();
    pin_registers(s[1]);
    release(k_ring);
    if constexpr (kMasked) {
      pin_registers(s[0]);
      mask(a.skv - (a.tiles - 1) * kTile8);
      half_maxima(0, top);
    }
    half_maxima(1, other);
    join_halves(top, other);
    if constexpr (kJoined) join_maxima(top);
  }

  __device__ __forceinline__ void attend(const Item8& w) {
    q_ring.wait();
    take_q(w);
#pragma unroll
    for (float& x : o) x = 0.0f;
    sum[0] = sum[1] = 0.0f;
    float top[2];
    k_ring.wait();
    wgmma_fence();
    issue_qk(0);
    issue_qk(1);
    take_scores<true, true>(top);
    reference[0] = top[0];
    reference[1] = top[1];
    if constexpr (C.int8_values) {
      attend_in_turn(top);
    } else {
      attend_overlapped(top);
    }
    finish(w);
  }

  // With s8 values. Scores and the product with V take turns in the same registers, which leaves
  // room for three warpgroups: each waits for its own products under the softmax of the others.
  __device__ __forceinline__ void attend_in_turn(float (&top)[2]) {
    quantise_probabilities<true>(top);
    for (int tile = 1; tile < a.tiles; ++tile) {
      v_ring.wait();
      wgmma_fence();
      issue_pv(0);
      issue_pv(1);
      k_ring.wait();
      wgmma_wait<1>();
      pin_registers(s[0]);
      promote(0);
      wgmma_fence();
      issue_qk(0);
      wgmma_wait<1>();
      pin_registers(s[1]);
      release(v_ring);
      promote(1);
      wgmma_fence();
      issue_qk(1);
      take_scores<false, true>(top);
      begin_turn();
      if (exceeds_reference(top)) raise_reference(top);
      quantise_probabilities<false>(top);
      end_turn();
    }
    release_q();
    v_ring.wait();
    wgmma_fence();
    issue_pv(0);
    issue_pv(1);
    wgmma_wait<0>();
    pin_registers(s[0]);
    pin_registers(s[1]);
    release(v_ring);
    promote(0);
    promote(1);
  }

  // With bf16 values. QK of this tile and PV of the one before are in flight together.
  __device__ __forceinline__ void attend_overlapped(float (&top)[2]) {
    exponentiate<true>(top);
    pack_probabilities();
    bool k_full = false, v_full = false;  // the buffers of the next products, asked ahead of time
    for (int tile = 1; tile < a.tiles; ++tile) {
      if (!k_full) k_ring.wait();
      wgmma_fence();
      issue_qk(0);
      issue_qk(1);
      if (!v_full) v_ring.wait();
      wgmma_fence();
      issue_pv();
      take_k_scales();
      wgmma_wait<1>();
      pin_registers(s[0]);
      pin_registers(s[1]);
      release(k_ring);
      float other[2];
      half_maxima(0, top);
      half_maxima(1, other);
      join_halves(top, other);
      exponentiate<false>(top);
      pin_registers(s[0]);
      pin_registers(s[1]);
      // In both branches, so that the wait stays below the exponentials.
      if (never8(a)) {
        wgmma_wait<0>();
        pin_registers(o);
        scale_output(0, 2.0f);
      } else {
        wgmma_wait<0>();
        pin_registers(o);
      }
      release(v_ring);
      k_full = mbarrier_test(k_ring.full(), k_ring.at.phase);
      v_full = mbarrier_test(v_ring.full(), v_ring.at.phase);
      pack_probabilities();
    }
    release_q();
    v_ring.wait();
    wgmma_fence();
    issue_pv();
    wgmma_wait<0>();
    pin_registers(o);
    release(v_ring);
  }

  __device__ __forceinline__ void finish(const Item8& w) {
    const int piece = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[r];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      const float inverse = 1.0f / total;
      const int row = w.row + 16 * warp + lane / 4 + 8 * r;
      __nv_bfloat16* to = a.out + (int64_t{row} * a.hq + w.head) * kD8;
#pragma unroll
      for (int j = 0; j < kD8 / 8; j += 4) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (j + i) + 2 * r;
          float scale[2] = {inverse, inverse};
          if constexpr (C.int8_values) {
            const float2 both = __ldg(reinterpret_cast<const float2*>(a.v_scale + w.kv_head * kD8 +
                                                                      8 * (j + i) + 2 * piece));
            scale[0] *= both.x;
            scale[1] *= both.y;
          }
          x[i] = pack_bf16(o[at] * scale[0], o[at + 1] * scale[1]);
        }
        transpose_quad(x, piece);
        if (row < a.sq) {
          *reinterpret_cast<uint4*>(to + 8 * (j + piece)) = make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
    }
  }
};

// ---- Kernel -----------------------------------------------------------------------------------

template <class Variant>
__global__ void __launch_bounds__(128 * (1 + Variant::kConfig.consumers), 1)
    attention8_kernel(const __grid_constant__ CUtensorMap map_q,
                      const __grid_constant__ CUtensorMap map_k,
                      const __grid_constant__ CUtensorMap map_v, const Args8 a) {
  constexpr Config8 C = Variant::kConfig;
  using L = Layout8<C>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = warp_uniform(shared_address(shared));
  const int rank = C.cluster == 1 ? 0 : static_cast<int>(cluster_rank());
  const int cluster = blockIdx.x / C.cluster, clusters = gridDim.x / C.cluster;
  if (threadIdx.x == 0) {
    Ring<L::kQ>::init(smem, 4);
    Ring<L::kK>::init(smem, 4 * C.consumers * C.cluster);
    Ring<L::kV>::init(smem, 4 * C.consumers * C.cluster);
    mbarrier_init_fence();
    prefetch_tensor_map(&map_q);
    prefetch_tensor_map(&map_k);
    prefetch_tensor_map(&map_v);
  }
  cluster_meet();
  run_roles<C.producer_registers, C.consumer_registers, C.consumers>(
      [&](int warp, int lane) {
        if (warp != 0 || lane != 0) return;
        Producer8<C> producer{a, &map_q, &map_k, &map_v, rank, {smem}, {smem}, {smem}};
        for (int item = cluster; item < a.items; item += clusters) producer.feed(item);
      },
      [&](int warpgroup, int warp, int lane) {
        Consumer8<C> consumer{a, warpgroup, warp, lane, {smem, warpgroup}, {smem}, {smem}};
        if (warpgroup == C.consumers - 1) consumer.end_turn();  // the first turn is the first's
        for (int item = cluster; item < a.items; item += clusters) {
          consumer.attend(item8<C>(a, item, rank, warpgroup));
        }
      });
  // No CTA leaves while its peer can still write into it.
  cluster_meet();
}

template <class Variant>
const char* launch_attention8(const Attention8Params& p, void* stream) {
  constexpr Config8 C = Variant::kConfig;
  const Attention8Operands& o = p.operands;
  CUtensorMap map_q, map_k, map_v;
  bool mapped = encode_head_map(&map_q, o.q, 1, p.sq, p.hq, kD8, p.hq * kD8, kRows) &&
                encode_head_map(&map_k, o.k, 1, p.skv, p.hkv, kD8, p.hkv * kD8, kTile8 / C.cluster);
  if constexpr (C.int8_values) {
    const uint64_t stride = static_cast<uint64_t>(o.v_stride);
    mapped = mapped &&
             encode_tensor_map(&map_v, {.base = o.v,
                                        .element_bytes = 1,
                                        .dims = {stride, kD8, static_cast<uint64_t>(p.hkv), 1},
                                        .strides = {stride, stride * kD8, stride * kD8 * p.hkv},
                                        .box = {kTile8, kD8 / C.cluster, 1, 1}});
  } else {
    mapped = mapped && encode_head_map(&map_v, p.v, 2, p.skv, p.hkv, kD8, p.hkv * kD8, kTile8);
  }
  if (!mapped) return "the driver refused a tensor map";
  Args8 a{};
  a.out = static_cast<__nv_bfloat16*>(p.out);
  a.q_scale = o.q_scale;
  a.k_scale = o.k_scale;
  a.v_scale = o.v_scale;
  a.sq = static_cast<int>(p.sq);
  a.skv = static_cast<int>(p.skv);
  a.hq = p.hq;
  a.hkv = p.hkv;
  a.group = p.hq / p.hkv;
  a.row_blocks = static_cast<int>((p.sq + C.consumers * kRows - 1) / (C.consumers * kRows));
  a.items = p.hq / C.cluster * a.row_blocks;
  a.tiles = static_cast<int>((p.skv + kTile8 - 1) / kTile8);
  a.key_blocks = static_cast<int>((p.skv + 63) / 64);
  const dim3 ctas(static_cast<unsigned>(persistent_clusters(a.items, C.cluster) * C.cluster));
  return launch(attention8_kernel<Variant>,
                {.ctas = ctas,
                 .threads = 128 * (1 + C.consumers),
                 .shared_bytes = Layout8<C>::kBytes,
                 .cluster = C.cluster},
                stream, map_q, map_k, map_v, a);
}

}  // namespace orrery::cuda::sm90
