#include "sm90_attention.cuh"
#include "sm90_attention_variants.h"

namespace orrery::cuda::sm90 {
namespace {

template <int kHeadDim, bool kCausal, int kCluster>
struct Dense {
  static constexpr AttentionConfig kConfig{.head_dim = kHeadDim,
                                           .mapping = RowMapping::kRowPair,
                                           .sparse = false,
                                           .causal = kCausal,
                                           .cluster = kCluster,
                                           .k_stages = 2,
                                           .v_stages = 2};
};

}  // namespace

const char* dense_128(const Sm90AttentionParams& p, void* stream) {
  return launch_attention<Dense<128, false, 1>>(p, stream);
}
const char* dense_128_multicast(const Sm90AttentionParams& p, void* stream) {
  return launch_attention<Dense<128, false, 2>>(p, stream);
}
const char* dense_64(const Sm90AttentionParams& p, void* stream) {
  return launch_attention<Dense<64, false, 1>>(p, stream);
}
const char* causal_128(const Sm90AttentionParams& p, void* stream) {
  return launch_attention<Dense<128, true, 1>>(p, stream);
}
const char* causal_64(const Sm90AttentionParams& p, void* stream) {
  return launch_attention<Dense<64, true, 1>>(p, stream);
}

}  // namespace orrery::cuda::sm90
