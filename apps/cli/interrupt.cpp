#include "interrupt.h"

#include <csignal>

namespace orrery::cli {

namespace {
// The one thing a signal handler may touch.
volatile std::sig_atomic_t received = 0;
}  // namespace

void watch_interrupts() {
  struct sigaction action {};
  action.sa_handler = [](int) { received = 1; };
  action.sa_flags = SA_RESETHAND;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool interrupted() { return received != 0; }

}  // namespace orrery::cli
