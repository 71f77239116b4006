#include <cstdio>
#include <optional>

#include "commands.h"
#include "interrupt.h"
#include "orrery/version.h"
#include "outputs.h"
#include "printable.h"
#include "progress.h"

namespace orrery::cli {

int generate(const Call& call) {
  Job& job = call.job;
  const bool leads = job.rank() == 0;
  ProgressPrinter printer(call.flags.has("quiet") || !leads);
  const auto note = [&](const std::string& sentence) { printer.line("note: " + sentence); };

  // Everything that can be refused is refused before a weight is read, and a signal leaves no file.
  watch_signals();
  Draft draft;
  Request request;
  EngineOptions options;
  std::filesystem::path model;
  std::optional<Outputs> outputs;
  job.agree([&] {
    draft = completed(call.flags, note);
    model = model_of(draft);
    request = request_of(draft);
    options = engine_options_of(draft);
    options.job = &job;
    options.log = note;
    const Outline outline = check_request(model, request, options);
    if (leads) outputs.emplace(draft, request, options, outline);
    return outline.fingerprint;
  });

  const StopOnSignal stop(leads && !call.flags.has("quiet"));
  Engine engine = Engine::open(model, options);
  printer.line("orrery " + version() + " on " + engine.device_description());
  printer.line(engine.describe(request));
  Events events;
  events.progress = [&](const Progress& progress) { printer(progress); };
  const Result result = engine.generate(request, events, stop.token());
  if (!leads) return 0;

  for (const AttentionUse& use : result.attention) printer.line("attention: " + to_text(use));
  outputs->save(result);
  outputs->print_names();
  return 0;
}

int plan(const Call& call) {
  const auto note = [](const std::string& sentence) {
    std::fprintf(stderr, "note: %s\n", printable(sentence).c_str());
  };
  const Draft draft = completed(call.flags, note);
  Request request = request_of(draft);
  if (request.prompt.empty()) request.prompt = "A prompt.";  // its length counts
  const Plan plan = plan_request(model_of(draft), request, engine_options_of(draft));
  if (draft.has("json")) {
    std::printf("%s\n", to_json(plan).c_str());
    return 0;
  }
  std::printf("%s\n", plan.summary.c_str());
  std::printf("tokens      %lld generation, %lld text\n", static_cast<long long>(plan.tokens),
              static_cast<long long>(plan.text_tokens));
  std::printf("memory      %.1f MB weights, %.1f MB activations, %.1f MB state\n",
              1e-6 * static_cast<double>(plan.weight_bytes),
              1e-6 * static_cast<double>(plan.activation_bytes),
              1e-6 * static_cast<double>(plan.state_bytes));
  std::printf("            %.1f MB at once%s", 1e-6 * static_cast<double>(plan.peak_bytes),
              plan.pinned_bytes > 0 ? "" : "\n");
  if (plan.pinned_bytes > 0)
    std::printf(", %.1f MB pinned in host memory\n", 1e-6 * static_cast<double>(plan.pinned_bytes));
  for (const Plan::Stage& stage : plan.stages) {
    std::printf("%-11s %12.3f GFLOP %12.3f GB", stage.name.c_str(), stage.flops * 1e-9,
                stage.bytes * 1e-9);
    if (stage.floor_seconds > 0) std::printf("   floor %9.3f s", stage.floor_seconds);
    std::printf("\n");
  }
  std::printf("%s\n", plan.ceiling.c_str());
  return 0;
}

}  // namespace orrery::cli
