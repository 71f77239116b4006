// The composition root: the only file that names backends.
#include "engine/backends.h"

#include <optional>

#include "base/error.h"
#include "cpu/cpu_backend.h"
#include "cuda/cuda_backend.h"

namespace orrery {

std::unique_ptr<Backend> make_backend(const EngineOptions& options) {
  std::string device = options.device;
  if (device == "auto") device = cuda::is_cuda_built() ? "cuda" : "cpu";
  cpu::CpuOptions cpu_options;
  cpu_options.num_threads = options.num_threads;
  if (device == "cpu") return cpu::make_cpu_backend(cpu_options);
  if (device == "cuda") return cuda::make_cuda_backend({});
  if (device.starts_with("cuda:")) {
    int index = -1;
    const std::string number = device.substr(5);
    if (!number.empty() && number.size() < 4 && number.find_first_not_of("0123456789") == std::string::npos) {
      index = std::stoi(number);
    }
    require(index >= 0, "device \"", options.device, "\": expected a number after the colon, as in cuda:0");
    return cuda::make_cuda_backend({index});
  }
  fail(ErrorKind::invalid_argument, "device \"", options.device, "\" is not known; it is cpu, cuda, cuda:N or auto");
}

DType activation_type(const EngineOptions& options, const Backend& backend) {
  if (options.dtype == "fp32") return DType::f32;
  if (options.dtype == "bf16") return DType::bf16;
  require(options.dtype == "auto", "dtype \"", options.dtype, "\" is not known; it is fp32, bf16 or auto");
  return backend.device() == DeviceKind::cpu ? DType::f32 : DType::bf16;
}

AttentionInventory inventory_of(const TransformerConfig& config) {
  AttentionInventory inventory;
  inventory.num_layers = static_cast<int>(config.num_hidden_layers);
  inventory.roles = {AttentionRole::und, AttentionRole::gen, AttentionRole::gen_multi_control};
  inventory.num_heads = config.num_attention_heads;
  inventory.num_kv_heads = config.num_key_value_heads;
  return inventory;
}

AttentionStrategy strategy_from(const AttentionInventory& inventory, const std::string& attention,
                                const Json* checkpoint) {
  std::optional<Json> runtime;
  if (attention == "dense") {
    runtime = Json::object().set("default", "FLASH_ATTN");
  } else if (!attention.empty()) {
    runtime = attention.find('{') == std::string::npos ? Json::load(attention)
                                                       : Json::parse(attention, "--attention");
  }
  return AttentionStrategy::resolve(inventory, runtime ? &*runtime : nullptr, checkpoint);
}

AttentionStrategy strategy_of(const Checkpoint& checkpoint, const std::string& attention) {
  return strategy_from(inventory_of(checkpoint.transformer), attention,
                       checkpoint.attention_strategy ? &*checkpoint.attention_strategy : nullptr);
}

}  // namespace orrery
