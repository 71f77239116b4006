// The recipes of this repository: every file loads for the model it is named after.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <set>

#include "attention/method.h"
#include "attention/strategy.h"
#include "attention/test_call.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

constexpr AttentionRole kRoles[] = {AttentionRole::und, AttentionRole::gen,
                                    AttentionRole::gen_multi_control};

struct Model {
  int layers;
  std::set<int> dense_layers;   // of the mixed layout
  std::set<std::string> extra;  // kinds that not every model has
};
const std::set<std::string> kShared = {"static-sparse-shared", "mixed-layers-shared"};
const std::map<std::string, Model> kModels = {
    {"nano", {36, {1, 2, 15, 30, 31, 32, 33, 34}, kShared}},
    {"super", {64, {0, 1, 2, 3, 60, 61, 62, 63}, kShared}},
    {"pico", {8, {0, 7}, {"dense-to-sparse-tiled"}}},
};

// {first step that may be sparse, first step that is dense again} of `steps`, and sparse layers.
struct Expected {
  double begin, end;
  bool all_layers;
  bool is_extra = false;
  bool shares_lists = false;
  int64_t tile = 1;  // tokens of the token order's tiles
};
const std::map<std::string, Expected> kKinds = {
    {"static-sparse", {0, 1, true}},
    {"dense-to-sparse", {0.3, 1, true}},
    {"mixed-layers", {0.3, 1, false}},
    {"dense-mixed-dense", {0.3, 0.8, false}},
    {"static-sparse-shared", {0, 1, true, true, true}},
    {"mixed-layers-shared", {0.3, 1, false, true, true}},
    {"dense-to-sparse-tiled", {0.3, 1, true, true, false, 16}},
};

TEST(Recipes, EveryFileResolvesToWhatItsNameSays) {
  const auto folder = source_dir() / "recipes/attention";
  std::set<std::string> found;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    found.insert(file.path().filename().string());
  }
  for (const auto& [model, shape] : kModels) {
    for (const auto& [kind, want] : kKinds) {
      if (want.is_extra && !shape.extra.contains(kind)) continue;
      const std::string name = model + "-" + kind + ".json";
      ASSERT_EQ(found.erase(name), 1u) << name << " is missing";
      const Json json = Json::load(folder / name);
      const AttentionInventory inventory = testing::inventory(shape.layers);
      const AttentionStrategy strategy = AttentionStrategy::resolve(inventory, &json, nullptr);
      EXPECT_EQ(strategy.source(), "runtime");
      const auto& tile = strategy.token_order().tile;
      EXPECT_EQ(tile[0] * tile[1] * tile[2], want.tile) << name;
      for (int steps : {1, 4, 10, 35, 50}) {
        for (int step = 0; step < steps; ++step) {
          const int layout = strategy.layout_at(step, steps);
          const bool sparse_step =
              step >= std::ceil(want.begin * steps) && step < std::ceil(want.end * steps);
          for (int layer = 0; layer < shape.layers; ++layer) {
            for (AttentionRole role : kRoles) {
              const bool sparse = sparse_step && role == AttentionRole::gen &&
                                  (want.all_layers || !shape.dense_layers.count(layer));
              const AttentionMethod& method = strategy.method(layout, layer, role);
              ASSERT_EQ(method.is_dense(), !sparse) << name << ": step " << step << " of " << steps
                                                    << ", layer " << layer << ", " << name_of(role);
              ASSERT_EQ(method.needs_whole_groups(), sparse && want.shares_lists) << name;
            }
          }
        }
      }
    }
  }
  EXPECT_TRUE(found.empty()) << *found.begin() << " is not known to this test";
}

// The published mixed recipe, written out: sparse exactly when step >= 10, role cosmos3.gen and the
// layer is not among the eight dense ones.
TEST(Recipes, TheMixedScheduleOfTenDenseSteps) {
  const AttentionStrategy strategy = testing::strategy_of(
      R"({"presets": {"fa3_dense": {"backend": "FLASH_ATTN"}, "fa4_subblock": )" +
          testing::block_sparse(R"({"name": "block_topk", "config": {"target_sparsity": 0.75}})",
                                "FLASH_ATTN", 64, 64) +
          R"(}, "layouts": {"dense": {"default": "fa3_dense"}, "mixed": {"default": )"
          R"("fa4_subblock", "overrides": [{"attention_role": "cosmos3.und", "use": "fa3_dense"}, )"
          R"({"attention_role": "cosmos3.gen_multi_control", "use": "fa3_dense"}, {"layers": )"
          R"([1, 2, 15, 30, 31, 32, 33, 34], "attention_role": "cosmos3.gen", "use": )"
          R"("fa3_dense"}]}}, "schedule": {"coordinate": "step_index", "phases": )"
          R"([{"until": 10, "layout": "dense"}, {"until": null, "layout": "mixed"}]}})",
      36);
  for (int steps : {4, 10, 11, 35, 50}) {
    for (int step = 0; step < steps; ++step) {
      const int layout = strategy.layout_at(step, steps);
      for (int layer = 0; layer < 36; ++layer) {
        for (AttentionRole role : kRoles) {
          const bool sparse = step >= 10 && role == AttentionRole::gen &&
                              !kModels.at("nano").dense_layers.count(layer);
          ASSERT_EQ(strategy.preset_name(layout, layer, role),
                    sparse ? "fa4_subblock" : "fa3_dense")
              << "step " << step << " of " << steps << ", layer " << layer;
        }
      }
    }
  }
}

}  // namespace
}  // namespace orrery
