#include "base/provenance.h"

#include <cstdlib>
#include <ctime>

#include "orrery_build.h"

namespace orrery {

std::string measured_commit() {
  const char* commit = std::getenv("ORRERY_COMMIT");
  return commit != nullptr ? commit : ORRERY_BUILD_COMMIT;
}

std::string today() {
  char text[16];
  const std::time_t now = std::time(nullptr);
  std::strftime(text, sizeof text, "%Y-%m-%d", std::gmtime(&now));
  return text;
}

}  // namespace orrery
