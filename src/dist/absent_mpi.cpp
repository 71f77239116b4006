#include "base/error.h"
#include "dist/mpi_comm.h"

namespace orrery {

std::unique_ptr<MpiWorld> make_mpi_world() {
  fail(ErrorKind::unsupported, "this process is one of ", mpi_job_size(),
       " that mpirun started, but this build has no MPI; build with -DORRERY_MPI=ON, or start one "
       "process without mpirun: it runs its ranks as threads");
}

}  // namespace orrery
