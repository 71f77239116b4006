#include "engine/teller.h"

#include <ctime>
#include <utility>

#include "base/error.h"
#include "engine/report.h"

namespace orrery {

Teller::Teller(Backend& backend, const ProgressCallback& progress, StopWish stop, Forecast forecast,
               int64_t chunks)
    : backend_(backend),
      progress_(progress),
      stop_(std::move(stop)),
      forecast_(std::move(forecast)),
      chunks_(chunks) {}

void Teller::run(const Stage& stage, bool together, const std::function<void()>& body) {
  stage_ = stage;
  together_ = together;
  done_ = 0;
  unit_seconds_ = 0;
  start_ = unit_start_ = Clock::now();
  const std::clock_t processor = std::clock();
  backend_.reset_stats();
  report();
  end_if(together ? stop_.together() : stop_.requested());
  body();
  backend_.synchronize();
  const double seconds = seconds_since(start_);
  times_.stages.push_back({std::string(name_of(stage.kind)), stage.chunk, seconds,
                           static_cast<double>(std::clock() - processor) / CLOCKS_PER_SEC,
                           total_flops(backend_.stats())});
  add(operations_, backend_.stats());
  if (done_ < stage.count) count(stage.count, seconds_since(unit_start_));
  forecast_.finished_stage();
  report();
}

// Units up to `units` have taken so long.
void Teller::count(int64_t units, double seconds) {
  unit_seconds_ = seconds / static_cast<double>(units - done_);
  for (; done_ < units; ++done_)
    forecast_.finished(stage_.kind, stage_.begin + done_, unit_seconds_);
}

void Teller::finished(int64_t units) {
  count(units, seconds_since(unit_start_));
  unit_start_ = Clock::now();
  const bool steps = stage_.kind == StageKind::denoise;
  if (steps) {
    times_.step_seconds.push_back(unit_seconds_);
    if (times_.first_step_after_start_seconds == 0)
      times_.first_step_after_start_seconds = seconds_since_process_start();
  }
  // The last unit is told with the end of the stage.
  if (units < stage_.count) report();
  if (steps) end_if(stop_.together());
}

void Teller::pause() {
  const bool everyone_is_here =
      stage_.kind == StageKind::encode || stage_.kind == StageKind::decode;
  if (!together_)
    end_if(stop_.requested());
  else
    end_if(everyone_is_here ? stop_.together() : stop_.alone());
}

void Teller::wait() {
  report();
  pause();
}

void Teller::report() {
  if (!progress_) return;
  Progress progress;
  progress.stage = name_of(stage_.kind);
  progress.step = done_;
  progress.total = stage_.count;
  progress.chunk = stage_.chunk;
  progress.chunks = chunks_;
  progress.seconds = seconds_since(start_);
  progress.step_seconds = unit_seconds_;
  progress.seconds_left = forecast_.seconds_left();
  progress_(progress);
}

void Teller::end_if(bool asked) const {
  if (!asked) return;
  fail(ErrorKind::cancelled, "stopped during ", name_of(stage_.kind), " (", done_, " of ",
       stage_.count, ")");
}

}  // namespace orrery
