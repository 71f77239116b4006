#include "sm90_host.h"

namespace orrery::cuda::sm90 {

bool encode_tensor_map(CUtensorMap* map, const TensorBox& t) {
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
  const auto type =
      t.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const auto swizzle = t.box[0] * static_cast<uint32_t>(t.element_bytes) == 64
                           ? CU_TENSOR_MAP_SWIZZLE_64B
                           : CU_TENSOR_MAP_SWIZZLE_128B;
  return encode(map, type, 4, const_cast<void*>(t.base),
                reinterpret_cast<const cuuint64_t*>(t.dims.data()),
                reinterpret_cast<const cuuint64_t*>(t.strides.data()), t.box.data(), kSteps.data(),
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool encode_head_map(CUtensorMap* map, const void* base, int element_bytes, int64_t rows, int heads,
                     int head_dim, int64_t row_stride, int box_rows) {
  const int columns = 128 / element_bytes;  // of a chunk
  const auto size = [](int64_t n) { return static_cast<uint64_t>(n); };
  return encode_tensor_map(
      map, {base,
            element_bytes,
            {size(columns), size(rows), size(head_dim / columns), size(heads)},
            {size(row_stride * element_bytes), 128, size(int64_t{head_dim} * element_bytes)},
            {static_cast<uint32_t>(columns), static_cast<uint32_t>(box_rows), 1, 1}});
}

bool encode_matrix_map(CUtensorMap* map, const void* base, int element_bytes, int64_t rows,
                       int64_t columns, int64_t row_stride, int box_rows) {
  const auto size = [](int64_t n) { return static_cast<uint64_t>(n); };
  const uint64_t stride = size(row_stride * element_bytes);
  return encode_tensor_map(
      map, {base,
            element_bytes,
            {size(columns), size(rows), 1, 1},
            {stride, stride, stride},
            {static_cast<uint32_t>(128 / element_bytes), static_cast<uint32_t>(box_rows), 1, 1}});
}

}  // namespace orrery::cuda::sm90
