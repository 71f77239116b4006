#include "interrupt.h"

#include <csignal>

namespace orrery::cli {

namespace {
// The one thing a signal handler may touch.
volatile std::sig_atomic_t received = 0;

// Kernels that oneDNN makes at run time keep values below the stack pointer, beyond the part that a
// signal leaves alone: a handler on the same stack overwrites them.
alignas(16) char handler_stack[1 << 16];
}  // namespace

void watch_interrupts() {
  stack_t stack{};
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof(handler_stack);
  sigaltstack(&stack, nullptr);
  struct sigaction action {};
  action.sa_handler = [](int) { received = 1; };
  action.sa_flags = SA_RESETHAND | SA_ONSTACK;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool interrupted() { return received != 0; }

}  // namespace orrery::cli
