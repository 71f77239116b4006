#include <cstdio>

#include "commands.h"
#include "interrupt.h"
#include "orrery/media.h"
#include "progress.h"

namespace orrery::cli {

namespace {

namespace fs = std::filesystem;

// A folder stands for a file of the usual name in it.
fs::path output_file(const fs::path& output, int64_t frames) {
  if (!fs::is_directory(output)) return output;
  return output / (frames == 1 ? "sample.png" : "sample.mp4");
}

void check_writable(const fs::path& file, const char* flag) {
  if (file.empty()) return;
  const fs::path folder = file.has_parent_path() ? file.parent_path() : fs::path(".");
  if (!fs::is_directory(folder)) {
    throw Error(ErrorKind::not_found,
                std::string(flag) + ": the folder " + folder.string() + " does not exist");
  }
}

// Sound has a place to go, and a place is given for sound only.
void check_sound(const GenerateFiles& files, const fs::path& output, const Outline& outline) {
  if (outline.sampling_rate == 0 && !files.save_sound.empty()) {
    throw Error(ErrorKind::invalid_argument, "--save-sound: no sound is made; add --enable-sound");
  }
  if (outline.sampling_rate > 0 && is_still(output) && files.save_sound.empty()) {
    throw Error(
        ErrorKind::invalid_argument,
        "--enable-sound: a still image holds no sound; name a file for it with --save-sound");
  }
}

}  // namespace

int exit_status(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::invalid_argument:
    case ErrorKind::not_found:
    case ErrorKind::corrupt:
    case ErrorKind::unsupported:
    case ErrorKind::numeric: return 2;
    case ErrorKind::blocked: return 3;
    case ErrorKind::guardrail: return 4;
    case ErrorKind::cancelled: return 130;
    case ErrorKind::out_of_memory:
    case ErrorKind::device: return 1;
  }
  return 1;
}

void load_inputs(Request& request, const GenerateFiles& files) {
  if (!files.prompt_file.empty()) load_prompt(files.prompt_file, request);
  if (!files.vision.empty()) {
    Frames clip = request.action ? load_clip(files.vision) : load_image(files.vision);
    (clip.count == 1 ? request.image : request.video) = std::move(clip);
  }
  if (!files.video.empty()) {
    if (request.video) {
      throw Error(ErrorKind::invalid_argument,
                  "--vision-path and --video-path are both videos; give one of them");
    }
    request.video = load_video(files.video);
  }
  if (!files.action.empty() && request.action)
    request.action->raw_actions = load_actions(files.action);
  if (!files.latents.empty()) request.latents = load_latents(files.latents);
}

int generate(Request request, const GenerateFiles& files, EngineOptions options, Job& job) {
  const bool leads = job.rank() == 0;
  ProgressPrinter printer(files.quiet || !leads);
  options.job = &job;
  options.log = [&](const std::string& sentence) { printer.line("note: " + sentence); };

  // Everything that can be refused is refused before a weight is read.
  fs::path output;
  job.agree([&] {
    load_inputs(request, files);
    const Outline outline = check_request(files.model, request, options);
    if (leads) {
      output = output_file(files.output, outline.frames);
      check_output(output, outline.frames, outline.sampling_rate);
      check_sound(files, output, outline);
      check_writable(files.save_latents, "--save-latents");
      check_writable(files.save_action, "--save-action");
      check_writable(files.save_sound, "--save-sound");
      check_writable(files.report, "--report");
    }
    return outline.fingerprint;
  });

  watch_interrupts();
  Engine engine = Engine::open(files.model, options);
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
  save_output(output, result, files.crf);
  if (!files.save_latents.empty()) save_latents(files.save_latents, result);
  if (!files.save_sound.empty()) save_sound(files.save_sound, result);
  fs::path action = files.save_action;
  if (action.empty() && result.action && fs::is_directory(files.output))
    action = files.output / "sample_action.json";
  if (!action.empty()) save_action(action, result);
  if (!files.report.empty()) save_text(files.report, result.report);
  std::printf("%s\n", output.string().c_str());
  return 0;
}

int plan(Request request, const GenerateFiles& files, EngineOptions options, bool json) {
  load_inputs(request, files);
  const Plan plan = plan_request(files.model, request, options);
  if (json) {
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
