// What the program says when its flags do not parse.
#pragma once

#include <string>

namespace CLI {
class App;
class Error;
}  // namespace CLI

namespace orrery::cli {

// A sentence and where to read on. An unknown flag is answered with the nearest known one of the
// subcommand, where one is near.
std::string explain_failure(const CLI::App* app, const CLI::Error& error);

}  // namespace orrery::cli
