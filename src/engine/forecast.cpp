#include "engine/forecast.h"

#include <utility>

namespace orrery {

Forecast::Forecast(std::vector<Stage> stages, StageRates rates,
                   std::function<int(int64_t step)> layout_of)
    : stages_(std::move(stages)), earlier_(std::move(rates)), layout_of_(std::move(layout_of)) {}

Forecast::Group Forecast::group_of(StageKind kind, int64_t unit) const {
  return {kind, kind == StageKind::denoise ? layout_of_(unit) : 0};
}

double Forecast::flops_of(const Group& group) const {
  if (!costs_) return 0;
  if (group.kind == StageKind::denoise)
    return costs_->step_flops[static_cast<size_t>(group.layout)];
  const auto it = costs_->unit_flops.find(group.kind);
  return it == costs_->unit_flops.end() ? 0 : it->second;
}

void Forecast::finished(StageKind kind, int64_t unit, double seconds) {
  if (!stages_.empty() && stages_.front().kind == kind) {
    ++stages_.front().begin;
    --stages_.front().count;
  }
  Measured& measured = measured_[group_of(kind, unit)];
  if (kind == StageKind::denoise && first_step_counts_ && measured.units > 0) {
    // The first step also reads the text, records graphs and fills caches.
    first_step_counts_ = false;
    measured = {};
  }
  measured.seconds += seconds;
  ++measured.units;
}

void Forecast::finished_stage() {
  if (!stages_.empty()) stages_.erase(stages_.begin());
}

std::optional<double> Forecast::rate_of(StageKind kind) const {
  double flops = 0, seconds = 0;
  for (const auto& [group, measured] : measured_) {
    if (group.kind != kind) continue;
    flops += flops_of(group) * static_cast<double>(measured.units);
    seconds += measured.seconds;
  }
  if (flops > 0 && seconds > 0) return flops / seconds;
  if (const auto it = earlier_.find(kind); it != earlier_.end()) return it->second;
  return std::nullopt;
}

std::optional<double> Forecast::seconds_of(const Group& group) const {
  if (const auto it = measured_.find(group); it != measured_.end())
    return it->second.seconds / static_cast<double>(it->second.units);
  const double flops = flops_of(group);
  if (flops == 0) return 0;
  // A kind that has not run yet is as fast as denoising, the bulk of the work.
  std::optional<double> rate = rate_of(group.kind);
  if (!rate) rate = rate_of(StageKind::denoise);
  if (!rate) return std::nullopt;
  return flops / *rate;
}

std::optional<double> Forecast::seconds_left() const {
  if (!costs_) return std::nullopt;
  double seconds = 0;
  for (const Stage& stage : stages_) {
    std::map<int, int64_t> units;  // by layout
    for (int64_t i = 0; i < stage.count; ++i) ++units[group_of(stage.kind, stage.begin + i).layout];
    for (const auto& [layout, count] : units) {
      const std::optional<double> one = seconds_of({stage.kind, layout});
      if (!one) return std::nullopt;
      seconds += *one * static_cast<double>(count);
    }
  }
  return seconds;
}

StageRates Forecast::rates() const {
  StageRates rates = earlier_;
  for (const auto& [group, measured] : measured_) {
    if (const std::optional<double> rate = rate_of(group.kind)) rates[group.kind] = *rate;
  }
  return rates;
}

}  // namespace orrery
