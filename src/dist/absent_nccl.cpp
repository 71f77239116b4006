#include "base/error.h"
#include "dist/nccl_comm.h"

namespace orrery {

bool is_nccl_built() { return false; }

std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator> host,
                                                     const NcclDevice&) {
  fail(ErrorKind::unsupported, "a group of ", host->size(),
       " ranks on CUDA devices needs NCCL, which this build lacks; build with -DORRERY_NCCL=ON, or "
       "run on the CPU (--device cpu)");
}

}  // namespace orrery
