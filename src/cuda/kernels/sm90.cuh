// Hopper (sm_90a) instructions as functions, one instruction each.
//
// Everything here is a thin inline-PTX wrapper: mbarriers, the tensor memory accelerator (TMA),
// warpgroup matrix multiply (wgmma) with its shared-memory descriptors, register reallocation and
// cluster addressing. Kernels above this header contain no PTX of their own.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

namespace orrery::cuda::sm90 {

// ---- Addresses, roles -------------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Makes a value that is equal in all lanes provably so, which keeps it in uniform registers.
__device__ __forceinline__ int warp_uniform(int value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Address of `address` (this CTA's shared memory) in the CTA of the given cluster rank.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// `address` is made by map_to_rank.
__device__ __forceinline__ void shared_or_remote(uint32_t address, uint32_t bits) {
  asm volatile("red.relaxed.cluster.shared::cluster.or.b32 [%0], %1;" ::"r"(address), "r"(bits)
               : "memory");
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where all threads of the cluster meet.
__device__ __forceinline__ void cluster_meet() {
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}

template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- mbarriers --------------------------------------------------------------------------------
// A barrier completes a phase when its arrivals and its expected bytes have all come in. Waiting
// for parity p returns once the phase of parity p is complete; on a fresh barrier parity 1 is.

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the cluster and to the TMA unit.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// `barrier` is an address made by map_to_rank. The arrival orders nothing at cluster scope: it says
// that asynchronous reads, which the warp has waited for, are over. (The .release.cluster form
// costs a memory barrier at GPU scope each time, which made the whole kernel a third slower.)
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// ---- Tensor memory accelerator ----------------------------------------------------------------

// L2 policies as the hardware encodes them (createpolicy.fractional with fraction 1).
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load_4d(uint32_t destination, const CUtensorMap* map, int c0,
                                            int c1, int c2, int c3, uint32_t barrier,
                                            uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(destination),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "l"(policy)
      : "memory");
}

// Writes the box to the same offset of every CTA in `mask` and signals the barrier at the same
// offset in each.
__device__ __forceinline__ void tma_load_4d_multicast(uint32_t destination, const CUtensorMap* map,
                                                      int c0, int c1, int c2, int c3,
                                                      uint32_t barrier, uint16_t mask,
                                                      uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7, %8;" ::"r"(
          destination),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "h"(mask), "l"(policy)
      : "memory");
}

// ---- Shared-memory matrix descriptors ---------------------------------------------------------
// Tiles are stored as chunks of 64 bf16 columns: each chunk is `rows` rows of 128 bytes with the
// 128-byte swizzle, so a chunk starts on a 1024-byte boundary.

// Rows are the M or N index, columns the contracted one. Per 16 columns inside a chunk the start
// address moves by 32 bytes. Groups of 8 rows are `group_bytes` apart; the swizzle follows from the
// address alone, so they may start at any row.
__device__ __forceinline__ uint64_t k_major_descriptor(uint32_t address,
                                                       uint32_t group_bytes = 1024) {
  constexpr uint64_t kLayout = (1ull << 62) | (1ull << 16);
  return kLayout | (uint64_t{group_bytes >> 4} << 32) | ((address & 0x3ffff) >> 4);
}

// Rows are the contracted index, columns the N index; chunks are `chunk_bytes` apart. Per 16 rows
// the start address moves by 2048 bytes.
__device__ __forceinline__ uint64_t mn_major_descriptor(uint32_t address, uint32_t chunk_bytes) {
  constexpr uint64_t kLayout = (1ull << 62) | (uint64_t{1024 >> 4} << 32);
  return kLayout | (uint64_t{chunk_bytes >> 4} << 16) | ((address & 0x3ffff) >> 4);
}

// A descriptor further on by a byte count that is a multiple of 16.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

// Four 8 x 8 matrices of 16-bit elements, one row address a lane: the A fragment of 16 x 16.
__device__ __forceinline__ void load_matrix_x4(uint32_t* fragment, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

// ---- wgmma ordering ---------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of asynchronously written registers across this point.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// ---- Warpgroup matrix multiply ----------------------------------------------------------------
// The accumulator array's length picks the instruction: float[N / 2] is one thread's share of a
// 64 x N tile. Register 4j + {0, 1} of lane l holds row l / 4 of the warp's 16 rows, columns
// 8j + 2 (l % 4) + {0, 1}; registers 4j + {2, 3} hold the same columns of row l / 4 + 8.
//
// wgmma_ss:          D (+)= A B^T, A = 64 x 16 and B = N x 16, both K-major in shared memory
// wgmma_rs_k_major:  D (+)= A B^T, the same with A in registers
// wgmma_rs_mn_major: D += A B, A = 64 x 16 in registers, B = 16 x N with N contiguous

#define ORRERY_ACC8(d, i)                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define ORRERY_ACC16(d, i) ORRERY_ACC8(d, i), ORRERY_ACC8(d, i + 8)
#define ORRERY_ACC32(d, i) ORRERY_ACC16(d, i), ORRERY_ACC16(d, i + 16)

__device__ __forceinline__ void wgmma_ss(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;\n}\n"
      : ORRERY_ACC32(d, 0)
      : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_ss(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, 0, 0;\n}\n"
      : ORRERY_ACC32(d, 0), ORRERY_ACC32(d, 32)
      : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_ss(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127}, "
      "%128, %129, p, 1, 1, 0, 0;\n}\n"
      : ORRERY_ACC32(d, 0), ORRERY_ACC32(d, 32), ORRERY_ACC32(d, 64), ORRERY_ACC32(d, 96)
      : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_rs_mn_major(float (&d)[32], const uint32_t* a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
      : ORRERY_ACC32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_rs_mn_major(float (&d)[64], const uint32_t* a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
      : ORRERY_ACC32(d, 0), ORRERY_ACC32(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_rs_k_major(float (&d)[64], const uint32_t* a, uint64_t b,
                                                 int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}\n"
      : ORRERY_ACC32(d, 0), ORRERY_ACC32(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

#undef ORRERY_ACC32
#undef ORRERY_ACC16
#undef ORRERY_ACC8

// ---- Arithmetic -------------------------------------------------------------------------------

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.693147180559945f;

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// `low` goes to the lower half, the even column.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ float low_bf16(uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float high_bf16(uint32_t packed) {
  return __uint_as_float(packed & 0xffff0000u);
}

// Lane t of a quad gives x[i] to lane i and gets the x[t] of all four.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int t) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      const bool upper = (t & distance) != 0;
      const uint32_t given = upper ? x[i] : x[i + distance];
      const uint32_t got = __shfl_xor_sync(0xffffffffu, given, distance);
      if (upper) {
        x[i] = got;
      } else {
        x[i + distance] = got;
      }
    }
  }
}

}  // namespace orrery::cuda::sm90
