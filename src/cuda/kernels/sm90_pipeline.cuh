// What the Hopper kernels share: the roles of a CTA, rings of buffers between them, the launch.
//
// A CTA has one producer warpgroup, of which single threads feed tiles through TMA, and two
// consumer warpgroups, which multiply 64 rows each. CTAs are persistent: they walk through work
// items, and the producer runs ahead of the consumers as far as its rings are deep.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "sm90.cuh"
#include "sm90_host.h"

namespace orrery::cuda::sm90 {

// ---- Elements ---------------------------------------------------------------------------------

// How elements of a type lie in shared memory: rows of 128 bytes in the 128-byte swizzle, the
// contracted index inside a row. One wgmma contracts 32 bytes of a row, whatever the type.
constexpr int kRowBytes = 128;
constexpr int kStepBytes = 32;
constexpr int kStepsPerRow = kRowBytes / kStepBytes;
template <typename T>
struct Element {
  static constexpr int kPerRow = kRowBytes / static_cast<int>(sizeof(T));
  static constexpr int kPerStep = kStepBytes / static_cast<int>(sizeof(T));
};

// ---- Roles ------------------------------------------------------------------------------------

constexpr int kConsumers = 2;  // warpgroups
constexpr int kRows = 64;      // of a consumer
constexpr int kThreads = 128 * (1 + kConsumers);

// Registers a thread after reallocation; a CTA of 384 threads starts with 168 each.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

// Runs produce(warp, lane) in the producer warpgroup, consume(warpgroup, warp, lane) in each
// consumer warpgroup, which are numbered from 0. Warps are numbered within their warpgroup.
template <int kProducer = kProducerRegisters, int kConsumer = kConsumerRegisters, class Produce,
          class Consume>
__device__ __forceinline__ void run_roles(const Produce& produce, const Consume& consume) {
  static_assert(kProducer + kConsumers * kConsumer <= (1 + kConsumers) * 168,
                "reallocation cannot hand out more registers than the CTA starts with");
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  const int warp = warp_uniform(threadIdx.x / 32 % 4);
  const int lane = threadIdx.x % 32;
  if (warpgroup == 0) {
    release_registers<kProducer>();
    produce(warp, lane);
  } else {
    claim_registers<kConsumer>();
    consume(warpgroup - 1, warp, lane);
  }
}

// ---- Rings ------------------------------------------------------------------------------------

// Position in a ring of buffers; `phase` is the parity of the pass through the ring.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void next() {
    if constexpr (kStages == 1) {
      phase ^= 1;
    } else if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Where rings of equal buffers lie in the shared memory of a CTA, in bytes.
struct RingShape {
  int stages;
  int bytes;      // of a buffer
  int buffers;    // offset of the first buffer
  int barriers;   // offset of the barriers: "full" of every buffer, then "empty" of every buffer
  int rings = 1;  // that lie one behind the other

  __host__ __device__ constexpr int slots() const { return rings * stages; }
  __host__ __device__ constexpr int buffers_end() const { return buffers + slots() * bytes; }
  __host__ __device__ constexpr int barriers_end() const { return barriers + 16 * slots(); }
};

// One side's view of a ring. The producer calls acquire(), starts the loads that bring the expected
// bytes, and next(). A consumer calls wait(), reads, and when its reads are over release() and
// next().
template <RingShape S>
struct Ring {
  uint32_t smem;  // shared address of the CTA's memory
  int first = 0;  // slot of this ring's first buffer
  RingPosition<S.stages> at{};

  __device__ __forceinline__ int slot() const { return first + at.stage; }
  __device__ __forceinline__ uint32_t buffer() const { return smem + S.buffers + slot() * S.bytes; }
  __device__ __forceinline__ uint32_t full() const { return smem + S.barriers + 8 * slot(); }
  __device__ __forceinline__ uint32_t empty(int slot) const {
    return smem + S.barriers + 8 * S.slots() + 8 * slot;
  }
  __device__ __forceinline__ void next() { at.next(); }

  // By one thread for all rings of the shape; `readers` arrivals empty a buffer.
  __device__ __forceinline__ static void init(uint32_t smem, int readers) {
    for (int i = 0; i < S.slots(); ++i) {
      mbarrier_init(smem + S.barriers + 8 * i, 1);
      mbarrier_init(smem + S.barriers + 8 * S.slots() + 8 * i, readers);
    }
  }

  __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty(slot()), at.phase ^ 1); }
  // Waits until the buffer is empty and says how many bytes will come.
  __device__ __forceinline__ void acquire(int bytes = S.bytes) const {
    wait_empty();
    mbarrier_arrive_expect(full(), bytes);
  }

  __device__ __forceinline__ void wait() const { mbarrier_wait(full(), at.phase); }
  // Tells the producers of the cluster that this warp has read the buffer of `slot`.
  template <int kCluster>
  __device__ __forceinline__ void release(int slot, int lane) const {
    if constexpr (kCluster == 1) {
      if (lane == 0) mbarrier_arrive(empty(slot));
    } else {
      if (lane < kCluster) mbarrier_arrive_remote(map_to_rank(empty(slot), lane));
    }
  }
};

// ---- Launch -----------------------------------------------------------------------------------

// Clusters of a persistent kernel: one CTA an SM, no cluster without an item.
inline int persistent_clusters(int items, int cluster) {
  return std::max(1, std::min(items, multiprocessors() / cluster));
}

struct LaunchShape {
  dim3 ctas;
  int threads = kThreads;
  int shared_bytes = 0;
  int cluster = 1;
};

// Enqueues the kernel on `stream` (a cudaStream_t). Returns nullptr, or a sentence.
template <typename... Parameters>
const char* launch(void (*kernel)(Parameters...), const LaunchShape& shape, void* stream,
                   const std::type_identity_t<Parameters>&... arguments) {
  // Asked for at every launch: a function's attributes belong to the current device, and the call
  // takes less than a microsecond once the kernel is loaded.
  if (cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize,
                           shape.shared_bytes) != cudaSuccess) {
    cudaGetLastError();
    return "the kernel could not be loaded with the shared memory of sm_90";
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.ctas;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = shape.cluster > 1 ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace orrery::cuda::sm90
