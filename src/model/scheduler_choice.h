// Which sigma grid a request runs on: one rule for every entry point, from what the checkpoint
// says, what is generated, and what the request overrides.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "model/scheduler.h"

namespace orrery {

// What is generated, as far as the recommended sampler settings differ.
enum class SamplingMode { image, video, action, transfer };

// What a request may override; empty members leave the rule below alone.
struct SchedulerOverrides {
  std::optional<double> flow_shift;  // --flow-shift: the shifted grid, Karras sigmas off
  std::optional<bool> karras;        // --karras on|off
  bool checkpoint = false;           // --scheduler checkpoint: the file's settings as they are
};

struct SchedulerChoice {
  SchedulerConfig config;
  std::string reason;  // a sentence: the grid, and why this one
};

// The shift recommended for sampling on the shifted grid: 3 for images, 10 for actions and
// transfer, and for video 3, 5 or 10 for sizes near the 256, 480 and 704 to 768 tiers.
double recommended_flow_shift(SamplingMode mode, int64_t height, int64_t width);

// The checkpoint's configuration is obeyed, but for one case: Karras sigmas in the file (the
// released base checkpoints declare them) give way to the shifted grid with the recommended shift,
// unless the request says `--karras on` or `--scheduler checkpoint`. `--karras off` on such a
// checkpoint takes the recommended shift as well: the file's own shift was never meant to be used.
// Transfer ignores the checkpoint's native grid. Overrides that contradict each other, or a sampler
// whose sigmas are fixed (distilled checkpoints), are refused.
SchedulerChoice choose_scheduler(const SchedulerConfig& checkpoint, SamplingMode mode,
                                 int64_t height, int64_t width,
                                 const SchedulerOverrides& overrides = {});

}  // namespace orrery
