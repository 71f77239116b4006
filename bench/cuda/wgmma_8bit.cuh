// 8-bit warpgroup matrix multiply, as in sm90.cuh: the accumulator is one thread's share of 64 x N,
// B is K-major in shared memory, one instruction contracts 32.
#pragma once

#include <cstdint>

namespace orrery::cuda::sm90 {

template <int kCount>
__device__ __forceinline__ void pin_registers(int32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Whether the phase is complete; does not wait.
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Meetings of `threads` threads of a CTA, of which some only announce themselves.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#define ORRERY_INT8(d, i)                                                                     \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), \
      "+r"(d[i + 6]), "+r"(d[i + 7])
#define ORRERY_INT32(d, i) \
  ORRERY_INT8(d, i), ORRERY_INT8(d, i + 8), ORRERY_INT8(d, i + 16), ORRERY_INT8(d, i + 24)
#define ORRERY_D32                                                          \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "

// S (+)= Q K^T, both s8 in shared memory, 64 keys.
__device__ __forceinline__ void wgmma_s8_ss(int32_t (&d)[32], uint64_t a, uint64_t b,
                                            int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 " ORRERY_D32 "%32, %33, p;\n}\n"
      : ORRERY_INT32(d, 0)
      : "l"(a), "l"(b), "r"(accumulate));
}

// O (+)= P V^T with P u8 in registers and V s8, 64 channels.
__device__ __forceinline__ void wgmma_u8s8_rs(int32_t (&d)[32], const uint32_t* a, uint64_t b,
                                              int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 " ORRERY_D32
      "{%32, %33, %34, %35}, %36, p;\n}\n"
      : ORRERY_INT32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

#undef ORRERY_D32
#undef ORRERY_INT32
#undef ORRERY_INT8

}  // namespace orrery::cuda::sm90
