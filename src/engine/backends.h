// From options to objects: the backend, its activation type and the attention strategy.
#pragma once

#include <memory>
#include <string>

#include "attention/strategy.h"
#include "backend/backend.h"
#include "engine/settings.h"
#include "orrery/engine.h"

namespace orrery {

std::unique_ptr<Backend> make_backend(const EngineOptions& options);
// fp32 on the CPU and bf16 on a device, unless the options say otherwise.
DType activation_type(const EngineOptions& options, const Backend& backend);

AttentionInventory inventory_of(const TransformerConfig& config);
// `attention`: JSON text, a file, "dense", or empty; `checkpoint`: the strategy it carries, or null.
AttentionStrategy strategy_from(const AttentionInventory& inventory, const std::string& attention,
                                const Json* checkpoint);
AttentionStrategy strategy_of(const Checkpoint& checkpoint, const std::string& attention);

}  // namespace orrery
