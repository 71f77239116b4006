// Ranks that are processes which mpirun started. Host memory only. Without MPI in the build,
// make_mpi_world() refuses with a sentence.
#pragma once

#include <memory>

#include "dist/world.h"

namespace orrery {

// How many processes the launcher of this one started (read from what it left in the environment);
// 1 without a launcher.
int mpi_job_size();

class MpiWorld : public World {
 public:
  virtual int rank() const = 0;
  // This rank's place among those on its machine.
  virtual int local_index() const = 0;
  // All ranks, for what must be agreed on before a mesh exists.
  virtual Communicator& all() = 0;
  // Ends every process of the job with this status.
  [[noreturn]] virtual void abort(int status) = 0;
};

// Joins the job. Once per process, on the thread that will run().
std::unique_ptr<MpiWorld> make_mpi_world();

}  // namespace orrery
