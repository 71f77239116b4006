#include "published/make_checkpoint.h"

#include <cstdio>

#include "commands.h"
#include "interrupt.h"
#include "progress.h"

namespace orrery::cli {

int make_checkpoint(const std::filesystem::path& folder, CheckpointOptions options) {
  ProgressPrinter printer(false);
  options.log = [&](const std::string& sentence) { printer.line("note: " + sentence); };
  watch_interrupts();
  std::stop_source stop;
  orrery::make_checkpoint(
      folder, options,
      [&](const Progress& progress) {
        printer(progress);
        if (interrupted()) stop.request_stop();
      },
      stop.get_token());
  std::printf("%s\n", folder.string().c_str());
  return 0;
}

}  // namespace orrery::cli
