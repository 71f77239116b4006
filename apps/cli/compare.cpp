#include "orrery/compare.h"

#include <cstdio>

#include "commands.h"
#include "compare/panels.h"
#include "interrupt.h"
#include "outputs.h"
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
  if (video.filename().empty() || fs::is_directory(video)) video /= "compare.mp4";
  check_format(format_of(video), outline.frames);
  const auto beside = [&](const char* extension) {
    return fs::path(video).replace_extension(extension);
  };
  watch_signals();
  FileClaims claims;
  claim_inputs(claims, draft, request, engine);
  for (const ComparedStrategy& strategy : options.strategies) {
    if (strategy.attention.find('{') == std::string::npos)
      claims.reads("--attention", strategy.attention);
  }
  std::vector<OutputFile> outputs;
  for (const fs::path& file : {video, beside(".png"), beside(".json"), beside(".txt")}) {
    outputs.push_back(claims.open("--output", file));
  }

  printer.line(outline.summary);
  const StopOnSignal stop(!call.flags.has("quiet"));
  const auto progress = [&](const Progress& p) { printer(p); };
  const auto outcomes = orrery::compare(model, request, options, engine, progress, stop.token());

  Result sheet;
  sheet.frames = contact_sheet(outcomes);
  outputs[0].write(encode_side_by_side(outcomes, video.string(), request.crf));
  outputs[1].write(encode(sheet, Format::png));
  outputs[2].write(to_json(outcomes));
  outputs[3].write(to_text(outcomes));
  std::printf("%s", to_text(outcomes).c_str());
  for (OutputFile& output : outputs) {
    output.commit();
    printer.line(output.target().string());
  }
  return 0;
}

}  // namespace orrery::cli
