#include "support/source_dir.h"

#include <cstdlib>

namespace orrery {

std::filesystem::path source_dir() {
  const char* moved = std::getenv("ORRERY_SOURCE_DIR");
  return moved != nullptr ? moved : ORRERY_BUILT_FROM;
}

}  // namespace orrery
