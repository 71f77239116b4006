// The JSON form of a strategy. Syntax, types and names are checked here; what needs the model
// (roles, layers, overlaps, invariance) in strategy.cpp.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/method.h"
#include "attention/sequence.h"
#include "base/json.h"

namespace orrery {

struct OverrideRule {
  std::optional<std::vector<int64_t>> layers;  // none: all
  std::optional<std::string> role, component;  // none: all
  int preset = 0;
  std::string place;  // for messages
};

struct LayoutRule {
  std::string name;
  int preset = 0;
  std::vector<OverrideRule> overrides;
  std::string place;
};

struct SchedulePhase {
  double until = 0;  // a step, a fraction, or infinity for a step_index schedule's last phase
  int layout = 0;
};

struct StrategySchedule {
  bool by_fraction = false;
  std::vector<SchedulePhase> phases;

  // First step that is not in phase `phase`, at most num_steps.
  int end_of(size_t phase, int num_steps) const;
};

struct NamedMethod {
  std::string name;
  std::shared_ptr<const AttentionMethod> method;
};

struct StrategyConfig {
  bool ignore_checkpoint = false;
  std::vector<NamedMethod> presets;
  std::vector<LayoutRule> layouts;  // those that can be reached; empty: the strategy is inactive
  std::optional<StrategySchedule> schedule;
  TokenOrder token_order;
};

// What a command line, file or environment gives. Throws Error{invalid_argument}.
StrategyConfig parse_runtime_config(const Json& json);
// The value of a checkpoint's runtime.attention_strategy.
StrategyConfig parse_checkpoint_config(const Json& json);

}  // namespace orrery
