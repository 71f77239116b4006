#include "orrery/compare.h"

#include <cstdio>

#include "commands.h"
#include "compare/panels.h"
#include "interrupt.h"
#include "orrery/media.h"
#include "progress.h"

namespace orrery::cli {

namespace fs = std::filesystem;

int compare(const Call& call) {
  ProgressPrinter printer(call.flags.has("quiet"));
  const auto note = [&](const std::string& sentence) { printer.line("note: " + sentence); };
  CompareOptions options;
  for (const std::string& attention : call.flags.texts("attention")) {
    options.strategies.push_back({strategy_name(attention, options.strategies.size()), attention});
  }
  if (options.strategies.empty())
    throw Error(ErrorKind::invalid_argument, "--attention is needed, once a strategy");
  Draft flags = call.flags;
  flags.erase("attention");
  const Draft draft = completed(flags, note);
  if (const int64_t repeats = draft.integer("repeats"); repeats > 0)
    options.repeats = static_cast<int>(repeats);
  const fs::path model = model_of(draft);
  const Request request = request_of(draft);
  EngineOptions engine = engine_options_of(draft);
  engine.log = note;
  const Outline outline = check_request(model, request, engine);
  fs::path video = draft.has("output") ? draft.text("output") : ".";
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
      orrery::compare(model, request, options, engine, progress, stop.get_token());

  const auto beside = [&](const char* extension) {
    return fs::path(video).replace_extension(extension);
  };
  save_side_by_side(video, outcomes, request.crf);
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
