#include "orrery/compare.h"

#include <cstdio>

#include "commands.h"
#include "compare/panels.h"
#include "interrupt.h"
#include "orrery/media.h"
#include "progress.h"

namespace orrery::cli {

namespace fs = std::filesystem;

int compare(Request request, const CompareFiles& files, CompareOptions options,
            EngineOptions engine) {
  ProgressPrinter printer(files.inputs.quiet);
  engine.log = [&](const std::string& sentence) { printer.line("note: " + sentence); };
  load_inputs(request, files.inputs);
  for (const std::string& attention : files.attention) {
    options.strategies.push_back({strategy_name(attention, options.strategies.size()), attention});
  }
  const Outline outline = check_request(files.inputs.model, request);
  fs::path video = files.inputs.output;
  if (fs::is_directory(video)) video /= "compare.mp4";
  check_output(video, outline.frames);

  watch_interrupts();
  printer.line(outline.summary);
  std::stop_source stop;
  const auto progress = [&](const Progress& p) {
    printer(p);
    if (interrupted()) stop.request_stop();
  };
  const auto outcomes =
      orrery::compare(files.inputs.model, request, options, engine, progress, stop.get_token());

  const auto beside = [&](const char* extension) {
    return fs::path(video).replace_extension(extension);
  };
  save_side_by_side(video, outcomes, files.inputs.crf);
  Result sheet;
  sheet.frames = contact_sheet(outcomes);
  save_output(beside(".png"), sheet);
  save_text(beside(".json"), to_json(outcomes));
  save_text(beside(".txt"), to_text(outcomes));
  std::printf("%s", to_text(outcomes).c_str());
  for (const fs::path& file : {video, beside(".png"), beside(".json"), beside(".txt")}) {
    printer.line(file.string());
  }
  return 0;
}

}  // namespace orrery::cli
