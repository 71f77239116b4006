// C entry points of the Hopper kernels, for loading them from a script.
#include "cuda/kernels/sm90_attention.h"
#include "cuda/kernels/sm90_select.h"

extern "C" {

const char* orrery_attention(const orrery::cuda::Sm90AttentionParams* params, void* stream) {
  return orrery::cuda::sm90_attention(*params, stream);
}

const char* orrery_attention_supports(const orrery::cuda::Sm90AttentionParams* params) {
  return orrery::cuda::sm90_attention_supports(*params);
}

const char* orrery_select(const orrery::cuda::Sm90SelectParams* params, void* stream) {
  return orrery::cuda::sm90_select(*params, stream);
}

uint64_t orrery_select_workspace(const orrery::cuda::Sm90SelectParams* params) {
  return orrery::cuda::sm90_select_workspace(*params);
}

}  // extern "C"
