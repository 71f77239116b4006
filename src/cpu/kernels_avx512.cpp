#include "cpu/kernels.h"

namespace orrery::cpu {
namespace {
// 32 registers of 16 floats; the broadcast is part of the multiply-add. More rows would need more
// row pointers than there are general registers.
constexpr int kLanes = 16;
constexpr int kTileRows[] = {0, 8, 8, 8};
}  // namespace
}  // namespace orrery::cpu

#include "cpu/kernels_body.h"

namespace orrery::cpu {

const Kernels& avx512_kernels() {
  static constexpr Kernels kKernels = make_kernels("avx512", 6);
  return kKernels;
}

}  // namespace orrery::cpu
