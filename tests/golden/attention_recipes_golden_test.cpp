// Published strategy files load unchanged, and the resolved table is what a plain reading of each
// file gives, at every step, layer and role.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "attention/method.h"
#include "attention/strategy.h"
#include "golden/golden.h"

namespace orrery {
namespace {

constexpr AttentionRole kRoles[] = {AttentionRole::und, AttentionRole::gen,
                                    AttentionRole::gen_multi_control};
constexpr int kNanoLayers = 36;

std::vector<std::filesystem::path> recipes() {
  std::vector<std::filesystem::path> files;
  std::error_code none;
  for (const auto& entry :
       std::filesystem::directory_iterator(golden::directory() / "attention_recipes", none)) {
    if (entry.path().extension() == ".json") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

// Layers that a file speaks of must exist.
int num_layers(const Json& json) {
  int64_t count = kNanoLayers;
  const auto visit = [&](const auto& self, const Json& value) -> void {
    if (value.is_array()) {
      for (const Json& item : value.items()) self(self, item);
    }
    if (!value.is_object()) return;
    for (const auto& [key, member] : value.members()) {
      if (key == "layers") {
        for (const Json& layer : member.items()) count = std::max(count, layer.as_int() + 1);
      } else {
        self(self, member);
      }
    }
  };
  visit(visit, json);
  return static_cast<int>(count);
}

// The layout that a plain reading of the schedule gives, or the static one.
const Json& layout_of(const Json& json, int step, int steps) {
  if (const Json* fixed = json.find("layout")) return *fixed;
  const bool fraction = json.at("schedule").at("coordinate").as_string() == "step_fraction";
  for (const Json& phase : json.at("schedule").at("phases").items()) {
    const Json& until = phase.at("until");
    const double end = until.is_null() ? steps
                       : fraction      ? std::ceil(until.as_double() * steps)
                                       : until.as_double();
    if (step < end) return json.at("layouts").at(phase.at("layout").as_string());
  }
  ADD_FAILURE() << "no phase holds step " << step;
  return json;
}

// METHOD of one call by a plain reading.
const Json& method_of(const Json& json, int step, int steps, int layer, AttentionRole role) {
  const std::string name(name_of(role));
  if (!json.has("presets")) {
    const Json* own = json.has("per_role") ? json.at("per_role").find(name) : nullptr;
    return own ? *own : json.at("default");
  }
  const Json& layout = layout_of(json, step, steps);
  std::string preset = layout.at("default").as_string();
  if (const Json* overrides = layout.find("overrides")) {
    for (const Json& rule : overrides->items()) {
      const Json* layers = rule.find("layers");
      const bool at_layer = layers == nullptr ||
                            std::any_of(layers->items().begin(), layers->items().end(),
                                        [&](const Json& item) { return item.as_int() == layer; });
      const Json* wanted = rule.find("attention_role");
      if (at_layer && (wanted == nullptr || wanted->as_string() == name)) {
        preset = rule.at("use").as_string();
      }
    }
  }
  return json.at("presets").at(preset);
}

TEST(AttentionRecipes, LoadUnchangedAndResolveAsTheyRead) {
  ORRERY_SKIP_WITHOUT("attention_recipes");
  ASSERT_FALSE(recipes().empty());
  for (const auto& file : recipes()) {
    const Json json = Json::load(file);
    AttentionInventory inventory;
    inventory.num_layers = num_layers(json);
    inventory.roles = {std::begin(kRoles), std::end(kRoles)};
    const AttentionStrategy strategy = AttentionStrategy::resolve(inventory, &json, nullptr);
    EXPECT_EQ(strategy.source(), "runtime") << file;
    for (int steps : {4, 10, 11, 35, 50}) {
      for (int step = 0; step < steps; ++step) {
        const int layout = strategy.layout_at(step, steps);
        for (int layer = 0; layer < inventory.num_layers; ++layer) {
          for (AttentionRole role : kRoles) {
            const Json& want = method_of(json, step, steps, layer, role);
            const AttentionMethod& got = strategy.method(layout, layer, role);
            const bool sparse = want.is_object() && want.has("name");
            ASSERT_EQ(got.is_dense(), !sparse)
                << file << ": step " << step << " of " << steps << ", layer " << layer;
            if (sparse) {
              const Json& size = want.at("config").at("block_size");
              EXPECT_NE(got.description().find(std::to_string(size.at(size_t{0}).as_int()) + "x" +
                                               std::to_string(size.at(size_t{1}).as_int())),
                        std::string::npos);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace orrery
