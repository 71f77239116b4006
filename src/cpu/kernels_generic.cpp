#include "cpu/kernels.h"

namespace orrery::cpu {
namespace {
// 16 registers of 4 floats: 4 x 3 sums, 3 columns, 1 broadcast.
constexpr int kLanes = 4;
constexpr int kTileRows[] = {0, 4, 4, 4};
}  // namespace
}  // namespace orrery::cpu

#include "cpu/kernels_body.h"

namespace orrery::cpu {

const Kernels& generic_kernels() {
  static constexpr Kernels kKernels = make_kernels("generic", 7);
  return kKernels;
}

}  // namespace orrery::cpu
