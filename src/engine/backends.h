// From options to objects: the backend, its activation type and the attention strategy.
#pragma once

#include <memory>
#include <string>

#include "attention/strategy.h"
#include "backend/backend.h"
#include "backend/timeline.h"
#include "dist/communicator.h"
#include "engine/settings.h"
#include "orrery/engine.h"

namespace orrery {

std::unique_ptr<Backend> make_backend(const EngineOptions& options);
// CPU threads that the options come to.
int cpu_threads(const EngineOptions& options);
// The device `index` places after `device` ("cuda" after 2: "cuda:2"); "cpu" is the same
// everywhere.
std::string device_after(const std::string& device, int index);
// The group of `host` for memory of this backend: `host` itself for host memory. Collective.
// `part_rows` of a device's group, 0: its own choice.
std::unique_ptr<Communicator> make_communicator(std::unique_ptr<Communicator> host,
                                                const Backend& backend, int64_t part_rows);
// For the work of a device's backend and its communicators, on the thread that queues it.
std::unique_ptr<Timeline> make_timeline(const Backend& backend);
// fp32 on the CPU and bf16 on a device, unless the options say otherwise.
DType activation_type(const EngineOptions& options, const Backend& backend);

// The noise that is drawn; never automatic.
NoiseType noise_type(NoiseType asked, DType activations);

// Bytes that an allocation on this backend could have now: of its device, or of the host's memory
// the share of one of the `ranks` of this process. The largest number when that is not known.
int64_t available_memory(const Backend& backend, int64_t ranks);
int64_t available_host_memory();

AttentionInventory inventory_of(const TransformerConfig& config);
// `attention`: JSON text, a file, "dense", or empty; `checkpoint`: the strategy it carries, or
// null.
AttentionStrategy strategy_from(const AttentionInventory& inventory, const std::string& attention,
                                const Json* checkpoint);
AttentionStrategy strategy_of(const Checkpoint& checkpoint, const std::string& attention);

}  // namespace orrery
