// Where the repository lies: ORRERY_SOURCE_DIR of the environment when the tests have moved, else
// the folder they were built from.
#pragma once

#include <filesystem>

namespace orrery {

std::filesystem::path source_dir();

}  // namespace orrery
