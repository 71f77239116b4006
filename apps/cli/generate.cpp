#include <cstdio>

#include "commands.h"
#include "interrupt.h"
#include "orrery/media.h"
#include "progress.h"

namespace orrery::cli {

namespace {

namespace fs = std::filesystem;

// A folder stands for a file in it: of the request's name, if it has one.
fs::path output_file(const Draft& draft, int64_t frames) {
  const fs::path output = draft.has("output") ? draft.text("output") : ".";
  if (!fs::is_directory(output)) return output;
  const fs::path name = draft.has("name") ? fs::path(draft.text("name")).filename() : "sample";
  return output / (name.string() + (frames == 1 ? ".png" : ".mp4"));
}

void check_writable(const Draft& draft, std::string_view name) {
  const fs::path file = draft.text(name);
  if (file.empty()) return;
  const fs::path folder = file.has_parent_path() ? file.parent_path() : fs::path(".");
  if (!fs::is_directory(folder)) {
    throw Error(ErrorKind::not_found,
                draft.find(name)->from + ": the folder " + folder.string() + " does not exist");
  }
}

// Sound has a place to go, and a place is given for sound only.
void check_sound(const Draft& draft, const fs::path& output, const Outline& outline) {
  if (outline.sampling_rate == 0 && draft.has("save_sound")) {
    throw Error(ErrorKind::invalid_argument, "--save-sound: no sound is made; add --enable-sound");
  }
  if (outline.sampling_rate > 0 && is_still(output) && !draft.has("save_sound")) {
    throw Error(
        ErrorKind::invalid_argument,
        "--enable-sound: a still image holds no sound; name a file for it with --save-sound");
  }
}

void save(const Draft& draft, const fs::path& output, const Result& result, int crf) {
  save_output(output, result, crf);
  if (draft.has("save_latents")) save_latents(draft.text("save_latents"), result);
  if (draft.has("save_sound")) save_sound(draft.text("save_sound"), result);
  fs::path action = draft.text("save_action");
  if (action.empty() && result.action && fs::is_directory(draft.text("output")))
    action = fs::path(draft.text("output")) / "sample_action.json";
  if (!action.empty()) save_action(action, result);
  if (draft.has("report")) save_text(draft.text("report"), result.report);
}

}  // namespace

int generate(const Call& call) {
  Job& job = call.job;
  const bool leads = job.rank() == 0;
  ProgressPrinter printer(call.flags.has("quiet") || !leads);
  const auto note = [&](const std::string& sentence) { printer.line("note: " + sentence); };

  // Everything that can be refused is refused before a weight is read.
  Draft draft;
  Request request;
  EngineOptions options;
  fs::path model, output;
  job.agree([&] {
    draft = completed(call.flags, note);
    model = model_of(draft);
    request = request_of(draft);
    options = engine_options_of(draft);
    const Outline outline = check_request(model, request, options);
    if (leads) {
      output = output_file(draft, outline.frames);
      check_output(output, outline.frames, outline.sampling_rate);
      check_sound(draft, output, outline);
      for (const char* name : {"save_latents", "save_action", "save_sound", "report"})
        check_writable(draft, name);
    }
    return outline.fingerprint;
  });

  options.job = &job;
  options.log = note;
  watch_interrupts();
  Engine engine = Engine::open(model, options);
  printer.line("orrery " + version() + " on " + engine.device_description());
  printer.line(engine.describe(request));
  std::stop_source stop;
  Events events;
  events.progress = [&](const Progress& progress) {
    printer(progress);
    if (interrupted()) stop.request_stop();
  };
  const Result result = engine.generate(request, events, stop.get_token());
  if (!leads) return 0;

  for (const AttentionUse& use : result.attention) printer.line("attention: " + to_text(use));
  save(draft, output, result, request.crf);
  std::printf("%s\n", output.string().c_str());
  return 0;
}

int plan(const Call& call) {
  const auto note = [](const std::string& sentence) {
    std::fprintf(stderr, "note: %s\n", sentence.c_str());
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
