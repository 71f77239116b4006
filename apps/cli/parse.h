// From the words of the command line to a command's fields.
#pragma once

#include <string>

#include "commands.h"

namespace orrery::cli {

// What the words ask for besides a command: `text` is printed, the status is 0.
struct Answer {
  std::string text;
};

// The command that the line names, and its flags. Throws Error{invalid_argument} with a sentence.
// Where help or the version is asked for, `answer` is set and the result means nothing.
const Command& parse(int argc, const char* const* argv, Draft& flags, Answer& answer);

}  // namespace orrery::cli
