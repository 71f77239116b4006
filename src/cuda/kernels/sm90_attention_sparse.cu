#include "sm90_attention.cuh"
#include "sm90_attention_variants.h"

namespace orrery::cuda::sm90 {
namespace {

template <int kHeadDim, RowMapping kMapping, int kCluster>
struct Sparse {
  // Two rings of 128-wide tiles only fit with a single K stage; V, which is needed later, gains
  // more from the second.
  static constexpr bool kTight = kMapping == RowMapping::kIndependent && kHeadDim == 128;
  static constexpr AttentionConfig kConfig{.head_dim = kHeadDim,
                                           .mapping = kMapping,
                                           .sparse = true,
                                           .causal = false,
                                           .cluster = kCluster,
                                           .k_stages = kTight ? 1 : 2,
                                           .v_stages = 2};
};

}  // namespace

const char* row_pair_128(const Sm90AttentionParams& p, void* stream) {
  return launch_attention<Sparse<128, RowMapping::kRowPair, 1>>(p, stream);
}
const char* row_pair_128_multicast(const Sm90AttentionParams& p, void* stream) {
  return launch_attention<Sparse<128, RowMapping::kRowPair, 2>>(p, stream);
}
const char* row_pair_64(const Sm90AttentionParams& p, void* stream) {
  return launch_attention<Sparse<64, RowMapping::kRowPair, 1>>(p, stream);
}
const char* head_pair_128(const Sm90AttentionParams& p, void* stream) {
  return launch_attention<Sparse<128, RowMapping::kHeadPair, 1>>(p, stream);
}
const char* head_pair_128_multicast(const Sm90AttentionParams& p, void* stream) {
  return launch_attention<Sparse<128, RowMapping::kHeadPair, 2>>(p, stream);
}
const char* head_pair_64(const Sm90AttentionParams& p, void* stream) {
  return launch_attention<Sparse<64, RowMapping::kHeadPair, 1>>(p, stream);
}
const char* independent_128(const Sm90AttentionParams& p, void* stream) {
  return launch_attention<Sparse<128, RowMapping::kIndependent, 1>>(p, stream);
}
const char* independent_64(const Sm90AttentionParams& p, void* stream) {
  return launch_attention<Sparse<64, RowMapping::kIndependent, 1>>(p, stream);
}

}  // namespace orrery::cuda::sm90
