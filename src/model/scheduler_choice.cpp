#include "model/scheduler_choice.h"

#include <cmath>

#include "base/error.h"

namespace orrery {
namespace {

std::string describe_grid(const SchedulerConfig& config) {
  if (config.kind == SchedulerConfig::Kind::flow_match_euler) {
    return concat("flow-match Euler, shift ", config.flow_shift,
                  config.stochastic_sampling ? ", stochastic" : "");
  }
  const std::string solver = concat("UniPC order ", config.solver_order);
  if (!config.use_karras_sigmas) {
    return concat(solver, ", ", config.native_schedule ? "native" : "plain", " flow grid, shift ",
                  config.flow_shift);
  }
  const auto end = [](const std::optional<double>& value) {
    return value ? concat(*value) : std::string("the training schedule's");
  };
  return concat(solver, ", Karras sigmas from ", end(config.sigma_max), " to ",
                end(config.sigma_min));
}

std::string_view name_of(SamplingMode mode) {
  switch (mode) {
    case SamplingMode::image: return "an image";
    case SamplingMode::video: return "video";
    case SamplingMode::action: return "actions";
    case SamplingMode::transfer: return "transfer";
  }
  return "?";
}

void refuse_contradictions(const SchedulerConfig& checkpoint, const SchedulerOverrides& overrides) {
  const bool changes = overrides.flow_shift || overrides.karras;
  require(
      !(overrides.checkpoint && changes),
      "--scheduler checkpoint takes the checkpoint's sampler settings as they are and cannot be "
      "combined with --flow-shift or --karras; leave one of them out");
  require(!(overrides.flow_shift && overrides.karras.value_or(false)),
          "--karras on ignores the flow shift, so --flow-shift ", overrides.flow_shift.value_or(0),
          " would have no effect; leave one of them out");
  if (overrides.flow_shift) {
    require(*overrides.flow_shift > 0 && std::isfinite(*overrides.flow_shift), "--flow-shift is ",
            *overrides.flow_shift, "; it must be a number greater than 0");
  }
  require(checkpoint.kind == SchedulerConfig::Kind::unipc || !changes,
          overrides.flow_shift ? "--flow-shift" : "--karras",
          " cannot be used with this checkpoint: it is distilled for a fixed list of sigmas; leave "
          "the option out");
}

}  // namespace

double recommended_flow_shift(SamplingMode mode, int64_t height, int64_t width) {
  switch (mode) {
    case SamplingMode::image: return 3;
    case SamplingMode::action:
    case SamplingMode::transfer: return 10;
    case SamplingMode::video: break;
  }
  // Borders halfway, in ratio of pixels, between the sizes of neighbouring tiers: 256 x 256 and
  // 832 x 480, 640 x 640 and 1280 x 704.
  const double pixels = double(height) * double(width);
  if (pixels < std::sqrt(256.0 * 256 * 832 * 480)) return 3;
  if (pixels < std::sqrt(640.0 * 640 * 1280 * 704)) return 5;
  return 10;
}

SchedulerChoice choose_scheduler(const SchedulerConfig& checkpoint, SamplingMode mode,
                                 int64_t height, int64_t width,
                                 const SchedulerOverrides& overrides) {
  refuse_contradictions(checkpoint, overrides);
  SchedulerChoice choice{checkpoint, {}};
  SchedulerConfig& config = choice.config;
  std::string why;
  if (mode == SamplingMode::transfer && config.native_schedule) {
    config.native_schedule = false;
    why = "transfer runs on the plain grid; ";
  }
  if (overrides.flow_shift) {
    config.flow_shift = *overrides.flow_shift;
    config.use_karras_sigmas = false;
    why += "--flow-shift asks for it";
  } else if (overrides.karras.value_or(false)) {
    config.use_karras_sigmas = true;
    why += "--karras on asks for it";
  } else if (checkpoint.use_karras_sigmas && !overrides.checkpoint) {
    config.use_karras_sigmas = false;
    config.flow_shift = recommended_flow_shift(mode, height, width);
    why += concat("recommended for ", name_of(mode), " at ", width, "x", height, ", since ",
                  overrides.karras ? "--karras off leaves the checkpoint without a shift of its own"
                                   : "the checkpoint's Karras sigmas are not; --scheduler "
                                     "checkpoint or --karras on uses them");
  } else {
    why += overrides.checkpoint ? "--scheduler checkpoint asks for the checkpoint's own"
                                : "the checkpoint's own";
  }
  choice.reason = concat(describe_grid(config), ": ", why, ".");
  return choice;
}

}  // namespace orrery
