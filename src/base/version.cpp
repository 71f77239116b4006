#include "orrery/version.h"

#include "base/error.h"
#include "orrery_build.h"

namespace orrery {

std::string version() { return ORRERY_VERSION; }

std::string build_description() {
  return concat(version(), " (commit ", ORRERY_BUILD_COMMIT, ", ", ORRERY_BUILD_PARTS, ")");
}

}  // namespace orrery
