// What a Job holds, for the engine.
#pragma once

#include <memory>

#include "dist/mpi_comm.h"
#include "orrery/job.h"

namespace orrery {

struct Job::State {
  std::shared_ptr<MpiWorld> world;  // null: this process is alone
  bool failed_together = false;
};

}  // namespace orrery
