#include "attention_8bit.cuh"

namespace orrery::cuda {
namespace {

struct Int8 {
  static constexpr sm90::Config8 kConfig{.int8_values = true,
                                         .consumers = 3,
                                         .producer_registers = 32,
                                         .consumer_registers = 160,
                                         .turns = true,
                                         .cluster = 2,
                                         .k_stages = 4,
                                         .v_stages = 4};
};
struct Int8Bf16 {
  static constexpr sm90::Config8 kConfig{.int8_values = false,
                                         .consumers = 2,
                                         .producer_registers = sm90::kProducerRegisters,
                                         .consumer_registers = sm90::kConsumerRegisters,
                                         .turns = false,
                                         .cluster = 2,
                                         .k_stages = 3,
                                         .v_stages = 3};
};

}  // namespace

const char* attention_8bit(const Attention8Params& p, void* stream) {
  if (const char* reason = sm90::device_reason()) return reason;
  if (p.sq <= 0 || p.skv <= 0 || p.hkv <= 0 || p.hq % p.hkv != 0 || p.hq / p.hkv % 2 != 0) {
    return "8-bit attention takes rows, keys and an even number of query heads for each KV head";
  }
  return p.int8_values ? sm90::launch_attention8<Int8>(p, stream)
                       : sm90::launch_attention8<Int8Bf16>(p, stream);
}

}  // namespace orrery::cuda
