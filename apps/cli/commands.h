// The commands of the program, free of the option parser.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "orrery/compare.h"
#include "orrery/engine.h"
#include "orrery/job.h"
#include "published/make_checkpoint.h"

namespace orrery::cli {

// Flags that name files rather than settings.
struct GenerateFiles {
  std::filesystem::path model;
  std::filesystem::path output = ".";
  std::filesystem::path prompt_file;
  std::filesystem::path vision, video, action;
  std::filesystem::path latents, save_latents, save_action, save_sound, report;
  int crf = 18;
  bool quiet = false;
};

struct CompareFiles {
  GenerateFiles inputs;  // the video is inputs.output; what lies beside it has the same name
  std::vector<std::string> attention;
};

// Reads the files that belong to the request. In action modes --vision-path may be a video, as in
// the public entry point.
void load_inputs(Request& request, const GenerateFiles& files);

// Each returns the process's exit status or throws Error.
// `job`: the processes that run the request together; rank 0 alone prints and writes.
int generate(Request request, const GenerateFiles& files, EngineOptions options, Job& job);
int compare(Request request, const CompareFiles& files, CompareOptions options,
            EngineOptions engine);
int plan(Request request, const GenerateFiles& files, EngineOptions options, bool json);
int make_checkpoint(const std::filesystem::path& folder, CheckpointOptions options);

// 0 ok, 2 a request or file that must be mended, 3 blocked by the guardrail, 4 no verdict of the
// guardrail, 130 interrupted, 1 anything else. docs/modes.md lists them.
int exit_status(ErrorKind kind);

}  // namespace orrery::cli
