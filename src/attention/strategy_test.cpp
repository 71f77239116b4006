#include "attention/strategy.h"

#include <gtest/gtest.h>

#include <optional>

#include "attention/describe.h"
#include "attention/method.h"
#include "attention/warm_up.h"
#include "base/error.h"

namespace orrery {
namespace {

AttentionInventory inventory(int layers = 4) {
  AttentionInventory all;
  all.num_layers = layers;
  all.roles = {AttentionRole::und, AttentionRole::gen, AttentionRole::gen_multi_control};
  return all;
}

AttentionStrategy resolve(const std::string& runtime, const std::string& checkpoint = "",
                          int layers = 4) {
  std::optional<Json> given, stored;
  if (!runtime.empty()) given = Json::parse(runtime, "run.json");
  if (!checkpoint.empty()) stored = Json::parse(checkpoint, "config.json");
  return AttentionStrategy::resolve(inventory(layers), given ? &*given : nullptr,
                                    stored ? &*stored : nullptr);
}

// The message of the refusal; "" when there was none.
std::string refusal(const std::string& runtime, const std::string& checkpoint = "") {
  try {
    resolve(runtime, checkpoint);
  } catch (const Error& error) {
    EXPECT_TRUE(error.kind() == ErrorKind::invalid_argument || error.kind() == ErrorKind::corrupt);
    return error.what();
  }
  return "";
}

// A strategy of the presets d (dense) and s (sparse) with the given rest.
std::string with_presets(const std::string& rest) {
  return R"({"presets": {"d": "FLASH_ATTN", "s": {"name": "block_sparse", "config": {)"
         R"("block_size": [64, 64], "selection": {"name": "block_topk"}}}}, )" +
         rest + "}";
}
std::string with_layout(const std::string& layout) {
  return with_presets(R"("layout": )" + layout);
}
std::string with_phases(const std::string& coordinate, const std::string& phases) {
  return with_presets(R"("layouts": {"a": {"default": "d"}, "b": {"default": "d"}}, "schedule": )"
                      R"({"coordinate": ")" +
                      coordinate + R"(", "phases": )" + phases + "}");
}
std::string with_method(const std::string& method) {
  return R"({"presets": {"p": )" + method + R"(}, "layout": {"default": "p"}})";
}
std::string with_sparse(const std::string& config) {
  return R"({"presets": {"d": "native", "p": {"name": "block_sparse", "config": )" + config +
         R"(}}, "layout": {"default": "d", "overrides": [{"attention_role": "cosmos3.gen", )"
         R"("use": "p"}]}})";
}
std::string with_selection(const std::string& selection) {
  return with_sparse(R"({"block_size": [64, 64], "selection": )" + selection + "}");
}

struct BadCase {
  const char* name;
  std::string document;
  const char* message;
};

class BadStrategy : public testing::TestWithParam<BadCase> {};

TEST_P(BadStrategy, IsRefusedAtItsPlace) {
  const std::string message = refusal(GetParam().document);
  EXPECT_NE(message.find(GetParam().message), std::string::npos)
      << "got \"" << message << "\", expected \"" << GetParam().message << "\" in it";
}

const BadCase kBadDocuments[] = {
    // Rule 1.
    {"NoPresets", R"({"presets": {}})", "run.json: presets: expected at least one preset"},
    {"LayoutWithoutPresets", R"({"layout": {"default": "d"}})",
     "run.json: a layout needs at least one preset"},
    {"LayoutAndLayouts",
     with_presets(R"("layout": {"default": "d"}, "layouts": {"a": {"default": "d"}})"),
     "run.json: layout (static) excludes layouts and schedule"},
    {"LayoutAndSchedule",
     with_presets(R"("layout": {"default": "d"}, "schedule": {"coordinate": "step_index"})"),
     "run.json: layout (static) excludes layouts and schedule"},
    {"LayoutsWithoutSchedule", with_presets(R"("layouts": {"a": {"default": "d"}})"),
     "layouts and schedule come together, but schedule is missing"},
    {"ScheduleWithoutLayouts",
     with_presets(R"("schedule": {"coordinate": "step_index", "phases": []})"),
     "layouts and schedule come together, but layouts is missing"},
    {"StrategyAndDefault", with_presets(R"("default": "native")"),
     "default and per_role (the simple form) exclude presets"},
    {"StrategyAndPerRole", with_presets(R"("per_role": {"cosmos3.gen": "native"})"),
     "default and per_role (the simple form) exclude presets"},
    // Rule 2.
    {"UnknownTopKey", R"({"default": "native", "presests": {}})",
     "run.json: unknown key \"presests\"; an attention configuration takes presets, layout"},
    {"UnknownLayoutKey", with_layout(R"({"default": "d", "overides": []})"),
     "run.json: layout: unknown key \"overides\""},
    {"UnknownOverrideKey",
     with_layout(R"({"default": "d", "overrides": [{"layer": [1], "use": "d"}]})"),
     "run.json: layout.overrides[0]: unknown key \"layer\""},
    {"UnknownScheduleKey",
     with_presets(R"("layouts": {"a": {"default": "d"}}, "schedule": {"coordinate": "step_index", )"
                  R"("phase": []})"),
     "run.json: schedule: unknown key \"phase\""},
    {"UnknownPhaseKey", with_phases("step_index", R"([{"until": null, "layout": "a", "x": 1}])"),
     "run.json: schedule.phases[0]: unknown key \"x\""},
    {"UnknownDenseKey", with_method(R"({"backend": "native", "speed": 9})"),
     "run.json: presets.p: unknown key \"speed\"; a dense method takes backend, implementation"},
    {"UnknownMethodKey",
     with_method(R"({"name": "block_sparse", "config": {}, "backend": "native"})"),
     "run.json: presets.p: unknown key \"backend\"; a named method takes name, config"},
    {"UnknownSparseKey",
     with_sparse(R"({"block_size": [64, 64], "selection": {"name": "block_topk"}, "heads": 1})"),
     "run.json: presets.p.config: unknown key \"heads\""},
    {"UnknownSelectionKey", with_selection(R"({"name": "block_topk", "top": 1})"),
     "run.json: presets.p.config.selection: unknown key \"top\""},
    {"UnknownSelectionConfigKey",
     with_selection(R"({"name": "block_topk", "config": {"sparsity": 0.5}})"),
     "run.json: presets.p.config.selection.config: unknown key \"sparsity\""},
    {"UnknownPreset", with_layout(R"({"default": "x"})"),
     "run.json: layout.default: no preset has this name, found \"x\""},
    {"UnknownOverridePreset", with_layout(R"({"default": "d", "overrides": [{"use": "x"}]})"),
     "run.json: layout.overrides[0].use: no preset has this name"},
    {"UnknownLayout", with_phases("step_index", R"([{"until": null, "layout": "c"}])"),
     "run.json: schedule.phases[0].layout: no layout has this name, found \"c\""},
    {"EmptyPresetName", R"({"presets": {"": "native"}, "layout": {"default": ""}})",
     "run.json: presets: a preset has an empty name"},
    {"EmptyLayoutName",
     with_presets(R"("layouts": {"": {"default": "d"}}, "schedule": {"coordinate": "step_index", )"
                  R"("phases": [{"until": null, "layout": ""}]})"),
     "run.json: layouts: a layout has an empty name"},
    {"EmptyUse", with_layout(R"({"default": ""})"), "layout.default: expected a preset's name"},
    {"EmptyRole",
     with_layout(R"({"default": "d", "overrides": [{"attention_role": "", "use": "d"}]})"),
     "layout.overrides[0].attention_role: expected attention_role"},
    {"EmptyPerRole", R"({"per_role": {"": "native"}})", "per_role: a role has an empty name"},
    {"EmptyProvider", with_method(R"("")"), "run.json: presets.p: expected a provider"},
    {"NoLayouts",
     with_presets(R"("layouts": {}, "schedule": {"coordinate": "step_index", "phases": []})"),
     "run.json: layouts: expected at least one layout"},
    {"MissingDefault", with_layout(R"({"overrides": []})"),
     "run.json: layout: the key \"default\" is missing"},
    {"MissingUse", with_layout(R"({"default": "d", "overrides": [{"layers": [1]}]})"),
     "run.json: layout.overrides[0]: the key \"use\" is missing"},
    {"NotAnObject", "[1]", "run.json: expected an attention configuration as an object"},
    {"PolicyUnknown", R"({"checkpoint_policy": "maybe"})",
     "run.json: checkpoint_policy: expected \"use\" or \"ignore\", found \"maybe\""},
    // Rule 3.
    {"LayersEmpty", with_layout(R"({"default": "d", "overrides": [{"layers": [], "use": "s"}]})"),
     "run.json: layout.overrides[0].layers: expected layers as a list that is not empty"},
    {"LayersTwice",
     with_layout(R"({"default": "d", "overrides": [{"layers": [2, 1, 2], "use": "s"}]})"),
     "layout.overrides[0].layers[2]: the layer stands in the list twice"},
    {"LayersNegative",
     with_layout(R"({"default": "d", "overrides": [{"layers": [-1], "use": "s"}]})"),
     "layout.overrides[0].layers[0]: expected a layer"},
    {"LayersTrue",
     with_layout(R"({"default": "d", "overrides": [{"layers": [true], "use": "s"}]})"),
     "layers[0]: expected a layer as an integer from 0 to 1000000, found true"},
    {"LayersFraction",
     with_layout(R"({"default": "d", "overrides": [{"layers": [1.0], "use": "s"}]})"),
     "layers[0]: expected a layer as an integer"},
    {"LayersNumber", with_layout(R"({"default": "d", "overrides": [{"layers": 1, "use": "s"}]})"),
     "layout.overrides[0].layers: expected layers as a list"},
    // Rule 4.
    {"Overlap",
     with_layout(R"({"default": "d", "overrides": [{"layers": [1, 2], "use": "d"}, )"
                 R"({"attention_role": "cosmos3.gen", "layers": [2, 3], "use": "s"}]})"),
     "run.json: layout.overrides[1]: overlapping overrides: run.json: layout.overrides[0] matches "
     "cosmos3.gen of layer 2 too"},
    {"OverlapThatAgrees",
     with_layout(R"({"default": "d", "overrides": [{"layers": [1], "use": "d"}, )"
                 R"({"layers": [1], "use": "d"}]})"),
     "overlapping"},
    {"UnknownRole",
     with_layout(R"({"default": "d", "overrides": [{"attention_role": "gen", "use": "s"}]})"),
     "layout.overrides[0]: no operation of this model has the role \"gen\"; it has cosmos3.und, "
     "cosmos3.gen, cosmos3.gen_multi_control"},
    {"UnknownPerRole", R"({"per_role": {"cosmos2.gen": "native"}})",
     "per_role: no operation of this model has the role \"cosmos2.gen\""},
    {"UnknownComponent",
     with_layout(R"({"default": "d", "overrides": [{"component": "vae", "use": "s"}]})"),
     "layout.overrides[0]: no operation of this model belongs to the component \"vae\"; it has "
     "transformer"},
    {"LayerBeyondTheModel",
     with_layout(R"({"default": "d", "overrides": [{"layers": [4], "use": "d"}]})"),
     "layout.overrides[0]: layer 4 does not exist; this model has layers 0 to 3"},
    // Rule 5.
    {"CoordinateUnknown", with_phases("sigma", R"([{"until": null, "layout": "a"}])"),
     "schedule.coordinate: expected step_index or step_fraction, found \"sigma\""},
    {"PhasesEmpty", with_phases("step_index", "[]"),
     "schedule.phases: expected phases as a list that is not empty"},
    {"IndexFromZero",
     with_phases("step_index", R"([{"until": 0, "layout": "a"}, {"until": null, "layout": "b"}])"),
     "schedule.phases[0].until: boundaries must grow from 0: expected more than 0"},
    {"IndexFalls",
     with_phases("step_index", R"([{"until": 5, "layout": "a"}, {"until": 5, "layout": "b"}, )"
                               R"({"until": null, "layout": "a"}])"),
     "schedule.phases[1].until: boundaries must grow from 0: expected more than 5"},
    {"IndexLastIsNumber", with_phases("step_index", R"([{"until": 5, "layout": "a"}])"),
     "schedule.phases[0].until: expected null"},
    {"IndexNullEarly",
     with_phases("step_index",
                 R"([{"until": null, "layout": "a"}, {"until": null, "layout": "b"}])"),
     "schedule.phases[0].until: expected a step: only the last phase ends with null"},
    {"IndexFraction",
     with_phases("step_index",
                 R"([{"until": 1.5, "layout": "a"}, {"until": null, "layout": "b"}])"),
     "schedule.phases[0].until: expected until as an integer"},
    {"IndexTrue",
     with_phases("step_index",
                 R"([{"until": true, "layout": "a"}, {"until": null, "layout": "b"}])"),
     "expected until as an integer from 0 to 2147483647, found true"},
    {"FractionAboveOne", with_phases("step_fraction", R"([{"until": 1.5, "layout": "a"}])"),
     "schedule.phases[0].until: expected a fraction in (0, 1], found 1.5"},
    {"FractionZero",
     with_phases("step_fraction", R"([{"until": 0, "layout": "a"}, {"until": 1, "layout": "b"}])"),
     "schedule.phases[0].until: expected a fraction in (0, 1], found 0"},
    {"FractionTrue", with_phases("step_fraction", R"([{"until": true, "layout": "a"}])"),
     "schedule.phases[0].until: expected until as a finite number, found true"},
    {"FractionNull", with_phases("step_fraction", R"([{"until": null, "layout": "a"}])"),
     "expected until as a finite number, found null"},
    {"FractionFalls",
     with_phases("step_fraction",
                 R"([{"until": 0.5, "layout": "a"}, )"
                 R"({"until": 0.25, "layout": "b"}, {"until": 1, "layout": "a"}])"),
     "schedule.phases[1].until: boundaries must grow from 0: expected more than 0.5"},
    {"FractionEndsEarly", with_phases("step_fraction", R"([{"until": 0.9, "layout": "a"}])"),
     "schedule.phases[0].until: the last phase of a step_fraction schedule ends at 1, found 0.9"},
    // Rule 7.
    {"InvarianceBroken",
     R"({"presets": {"d": "FLASH_ATTN", "e": "native"}, "layouts": {"a": {"default": "d"}, )"
     R"("b": {"default": "e"}}, "schedule": {"coordinate": "step_index", "phases": )"
     R"([{"until": 2, "layout": "a"}, {"until": null, "layout": "b"}]}})",
     "run.json: layouts.b: cosmos3.und of layer 0 uses the preset \"e\" here but \"d\" in the "
     "layout \"a\""},
    // Rule 10.
    {"SparsityOne", with_selection(R"({"name": "block_topk", "config": {"target_sparsity": 1}})"),
     "presets.p.config.selection.config.target_sparsity: expected target_sparsity in [0, 1), found "
     "1"},
    {"SparsityNegative",
     with_selection(R"({"name": "block_topk", "config": {"target_sparsity": -0.1}})"),
     "expected target_sparsity in [0, 1), found -0.1"},
    {"SparsityFalse",
     with_selection(R"({"name": "block_topk", "config": {"target_sparsity": false}})"),
     "expected target_sparsity as a finite number, found false"},
    {"SparsityText",
     with_selection(R"({"name": "block_topk", "config": {"target_sparsity": "0.5"}})"),
     "expected target_sparsity as a finite number, found \"0.5\""},
    {"ShareOne", with_selection(R"({"name": "block_topk", "config": {"share_kv_group": 1}})"),
     "selection.config.share_kv_group: expected share_kv_group as true or false, found 1"},
    {"BlockNotPowerOfTwo",
     with_sparse(R"({"block_size": [48, 64], "selection": {"name": "block_topk"}})"),
     "presets.p.config.block_size[0]: expected query rows of a block as a power of two from 16 to "
     "2048, found 48"},
    {"BlockTooSmall",
     with_sparse(R"({"block_size": [64, 8], "selection": {"name": "block_topk"}})"),
     "presets.p.config.block_size[1]: expected keys of a block as an integer from 16 to 2048, "
     "found 8"},
    {"BlockTooLarge",
     with_sparse(R"({"block_size": [4096, 64], "selection": {"name": "block_topk"}})"),
     "found 4096"},
    {"BlockBoolean",
     with_sparse(R"({"block_size": [true, 64], "selection": {"name": "block_topk"}})"),
     "found true"},
    {"BlockOne", with_sparse(R"({"block_size": [64], "selection": {"name": "block_topk"}})"),
     "presets.p.config.block_size: expected two numbers"},
    {"BlockMissing", with_sparse(R"({"selection": {"name": "block_topk"}})"),
     "presets.p.config: the key \"block_size\" is missing"},
    {"SelectionMissing", with_sparse(R"({"block_size": [64, 64]})"),
     "presets.p.config: the key \"selection\" is missing"},
    // Rule 11.
    {"SparseText", with_layout(R"({"default": "s"})"),
     "run.json: layout: cosmos3.und of layer 0 is causal, but the preset \"s\" is block-sparse"},
    // Methods.
    {"ProviderUnknown", with_method(R"("fa3")"),
     "run.json: presets.p: unknown provider; there are FLASH_ATTN, TORCH_SDPA, CUDNN_ATTN, native, "
     "cudnn, reference, found \"fa3\""},
    {"ProviderNumber", with_method("3"), "run.json: presets.p: expected a method"},
    {"MethodUnknown", with_method(R"({"name": "radial", "config": {}})"),
     "run.json: presets.p.name: unknown method"},
    {"SelectionUnknown", with_selection(R"({"name": "radial", "config": {}})"),
     "selection.name: unknown selection; there are block_topk, sliding_tile and threshold"},
    {"ImplementationUnknown", with_method(R"({"backend": "FLASH_ATTN", "implementation": "fa3"})"),
     "presets.p.implementation: expected auto, native, cudnn or reference, found \"fa3\""},
    {"ImplementationContradicts",
     with_method(R"({"backend": "native", "implementation": "cudnn"})"),
     "presets.p.implementation: contradicts the provider native"},
    {"ReuseZero", with_selection(R"({"name": "block_topk", "reuse_steps": 0})"),
     "selection.reuse_steps: expected reuse_steps as an integer from 1 to 1000, found 0"},
    {"ReuseOfAWindow",
     with_selection(
         R"({"name": "sliding_tile", "config": {"window": [1, 3, 3]}, "reuse_steps": 2})"),
     "selection.reuse_steps: a sliding_tile window never depends on the data"},
    {"WindowEven", with_selection(R"({"name": "sliding_tile", "config": {"window": [1, 2, 3]}})"),
     "selection.config.window[1]: expected an odd extent"},
    {"WindowMissing", with_selection(R"({"name": "sliding_tile", "config": {}})"),
     "selection.config: the key \"window\" is missing"},
    {"WindowConfigMissing", with_selection(R"({"name": "sliding_tile"})"),
     "selection: the key \"config\" is missing"},
    {"MassZero", with_selection(R"({"name": "threshold", "config": {"mass": 0}})"),
     "selection.config.mass: expected mass in (0, 1], found 0"},
    {"MassAboveOne", with_selection(R"({"name": "threshold", "config": {"mass": 1.01}})"),
     "expected mass in (0, 1], found 1.01"},
    {"TokenOrderZero", R"({"token_order": [4, 0, 4]})",
     "run.json: token_order[1]: expected a tile extent as an integer from 1 to 1024, found 0"},
    {"TokenOrderTwo", R"({"token_order": [4, 4]})",
     "run.json: token_order: expected token_order as three tile extents"},
};

INSTANTIATE_TEST_SUITE_P(Rules, BadStrategy, testing::ValuesIn(kBadDocuments),
                         [](const auto& param) { return std::string(param.param.name); });

TEST(Strategy, DuplicateKeysAreRefusedByTheParser) {
  EXPECT_NE(refusal(R"({"default": "native", "default": "reference"})"), "");
}

TEST(Strategy, SparseNeedsWholeHeadGroups) {
  AttentionInventory odd = inventory();
  odd.num_heads = 7;
  odd.num_kv_heads = 2;
  const Json sparse = Json::parse(
      with_layout(
          R"({"default": "d", "overrides": [{"attention_role": "cosmos3.gen", "use": "s"}]})"),
      "run.json");
  try {
    AttentionStrategy::resolve(odd, &sparse, nullptr);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("query heads (7) divisible by key/value heads (2)"),
              std::string::npos);
  }
}

// Rule 6: what no phase names is not even looked at.
TEST(Strategy, UnusedLayoutsNeitherConstrainNorPrepare) {
  const AttentionStrategy strategy = resolve(with_presets(
      R"("layouts": {"a": {"default": "d"}, "broken": {"default": "nobody", "overrides": 3}, )"
      R"("sparse": {"default": "s"}}, "schedule": {"coordinate": "step_index", "phases": )"
      R"([{"until": null, "layout": "a"}]})"));
  EXPECT_EQ(strategy.num_layouts(), 1);
  EXPECT_EQ(strategy.layout_name(0), "a");
  EXPECT_EQ(strategy.warm_up_targets({AttentionRole::gen}).size(), 1u);
}

// Rule 3: a missing selector matches all.
TEST(Strategy, MissingSelectorsMatchAll) {
  const AttentionStrategy by_layer = resolve(with_layout(
      R"({"default": "d", "overrides": [{"attention_role": "cosmos3.gen", "use": "s"}]})"));
  for (int layer = 0; layer < 4; ++layer) {
    EXPECT_EQ(by_layer.preset_name(0, layer, AttentionRole::gen), "s");
    EXPECT_EQ(by_layer.preset_name(0, layer, AttentionRole::und), "d");
    EXPECT_EQ(by_layer.preset_name(0, layer, AttentionRole::gen_multi_control), "d");
  }
  const AttentionStrategy everything = resolve(
      R"({"presets": {"d": "FLASH_ATTN", "e": "native"}, "layout": {"default": "d", "overrides": )"
      R"([{"component": "transformer", "use": "e"}]}})");
  EXPECT_EQ(everything.preset_name(0, 3, AttentionRole::und), "e");
}

// Rule 8.
TEST(Strategy, AScheduleNeedsProgressEvenWithOneLayout) {
  const AttentionStrategy one =
      resolve(with_phases("step_index", R"([{"until": null, "layout": "a"}])"));
  EXPECT_EQ(one.layout_at(0, 1), 0);
  for (const auto& [step, total] : {std::pair{-1, 4}, {4, 4}, {0, 0}, {0, -1}}) {
    EXPECT_THROW(one.layout_at(step, total), Error) << step << " of " << total;
  }
  const AttentionStrategy fixed = resolve(with_layout(R"({"default": "d"})"));
  EXPECT_EQ(fixed.layout_at(-1, 0), 0);
}

// Rule 5: ceil, and boundaries at or past the end.
TEST(Strategy, FractionsRoundUp) {
  const AttentionStrategy strategy = resolve(
      R"({"presets": {"d": "native", "e": "native"}, "layouts": {"dense": {"default": "d"}, )"
      R"("mixed": {"default": "d", "overrides": [{"attention_role": "cosmos3.gen", "use": "e"}]}}, )"
      R"("schedule": {"coordinate": "step_fraction", "phases": [{"until": 0.3, "layout": "dense"}, )"
      R"({"until": 0.8, "layout": "mixed"}, {"until": 1.0, "layout": "dense"}]}})");
  const auto lengths = [&](int total) {
    std::vector<int> runs;
    for (int step = 0; step < total; ++step) {
      if (strategy.step_in_phase(step, total) == 0) runs.push_back(0);
      ++runs.back();
    }
    return runs;
  };
  EXPECT_EQ(lengths(30), (std::vector<int>{9, 15, 6}));
  EXPECT_EQ(lengths(10), (std::vector<int>{3, 5, 2}));
  EXPECT_EQ(lengths(4), (std::vector<int>{2, 2}));  // ceil(1.2), ceil(3.2)
  EXPECT_EQ(lengths(2), (std::vector<int>{1, 1}));
  EXPECT_EQ(lengths(1), (std::vector<int>{1}));
  EXPECT_EQ(strategy.phases(30),
            (std::vector<std::string>{"steps 0 to 8: dense", "steps 9 to 23: mixed",
                                      "steps 24 to 29: dense"}));
  for (int step = 0; step < 30; ++step) {
    EXPECT_EQ(strategy.layout_name(strategy.layout_at(step, 30)),
              step >= 9 && step < 24 ? "mixed" : "dense");
  }
}

// --- where a strategy comes from -----------------------------------------------------------------

const std::string kStored =
    R"({"schema_version": 1, "config": {"presets": {"c": "native"}, "layout": {"default": "c"}}})";

TEST(StrategySource, FirstMatchWins) {
  const auto source = [](const std::string& runtime, const std::string& checkpoint) {
    const AttentionStrategy strategy = resolve(runtime, checkpoint);
    return std::string(strategy.source()) + " " + strategy.preset_name(0, 0, AttentionRole::gen);
  };
  EXPECT_EQ(source("", ""), "default dense");
  EXPECT_EQ(source("", kStored), "checkpoint c");
  EXPECT_EQ(source("{}", kStored), "checkpoint c");
  EXPECT_EQ(source(R"({"checkpoint_policy": "use"})", kStored), "checkpoint c");
  EXPECT_EQ(source(R"({"default": "reference"})", kStored), "runtime default");
  EXPECT_EQ(source(R"({"per_role": {"cosmos3.gen": "reference"}})", kStored),
            "runtime cosmos3.gen");
  EXPECT_EQ(source(R"({"checkpoint_policy": "ignore"})", kStored), "runtime_disabled dense");
  EXPECT_EQ(source(R"({"checkpoint_policy": "ignore", "default": "native"})", kStored),
            "runtime_disabled default");
  // Presets alone are inactive (rule 1).
  EXPECT_EQ(source(R"({"presets": {"x": "native"}})", kStored), "checkpoint c");
  EXPECT_EQ(source(R"({"presets": {"x": "native"}})", ""), "default dense");
}

TEST(StrategySource, RuntimeReplacesAnInvalidCheckpoint) {
  EXPECT_EQ(resolve(R"({"default": "native"})", R"({"schema_version": 7})").source(), "runtime");
  EXPECT_EQ(resolve(R"({"checkpoint_policy": "ignore"})", "[]").source(), "runtime_disabled");
}

TEST(StrategySource, AnInvalidCheckpointFailsWithoutFallBack) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"schema_version": 2, "config": {}})", "config.json: schema_version: this build reads"},
      {R"({"schema_version": true, "config": {}})", "schema_version: this build reads"},
      {R"({"schema_version": 1.0, "config": {}})", "schema_version: this build reads"},
      {R"({"config": {}})", "config.json: the key \"schema_version\" is missing"},
      {R"({"schema_version": 1})", "config.json: the key \"config\" is missing"},
      {R"({"schema_version": 1, "config": {}, "note": ""})", "unknown key \"note\""},
      {R"({"schema_version": 1, "config": {}})", "must declare a layout or a schedule"},
      {R"({"schema_version": 1, "config": {"presets": {"c": "native"}}})",
       "config.json: config: a checkpoint's strategy must declare a layout or a schedule"},
      {R"({"schema_version": 1, "config": {"default": "native"}})", "unknown key \"default\""},
      {R"({"schema_version": 1, "config": {"presets": {"c": "native"}, "layout": {"default": "c"}, )"
       R"("checkpoint_policy": "use"}})",
       "unknown key \"checkpoint_policy\""},
      {"null", "expected a checkpoint's attention strategy as an object"},
  };
  for (const auto& [document, message] : cases) {
    EXPECT_NE(refusal("", document).find(message), std::string::npos)
        << document << ": " << refusal("", document);
  }
}

TEST(StrategySource, FindsTheStrategyInTheTransformersConfig) {
  const auto find = [](const char* text) {
    const Json config = Json::parse(text, "config.json");
    return AttentionStrategy::checkpoint_strategy(config) != nullptr;
  };
  EXPECT_FALSE(find("{}"));
  EXPECT_FALSE(find(R"({"runtime": {}})"));
  EXPECT_TRUE(find(R"({"runtime": {"attention_strategy": {}}})"));
  EXPECT_THROW(find(R"({"runtime": 3})"), Error);
}

TEST(StrategySource, EditingTheDocumentLaterChangesNothing) {
  Json document = Json::parse(R"({"default": "native"})", "run.json");
  const AttentionStrategy strategy = AttentionStrategy::resolve(inventory(), &document, nullptr);
  document.set("default", "reference");
  EXPECT_EQ(strategy.method(0, 0, AttentionRole::gen).description(), "dense (native)");
}

// --- the simple form -----------------------------------------------------------------------------

TEST(SimpleForm, RoleBeatsCategoryBeatsDefault) {
  const AttentionStrategy strategy = resolve(
      R"({"default": "FLASH_ATTN", "per_role": {"self": "native", "cosmos3.gen": "reference"}})");
  EXPECT_EQ(strategy.method(0, 0, AttentionRole::gen).description(), "dense (reference)");
  EXPECT_EQ(strategy.method(0, 0, AttentionRole::und).description(), "dense (native)");
  const AttentionStrategy roles = resolve(R"({"per_role": {"cosmos3.gen": "reference"}})");
  EXPECT_EQ(roles.method(0, 0, AttentionRole::und).description(), "dense (best exact kernel)");
}

TEST(SimpleForm, TokenOrderAloneIsDenseInTiles) {
  const AttentionStrategy strategy = resolve(R"({"token_order": [4, 4, 2]})", kStored);
  EXPECT_EQ(strategy.source(), "runtime");
  EXPECT_EQ(strategy.token_order().tile, (std::array<int64_t, 3>{4, 4, 2}));
  EXPECT_TRUE(strategy.method(0, 0, AttentionRole::gen).is_dense());
  EXPECT_TRUE(resolve("", kStored).token_order().raster());
}

// --- methods -------------------------------------------------------------------------------------

TEST(MethodConfig, DescribesWhatItRead) {
  const auto description = [](const std::string& document) {
    return resolve(document).method(0, 0, AttentionRole::gen).description();
  };
  EXPECT_EQ(description(with_selection(R"({"name": "block_topk"})")),
            "block_topk 64x64, target sparsity 0.75 (best exact kernel)");
  EXPECT_EQ(
      description(with_sparse(
          R"({"block_size": [128, 32], "selection": {"name": "block_topk", "config": )"
          R"({"target_sparsity": 0}, "reuse_steps": 3}, "backend": {"require": "CUDNN_ATTN"}})")),
      "block_topk 128x32, target sparsity 0, selection reused for 3 steps (CUDNN_ATTN)");
  EXPECT_EQ(
      description(with_selection(
          R"({"name": "block_topk", "config": {"target_sparsity": 0.5, "share_kv_group": true}})")),
      "block_topk 64x64, target sparsity 0.5, one list per key/value head (best exact kernel)");
  EXPECT_EQ(
      description(with_selection(R"({"name": "sliding_tile", "config": {"window": [3, 5, 1]}})")),
      "sliding_tile 64x64, window 3x5x1 tiles (best exact kernel)");
  EXPECT_EQ(description(with_selection(R"({"name": "threshold", "config": {"mass": 0.9}})")),
            "threshold 64x64, softmax mass 0.9 (best exact kernel)");
}

// --- warm-up and the printed table
// ---------------------------------------------------------------------

const std::string kTwoLayouts = with_presets(
    R"("layouts": {"dense": {"default": "d"}, "late": {"default": "d", "overrides": )"
    R"([{"layers": [0, 1, 3], "attention_role": "cosmos3.gen", "use": "s"}]}}, )"
    R"("schedule": {"coordinate": "step_index", "phases": [{"until": 50, "layout": "dense"}, )"
    R"({"until": null, "layout": "late"}]})");

TEST(WarmUp, CoversLayoutsThatAShortRunNeverReaches) {
  const AttentionStrategy strategy = resolve(kTwoLayouts);
  WarmUp warm_up(strategy, {AttentionRole::und, AttentionRole::gen});
  const std::vector<WarmUpTarget> all{
      {0, AttentionRole::und}, {0, AttentionRole::gen}, {1, AttentionRole::gen}};
  EXPECT_EQ(warm_up.pending(), all);
  EXPECT_FALSE(warm_up.is_complete());
  int runs = 0;
  warm_up.exercise(all[0], [&] { ++runs; });
  warm_up.exercise(all[1], [&] { ++runs; });
  EXPECT_THROW(warm_up.exercise(all[2], [] { fail(ErrorKind::out_of_memory, "no room"); }), Error);
  EXPECT_EQ(runs, 2);
  // A layout that failed stays pending.
  EXPECT_EQ(warm_up.pending(), (std::vector<WarmUpTarget>{all[2]}));
  EXPECT_EQ(warm_up.summary(), "2 of 3 layouts exercised; pending: late cosmos3.gen (no room)");
  warm_up.exercise(all[2], [] {});
  EXPECT_TRUE(warm_up.is_complete());
  EXPECT_EQ(warm_up.summary(), "3 of 3 layouts exercised");
  EXPECT_THROW(warm_up.exercise({2, AttentionRole::gen}, [] {}), Error);
}

TEST(Describe, FoldsLayers) {
  EXPECT_EQ(layer_ranges({0, 3, 4, 5, 8, 9, 35}), "0, 3..5, 8, 9, 35");
  EXPECT_EQ(layer_ranges({}), "");
  EXPECT_EQ(layer_ranges({7}), "7");
}

TEST(Describe, PrintsTheResolvedTable) {
  const AttentionStrategy strategy = resolve(kTwoLayouts);
  const std::vector<PresetTrial> trials = {{"d", "native", 0, ""}, {"s", "", 0, "no kernel"}};
  EXPECT_EQ(
      describe(strategy, trials, 60),
      "attention strategy from: runtime\n"
      "token order: raster\n"
      "presets\n"
      "  d                    dense (FLASH_ATTN) -> native\n"
      "  s                    block_topk 64x64, target sparsity 0.75 (best exact kernel) -> no "
      "kernel\n"
      "schedule over 60 steps\n"
      "  steps 0 to 49: dense\n"
      "  steps 50 to 59: late\n"
      "layout dense\n"
      "  cosmos3.und               d                    layers 0..3\n"
      "  cosmos3.gen               d                    layers 0..3\n"
      "  cosmos3.gen_multi_control d                    layers 0..3\n"
      "layout late\n"
      "  cosmos3.und               d                    layers 0..3\n"
      "  cosmos3.gen               d                    layers 2\n"
      "                            s                    layers 0, 1, 3\n"
      "  cosmos3.gen_multi_control d                    layers 0..3\n");
}

}  // namespace
}  // namespace orrery
