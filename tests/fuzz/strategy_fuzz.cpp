// Any bytes as a strategy: run time, checkpoint and both. Only orrery::Error may come out, and what
// resolves must answer for every step, layer and role.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "attention/describe.h"
#include "attention/method.h"
#include "attention/strategy.h"
#include "orrery/error.h"

namespace {

void use(const orrery::AttentionStrategy& strategy) {
  for (int steps : {1, 7}) {
    for (int step = 0; step < steps; ++step) {
      const int layout = strategy.layout_at(step, steps);
      for (int layer = 0; layer < strategy.inventory().num_layers; ++layer) {
        for (orrery::AttentionRole role : strategy.inventory().roles) {
          const bool dense = strategy.method(layout, layer, role).is_dense();
          // The causal text tower is dense, or the strategy should have been refused.
          if (!dense && orrery::is_invariant(role)) std::abort();
        }
      }
    }
  }
  if (orrery::describe(strategy, {}, 7).empty()) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  orrery::AttentionInventory inventory;
  inventory.num_layers = 36;
  inventory.roles = {orrery::AttentionRole::und, orrery::AttentionRole::gen,
                     orrery::AttentionRole::gen_multi_control};
  orrery::Json json;
  try {
    json = orrery::Json::parse({reinterpret_cast<const char*>(data), size}, "strategy");
  } catch (const orrery::Error&) {
    return 0;
  }
  for (int use_as : {1, 2, 3}) {
    try {
      use(orrery::AttentionStrategy::resolve(inventory, use_as & 1 ? &json : nullptr,
                                             use_as & 2 ? &json : nullptr));
    } catch (const orrery::Error&) {
    }
  }
  return 0;
}
