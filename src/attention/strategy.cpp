#include "attention/strategy.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/config_fields.h"
#include "attention/method.h"
#include "attention/strategy_config.h"
#include "base/error.h"

namespace orrery {

std::string_view name_of(AttentionRole role) {
  switch (role) {
    case AttentionRole::und: return "cosmos3.und";
    case AttentionRole::gen: return "cosmos3.gen";
    case AttentionRole::gen_multi_control: return "cosmos3.gen_multi_control";
  }
  return "?";
}

struct AttentionStrategy::State {
  struct Layout {
    std::string name;
    std::vector<int> table;  // preset of (layer, role)
  };
  std::string source = "default";
  AttentionInventory inventory;
  std::vector<NamedMethod> presets;
  std::vector<Layout> layouts;
  std::optional<StrategySchedule> schedule;
  TokenOrder token_order;

  void check(int layout) const {
    require(layout >= 0 && layout < static_cast<int>(layouts.size()), "attention: layout ", layout,
            ", but the strategy has ", layouts.size());
  }
  size_t phase_at(int step, int num_steps) const {
    require(step >= 0 && step < num_steps,
            "attention: the strategy's schedule needs valid progress, got step ", step, " of ",
            num_steps);
    size_t phase = 0;
    while (step >= schedule->end_of(phase, num_steps)) ++phase;
    return phase;
  }
};

namespace {

size_t entry(int layer, AttentionRole role) {
  return static_cast<size_t>(layer) * kNumRoles + static_cast<size_t>(role);
}

std::string role_names(const AttentionInventory& inventory) {
  std::string names;
  for (AttentionRole role : inventory.roles) {
    names += concat(names.empty() ? "" : ", ", name_of(role));
  }
  return names;
}

// An override's selectors against the model: those that no operation answers to are refused.
void check_override(const AttentionInventory& inventory, const OverrideRule& rule) {
  if (rule.role) {
    const bool known = std::any_of(inventory.roles.begin(), inventory.roles.end(),
                                   [&](AttentionRole role) { return name_of(role) == *rule.role; });
    require(known, rule.place, ": no operation of this model has the role \"", *rule.role,
            "\"; it has ", role_names(inventory));
  }
  require(!rule.component || *rule.component == inventory.component, rule.place,
          ": no operation of this model belongs to the component \"",
          rule.component.value_or(std::string()), "\"; it has ", inventory.component);
  for (int64_t layer : rule.layers.value_or(std::vector<int64_t>{})) {
    require(layer < inventory.num_layers, rule.place, ": layer ", layer,
            " does not exist; this model has layers 0 to ", inventory.num_layers - 1);
  }
}

bool matches(const OverrideRule& rule, int layer, AttentionRole role) {
  if (rule.role && *rule.role != name_of(role)) return false;
  return !rule.layers ||
         std::find(rule.layers->begin(), rule.layers->end(), layer) != rule.layers->end();
}

std::vector<int> assign(const AttentionInventory& inventory, const LayoutRule& layout) {
  for (const OverrideRule& rule : layout.overrides) check_override(inventory, rule);
  std::vector<int> table(static_cast<size_t>(inventory.num_layers) * kNumRoles, layout.preset);
  for (int layer = 0; layer < inventory.num_layers; ++layer) {
    for (AttentionRole role : inventory.roles) {
      const OverrideRule* first = nullptr;
      for (const OverrideRule& rule : layout.overrides) {
        if (!matches(rule, layer, role)) continue;
        require(first == nullptr, rule.place,
                ": overlapping overrides: ", first ? first->place : std::string(), " matches ",
                name_of(role), " of layer ", layer, " too");
        first = &rule;
        table[entry(layer, role)] = rule.preset;
      }
    }
  }
  return table;
}

}  // namespace

AttentionStrategy::AttentionStrategy(std::unique_ptr<State> state) : state_(std::move(state)) {}
AttentionStrategy::AttentionStrategy(AttentionStrategy&&) noexcept = default;
AttentionStrategy& AttentionStrategy::operator=(AttentionStrategy&&) noexcept = default;
AttentionStrategy::~AttentionStrategy() = default;

AttentionStrategy AttentionStrategy::dense(const AttentionInventory& inventory) {
  return resolve(inventory, nullptr, nullptr);
}

AttentionStrategy AttentionStrategy::resolve(const AttentionInventory& inventory,
                                             const Json* runtime, const Json* checkpoint) {
  auto state = std::make_unique<State>();
  state->inventory = inventory;
  StrategyConfig config;
  if (runtime) config = parse_runtime_config(*runtime);
  if (config.ignore_checkpoint) {
    state->source = "runtime_disabled";
  } else if (!config.layouts.empty()) {
    state->source = "runtime";
  } else if (checkpoint) {
    config = parse_checkpoint_config(*checkpoint);
    state->source = "checkpoint";
  }
  if (config.layouts.empty()) {
    config.presets = {{"dense", make_dense({})}};
    config.layouts = {{"dense", 0, {}, "the built-in strategy"}};
  }
  state->presets = std::move(config.presets);
  state->schedule = std::move(config.schedule);
  state->token_order = config.token_order;

  for (const LayoutRule& rule : config.layouts) {
    state->layouts.push_back({rule.name, assign(inventory, rule)});
    const std::vector<int>& table = state->layouts.back().table;
    for (int layer = 0; layer < inventory.num_layers; ++layer) {
      for (AttentionRole role : inventory.roles) {
        const NamedMethod& preset = state->presets[static_cast<size_t>(table[entry(layer, role)])];
        if (!preset.method->is_dense()) {
          require(!is_invariant(role), rule.place, ": ", name_of(role), " of layer ", layer,
                  " is causal, but the preset \"", preset.name,
                  "\" is block-sparse; give the role a dense preset");
          require(inventory.num_kv_heads == 0 || inventory.num_heads % inventory.num_kv_heads == 0,
                  rule.place, ": the preset \"", preset.name, "\" needs query heads (",
                  inventory.num_heads, ") divisible by key/value heads (", inventory.num_kv_heads,
                  ")");
        }
        if (!is_invariant(role)) continue;
        const int first = state->layouts.front().table[entry(layer, role)];
        require(table[entry(layer, role)] == first, rule.place, ": ", name_of(role), " of layer ",
                layer, " uses the preset \"", preset.name, "\" here but \"",
                state->presets[static_cast<size_t>(first)].name, "\" in the layout \"",
                state->layouts.front().name,
                "\"; its keys are computed once per prompt, so every "
                "layout must agree");
      }
    }
  }
  return AttentionStrategy(std::move(state));
}

const Json* AttentionStrategy::checkpoint_strategy(const Json& transformer_config) {
  const Json* runtime = transformer_config.find("runtime");
  if (runtime == nullptr) return nullptr;
  if (!runtime->is_object()) refuse(*runtime, "expected runtime as an object");
  return runtime->find("attention_strategy");
}

std::string_view AttentionStrategy::source() const { return state_->source; }
const AttentionInventory& AttentionStrategy::inventory() const { return state_->inventory; }
const TokenOrder& AttentionStrategy::token_order() const { return state_->token_order; }

bool AttentionStrategy::has_schedule() const { return state_->schedule.has_value(); }

int AttentionStrategy::layout_at(int step, int num_steps) const {
  if (!state_->schedule) return 0;
  return state_->schedule->phases[state_->phase_at(step, num_steps)].layout;
}

int AttentionStrategy::step_in_phase(int step, int num_steps) const {
  if (!state_->schedule) return step;
  const size_t phase = state_->phase_at(step, num_steps);
  return phase == 0 ? step : step - state_->schedule->end_of(phase - 1, num_steps);
}

int AttentionStrategy::num_layouts() const { return static_cast<int>(state_->layouts.size()); }

const std::string& AttentionStrategy::layout_name(int layout) const {
  state_->check(layout);
  return state_->layouts[static_cast<size_t>(layout)].name;
}

std::vector<std::string> AttentionStrategy::phases(int num_steps) const {
  std::vector<std::string> lines;
  for (int step = 0, end = 0; state_->schedule && step < num_steps; step = end) {
    const size_t phase = state_->phase_at(step, num_steps);
    end = state_->schedule->end_of(phase, num_steps);
    lines.push_back(concat("steps ", step, " to ", end - 1, ": ",
                           layout_name(state_->schedule->phases[phase].layout)));
  }
  return lines;
}

int AttentionStrategy::num_presets() const { return static_cast<int>(state_->presets.size()); }
const std::string& AttentionStrategy::preset_name(int preset) const {
  return state_->presets.at(static_cast<size_t>(preset)).name;
}
const AttentionMethod& AttentionStrategy::preset_method(int preset) const {
  return *state_->presets.at(static_cast<size_t>(preset)).method;
}

int AttentionStrategy::preset(int layout, int layer, AttentionRole role) const {
  state_->check(layout);
  require(layer >= 0 && layer < state_->inventory.num_layers, "attention: layer ", layer,
          ", but the strategy was resolved for ", state_->inventory.num_layers);
  return state_->layouts[static_cast<size_t>(layout)].table[entry(layer, role)];
}
const std::string& AttentionStrategy::preset_name(int layout, int layer, AttentionRole role) const {
  return preset_name(preset(layout, layer, role));
}
const AttentionMethod& AttentionStrategy::method(int layout, int layer, AttentionRole role) const {
  return preset_method(preset(layout, layer, role));
}

std::vector<WarmUpTarget> AttentionStrategy::warm_up_targets(
    const std::vector<AttentionRole>& roles) const {
  std::vector<WarmUpTarget> targets;
  for (int layout = 0; layout < num_layouts(); ++layout) {
    for (AttentionRole role : state_->inventory.roles) {
      const bool wanted = std::find(roles.begin(), roles.end(), role) != roles.end();
      if (wanted && (layout == 0 || !is_invariant(role))) targets.push_back({layout, role});
    }
  }
  return targets;
}

}  // namespace orrery
