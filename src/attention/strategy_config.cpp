#include "attention/strategy_config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "attention/config_fields.h"
#include "attention/method_config.h"

namespace orrery {

namespace {

constexpr int64_t kMaxTile = 1024;
constexpr int64_t kMaxIndex = 1'000'000;
constexpr std::string_view kStaticLayout = "static";
constexpr std::string_view kCategory = "self";  // of all roles

int find_preset(const StrategyConfig& config, const Json& use) {
  const std::string& name = expect_name(use, "a preset's name");
  for (size_t i = 0; i < config.presets.size(); ++i) {
    if (config.presets[i].name == name) return static_cast<int>(i);
  }
  refuse(use, "no preset has this name");
}

void parse_presets(StrategyConfig& config, const Json& presets) {
  if (!presets.is_object() || presets.members().empty()) {
    refuse(presets, "expected at least one preset in an object");
  }
  for (const auto& [name, method] : presets.members()) {
    require(!name.empty(), presets.where(), ": a preset has an empty name");
    config.presets.push_back({name, parse_method(method)});
  }
}

std::vector<int64_t> parse_layers(const Json& layers) {
  if (!layers.is_array() || layers.items().empty()) {
    refuse(layers, "expected layers as a list that is not empty");
  }
  std::vector<int64_t> parsed;
  std::set<int64_t> seen;
  for (const Json& item : layers.items()) {
    const int64_t layer = expect_integer(item, "a layer", 0, kMaxIndex);
    if (!seen.insert(layer).second) refuse(item, "the layer stands in the list twice");
    parsed.push_back(layer);
  }
  return parsed;
}

LayoutRule parse_layout(const StrategyConfig& config, std::string name, const Json& layout) {
  expect_object(layout, "a layout", {"default", "overrides"});
  LayoutRule rule;
  rule.name = std::move(name);
  rule.place = layout.where();
  rule.preset = find_preset(config, expect_member(layout, "default"));
  const Json* overrides = layout.find("overrides");
  if (overrides == nullptr) return rule;
  if (!overrides->is_array()) refuse(*overrides, "expected overrides as a list");
  for (const Json& item : overrides->items()) {
    expect_object(item, "an override", {"layers", "attention_role", "component", "use"});
    OverrideRule parsed;
    parsed.place = item.where();
    if (const Json* layers = item.find("layers")) parsed.layers = parse_layers(*layers);
    if (const Json* role = item.find("attention_role")) {
      parsed.role = expect_name(*role, "attention_role");
    }
    if (const Json* component = item.find("component")) {
      parsed.component = expect_name(*component, "component");
    }
    parsed.preset = find_preset(config, expect_member(item, "use"));
    rule.overrides.push_back(std::move(parsed));
  }
  return rule;
}

// `until` of one phase; `last` decides between a number and the end.
double parse_boundary(const Json& until, bool by_fraction, bool last, double previous) {
  if (!by_fraction) {
    if (last != until.is_null()) {
      refuse(until, last ? "expected null: the last phase of a step_index schedule has no end"
                         : "expected a step: only the last phase ends with null");
    }
    if (last) return std::numeric_limits<double>::infinity();
    const auto step =
        static_cast<double>(expect_integer(until, "until", 0, std::numeric_limits<int>::max()));
    if (step <= previous)
      refuse(until, "boundaries must grow from 0: expected more than ", previous);
    return step;
  }
  const double fraction = expect_number(until, "until");
  if (fraction <= 0 || fraction > 1) refuse(until, "expected a fraction in (0, 1]");
  if (fraction <= previous) {
    refuse(until, "boundaries must grow from 0: expected more than ", previous);
  }
  if (last && fraction != 1) refuse(until, "the last phase of a step_fraction schedule ends at 1");
  return fraction;
}

// Phases come with the name of their layout, so that layouts nobody names are never looked at.
void parse_schedule(StrategyConfig& config, const Json& schedule, const Json& layouts) {
  expect_object(schedule, "a schedule", {"coordinate", "phases"});
  const Json& coordinate = expect_member(schedule, "coordinate");
  const std::string& kind = expect_name(coordinate, "coordinate");
  if (kind != "step_index" && kind != "step_fraction") {
    refuse(coordinate, "expected step_index or step_fraction");
  }
  StrategySchedule parsed;
  parsed.by_fraction = kind == "step_fraction";
  const Json& phases = expect_member(schedule, "phases");
  if (!phases.is_array() || phases.items().empty()) {
    refuse(phases, "expected phases as a list that is not empty");
  }
  double previous = 0;
  for (const Json& phase : phases.items()) {
    expect_object(phase, "a phase", {"until", "layout"});
    const Json& name = expect_member(phase, "layout");
    const Json* layout = layouts.find(expect_name(name, "a layout's name"));
    if (layout == nullptr) refuse(name, "no layout has this name");
    SchedulePhase entry;
    entry.until = parse_boundary(expect_member(phase, "until"), parsed.by_fraction,
                                 &phase == &phases.items().back(), previous);
    previous = entry.until;
    const auto known =
        std::find_if(config.layouts.begin(), config.layouts.end(),
                     [&](const LayoutRule& rule) { return rule.name == name.as_string(); });
    entry.layout = static_cast<int>(known - config.layouts.begin());
    if (known == config.layouts.end()) {
      config.layouts.push_back(parse_layout(config, name.as_string(), *layout));
    }
    parsed.phases.push_back(entry);
  }
  config.schedule = std::move(parsed);
}

// presets, and layout or layouts with schedule.
void parse_strategy(StrategyConfig& config, const Json& json) {
  const Json* presets = json.find("presets");
  const Json* layout = json.find("layout");
  const Json* layouts = json.find("layouts");
  const Json* schedule = json.find("schedule");
  require(layout == nullptr || (layouts == nullptr && schedule == nullptr), json.where(),
          ": layout (static) excludes layouts and schedule");
  require((layouts == nullptr) == (schedule == nullptr), json.where(),
          ": layouts and schedule come together, but ", layouts ? "schedule" : "layouts",
          " is missing");
  require(presets != nullptr || (layout == nullptr && layouts == nullptr), json.where(),
          ": a layout needs at least one preset, but presets is missing");
  if (presets) parse_presets(config, *presets);
  if (layout) config.layouts.push_back(parse_layout(config, std::string(kStaticLayout), *layout));
  if (layouts == nullptr) return;
  if (!layouts->is_object() || layouts->members().empty()) {
    refuse(*layouts, "expected at least one layout in an object");
  }
  for (const auto& member : layouts->members()) {
    require(!member.first.empty(), layouts->where(), ": a layout has an empty name");
  }
  parse_schedule(config, *schedule, *layouts);
}

// default and per_role: one static layout. The category of all roles stands for the default.
void parse_simple(StrategyConfig& config, const Json& json) {
  const Json* fallback = json.find("default");
  const Json* roles = json.find("per_role");
  const Json* category = nullptr;
  if (roles) {
    if (!roles->is_object()) refuse(*roles, "expected per_role as an object of role: method");
    category = roles->find(kCategory);
  }
  LayoutRule rule;
  rule.name = kStaticLayout;
  rule.place = json.where();
  // Both are read even where the category hides the default: a wrong document is refused.
  std::shared_ptr<const AttentionMethod> method = make_dense({});
  if (fallback) method = parse_method(*fallback);
  if (category) method = parse_method(*category);
  rule.preset = static_cast<int>(config.presets.size());
  config.presets.push_back({category ? std::string(kCategory) : "default", std::move(method)});
  for (const auto& [role, value] : roles ? roles->members() : std::vector<Json::Member>{}) {
    require(!role.empty(), roles->where(), ": a role has an empty name");
    if (role == kCategory) continue;
    OverrideRule parsed;
    parsed.role = role;
    parsed.preset = static_cast<int>(config.presets.size());
    parsed.place = roles->where();
    config.presets.push_back({role, parse_method(value)});
    rule.overrides.push_back(std::move(parsed));
  }
  config.layouts.push_back(std::move(rule));
}

TokenOrder parse_token_order(const Json& json) {
  if (!json.is_array() || json.items().size() != 3) {
    refuse(json, "expected token_order as three tile extents: frames, rows, columns");
  }
  TokenOrder order;
  for (size_t axis = 0; axis < 3; ++axis) {
    order.tile[axis] = expect_integer(json.at(axis), "a tile extent", 1, kMaxTile);
  }
  return order;
}

}  // namespace

int StrategySchedule::end_of(size_t phase, int num_steps) const {
  const double until = phases[phase].until;
  const double boundary = by_fraction ? std::ceil(until * num_steps) : until;
  return static_cast<int>(std::min(boundary, static_cast<double>(num_steps)));
}

StrategyConfig parse_runtime_config(const Json& json) {
  expect_object(json, "an attention configuration",
                {"presets", "layout", "layouts", "schedule", "default", "per_role",
                 "checkpoint_policy", "token_order"});
  StrategyConfig config;
  if (const Json* policy = json.find("checkpoint_policy")) {
    const std::string& name = expect_name(*policy, "checkpoint_policy");
    if (name != "use" && name != "ignore") refuse(*policy, "expected \"use\" or \"ignore\"");
    config.ignore_checkpoint = name == "ignore";
  }
  const auto any_of = [&](std::initializer_list<std::string_view> keys) {
    return std::any_of(keys.begin(), keys.end(), [&](auto key) { return json.has(key); });
  };
  const bool simple = any_of({"default", "per_role"});
  const bool strategy = any_of({"presets", "layout", "layouts", "schedule"});
  require(!simple || !strategy, json.where(),
          ": default and per_role (the simple form) exclude presets, layout, layouts and schedule");
  if (strategy) parse_strategy(config, json);
  if (const Json* order = json.find("token_order")) {
    config.token_order = parse_token_order(*order);
    // An order alone is a configuration too: dense everywhere, tokens in tiles.
    if (config.layouts.empty() && !simple) parse_simple(config, json);
  }
  if (simple) parse_simple(config, json);
  return config;
}

StrategyConfig parse_checkpoint_config(const Json& json) {
  expect_object(json, "a checkpoint's attention strategy", {"schema_version", "config"});
  const Json& version = expect_member(json, "schema_version");
  if (!version.is_integer() || version.as_int() != 1) {
    refuse(version, "this build reads schema_version 1");
  }
  const Json& body = expect_member(json, "config");
  expect_object(body, "a checkpoint's strategy", {"presets", "layout", "layouts", "schedule"});
  StrategyConfig config;
  parse_strategy(config, body);
  require(!config.layouts.empty(), body.where(),
          ": a checkpoint's strategy must declare a layout or a schedule");
  return config;
}

}  // namespace orrery
