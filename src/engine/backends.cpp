// The composition root: the only file that names backends.
#include "engine/backends.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

#include "base/cores.h"
#include "base/error.h"
#include "cpu/cpu_backend.h"
#include "cuda/cuda_backend.h"
#include "dist/nccl_comm.h"

namespace orrery {

namespace {

// "auto" is CUDA where this build has it.
std::string chosen(const std::string& device) {
  if (device != "auto") return device;
  return cuda::is_cuda_built() ? "cuda" : "cpu";
}

// The number of "cuda" or "cuda:N"; empty for anything else.
std::optional<int> cuda_index(const std::string& device) {
  if (device == "cuda") return 0;
  if (!device.starts_with("cuda:")) return std::nullopt;
  const std::string number = device.substr(5);
  const bool is_number = !number.empty() && number.size() < 4 &&
                         number.find_first_not_of("0123456789") == std::string::npos;
  require(is_number, "device \"", device, "\": expected a number after the colon, as in cuda:0");
  return std::stoi(number);
}

}  // namespace

std::unique_ptr<Backend> make_backend(const EngineOptions& options) {
  const std::string device = chosen(options.device);
  cpu::CpuOptions cpu_options;
  cpu_options.num_threads = cpu_threads(options);
  if (device == "cpu") return cpu::make_cpu_backend(cpu_options);
  if (const std::optional<int> index = cuda_index(device)) return cuda::make_cuda_backend({*index});
  fail(ErrorKind::invalid_argument, "device \"", options.device,
       "\" is not known; it is cpu, cuda, cuda:N or auto");
}

int cpu_threads(const EngineOptions& options) {
  constexpr int kMaxThreads = 1024;
  require(options.num_threads >= 0 && options.num_threads <= kMaxThreads, "num_threads is ",
          options.num_threads, "; it is 0 (all cores) to ", kMaxThreads);
  if (options.num_threads == 0) return cpu::default_threads();
  const int cores = usable_cores();
  if (options.num_threads > cores && options.log) {
    options.log(concat("num_threads ", options.num_threads, " is more than the ", cores,
                       " cores that this process may use: ", cores, " threads run"));
  }
  return std::min(options.num_threads, cores);
}

std::string device_after(const std::string& device, int index) {
  const std::optional<int> first = cuda_index(chosen(device));
  return first ? concat("cuda:", *first + index) : device;
}

std::unique_ptr<Communicator> make_communicator(std::unique_ptr<Communicator> host,
                                                const Backend& backend, int64_t part_rows) {
  if (backend.device() == DeviceKind::cpu) return host;
  const cuda::Place place = cuda::place_of(backend);
  NcclDevice device;
  device.device = place.device;
  device.compute = place.stream;
  device.link = place.link;
  if (part_rows > 0) device.part_rows = part_rows;
  return make_nccl_communicator(std::move(host), device);
}

std::unique_ptr<Timeline> make_timeline(const Backend& backend) {
  require(backend.device() == DeviceKind::cuda, ErrorKind::unsupported,
          "a timeline shows what overlaps on a device; ", backend.description(), " queues nothing");
  return cuda::make_timeline(backend);
}

DType activation_type(const EngineOptions& options, const Backend& backend) {
  if (options.dtype == ComputeType::fp32) return DType::f32;
  if (options.dtype == ComputeType::bf16) return DType::bf16;
  return backend.device() == DeviceKind::cpu ? DType::f32 : DType::bf16;
}

NoiseType noise_type(NoiseType asked, DType activations) {
  if (asked != NoiseType::automatic) return asked;
  return activations == DType::bf16 ? NoiseType::bf16 : NoiseType::fp32;
}

int64_t available_memory(const Backend& backend, int64_t ranks) {
  const MemoryState memory = backend.memory();
  return memory.total > 0 ? memory.free : available_host_memory() / ranks;
}

int64_t available_host_memory() {
  constexpr int64_t kUnknown = std::numeric_limits<int64_t>::max();
  std::ifstream info("/proc/meminfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("MemAvailable:")) return std::stoll(line.substr(13)) * 1024;
  }
  return kUnknown;
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
