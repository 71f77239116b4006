#include "cpu/kernels.h"

namespace orrery::cpu {
namespace {
// 16 registers of 8 floats: 6 x 2 or 4 x 3 sums, the columns, 1 broadcast. Twelve sums hide the
// latency of two fused multiply-adds a cycle.
constexpr int kLanes = 8;
constexpr int kTileRows[] = {0, 6, 6, 4};
}  // namespace
}  // namespace orrery::cpu

#include "cpu/kernels_body.h"

namespace orrery::cpu {

const Kernels& avx2_kernels() {
  static constexpr Kernels kKernels = make_kernels("avx2", 4);
  return kKernels;
}

}  // namespace orrery::cpu
