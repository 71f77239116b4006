// Times the stages of a request, tells how far it is, and ends it when the caller asks to stop.
#pragma once

#include <functional>
#include <string>

#include "backend/backend.h"
#include "engine/clock.h"
#include "engine/forecast.h"
#include "engine/stages.h"
#include "engine/stop.h"
#include "orrery/result.h"

namespace orrery {

class Teller {
 public:
  // `progress` may be empty. What is referenced outlives the teller.
  Teller(Backend& backend, const ProgressCallback& progress, StopWish stop, Forecast forecast,
         int64_t chunks);

  // Runs `body` as this stage: reports its beginning, its units as body calls finished(), and its
  // end, each once. `together`: every rank of the request runs it. Throws Error{cancelled}.
  void run(const Stage& stage, bool together, const std::function<void()>& body);
  // So many units of the stage that runs are finished. Every rank calls it after each denoising
  // step.
  void finished(int64_t units);
  // A place within the stage that runs where it may end: between layers, or (of encode and decode)
  // between frames that go through the VAE together.
  void pause();
  // Reports again what was reported last: something outside is waited for.
  void wait();

  void set_costs(StageCosts costs) { forecast_.set_costs(std::move(costs)); }
  StageRates rates() const { return forecast_.rates(); }
  const Times& times() const { return times_; }
  const OpTable& operations() const { return operations_; }  // of all stages

 private:
  void report();
  void end_if(bool asked) const;
  void count(int64_t units, double seconds);

  Backend& backend_;
  const ProgressCallback& progress_;
  StopWish stop_;
  Forecast forecast_;
  int64_t chunks_;
  Times times_;
  OpTable operations_;
  Stage stage_;
  bool together_ = false;
  int64_t done_ = 0;         // units of the stage
  double unit_seconds_ = 0;  // of the last one
  Clock::time_point start_, unit_start_;
};

}  // namespace orrery
