#include <algorithm>
#include <cstdlib>
#include <string>

#include "base/error.h"
#include "dist/mpi_comm.h"

namespace orrery {

namespace {

// The positive number in an environment variable; 0 when there is none.
int number_in(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::max(0, std::atoi(value)) : 0;
}

// Launchers that start several processes without MPI: each would run the whole request.
void refuse_other_launchers() {
  struct Launcher {
    const char* name;
    const char* mark;  // set by this launcher alone
    const char* size;
    const char* rank;
  };
  constexpr Launcher kLaunchers[] = {
      {"torchrun", "TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK"},
      {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"},
  };
  for (const Launcher& launcher : kLaunchers) {
    const int size = number_in(launcher.size);
    if (std::getenv(launcher.mark) == nullptr || size <= 1) continue;
    fail(ErrorKind::unsupported, "this process is rank ", number_in(launcher.rank), " of ", size,
         " that ", launcher.name,
         " started, but not as an MPI job: each would run the whole request; start ranks with "
         "mpirun (or srun --mpi=pmi2), or one process with --cp-degree");
  }
}

}  // namespace

int mpi_job_size() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    if (const int size = number_in(name)) return size;
  }
  // Slurm's PMIx plugin names the size of the step only.
  if (std::getenv("PMIX_RANK") != nullptr && number_in("SLURM_STEP_NUM_TASKS") > 0) {
    return number_in("SLURM_STEP_NUM_TASKS");
  }
  refuse_other_launchers();
  return 1;
}

}  // namespace orrery
