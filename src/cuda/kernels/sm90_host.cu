#include "sm90_host.h"

namespace orrery::cuda::sm90 {

bool encode_bf16_map(CUtensorMap* map, const void* base, const std::array<uint64_t, 4>& dims,
                     const std::array<uint64_t, 3>& strides, const std::array<uint32_t, 4>& box) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &result);
    const bool found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return found ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  if (encode == nullptr) return false;
  constexpr std::array<cuuint32_t, 4> kSteps{1, 1, 1, 1};
  static_assert(sizeof(cuuint64_t) == sizeof(uint64_t) && sizeof(cuuint32_t) == sizeof(uint32_t));
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(base),
                reinterpret_cast<const cuuint64_t*>(dims.data()),
                reinterpret_cast<const cuuint64_t*>(strides.data()), box.data(), kSteps.data(),
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace orrery::cuda::sm90
