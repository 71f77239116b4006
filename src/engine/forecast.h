// How long the rest of a request will take: what its remaining units cost by the dry run, at the
// rates that finished units were measured at.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "engine/stages.h"

namespace orrery {

// Flops of each unit of a request, from the dry run.
struct StageCosts {
  std::map<StageKind, double> unit_flops;  // of a stage's unit; stages without flops are not there
  std::vector<double> step_flops;          // of a denoising step, by attention layout
};

// Flops a second that stages reached in earlier requests of an engine.
using StageRates = std::map<StageKind, double>;

class Forecast {
 public:
  // `layout_of`: the attention layout of a denoising step.
  Forecast(std::vector<Stage> stages, StageRates rates, std::function<int(int64_t step)> layout_of);

  // Known once the request has been measured; before, nothing is forecast.
  void set_costs(StageCosts costs) { costs_ = std::move(costs); }
  // The next unit of a stage of this kind took so long.
  void finished(StageKind kind, int64_t unit, double seconds);
  // The stage that runs now is over, whatever units it had left.
  void finished_stage();
  // Of all units that are not finished. Stages that have no flops (load, noise, the guardrail's
  // checks) count what they took in an earlier chunk, else nothing. None while no unit has been
  // measured that says how fast this device is.
  std::optional<double> seconds_left() const;
  // What this request reached, over `rates` of earlier ones.
  StageRates rates() const;

 private:
  // Denoising steps of one layout cost alike, and so do the units of any other stage.
  struct Group {
    StageKind kind;
    int layout;
    auto operator<=>(const Group&) const = default;
  };
  struct Measured {
    double seconds = 0;
    int64_t units = 0;
  };
  Group group_of(StageKind kind, int64_t unit) const;
  double flops_of(const Group& group) const;
  std::optional<double> rate_of(StageKind kind) const;
  std::optional<double> seconds_of(const Group& group) const;

  std::vector<Stage> stages_;  // that are not finished; the first one runs
  StageRates earlier_;
  std::function<int(int64_t)> layout_of_;
  std::optional<StageCosts> costs_;
  std::map<Group, Measured> measured_;
  bool first_step_counts_ = true;  // until another step has been measured
};

}  // namespace orrery
