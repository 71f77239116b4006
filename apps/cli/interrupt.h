// Signals of the program.
#pragma once

#include <stop_token>
#include <thread>

namespace orrery::cli {

// SIGINT (Ctrl-C), SIGTERM and SIGHUP ask for an orderly stop; a second one ends the process at
// once. A file that grows beyond a limit and a pipe that is closed become errors of the write. A
// mapped file that is cut short while it is read ends the process with a sentence.
void watch_signals();
bool interrupted();

// Requests a stop when a signal asks for one. Each rank's process has its own: a signal to any of
// them stops the job.
class StopOnSignal {
 public:
  // `says_so`: one line on standard error when it happens.
  explicit StopOnSignal(bool says_so);
  std::stop_token token() const { return source_.get_token(); }

 private:
  std::stop_source source_;
  std::jthread watcher_;
};

}  // namespace orrery::cli
