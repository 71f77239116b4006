// Ctrl-C asks for an orderly stop; a second one ends the process at once.
#pragma once

namespace orrery::cli {

void watch_interrupts();
bool interrupted();

}  // namespace orrery::cli
