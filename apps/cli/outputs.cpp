#include "outputs.h"

#include <cstdio>
#include <optional>
#include <utility>

namespace orrery::cli {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void refuse(const std::string& sentence) {
  throw Error(ErrorKind::invalid_argument, sentence);
}

// A folder, there or named by a closing slash, stands for a file in it: of the request's name, if
// it has one.
fs::path media_file(const Draft& draft, int64_t frames) {
  const fs::path output = draft.has("output") ? draft.text("output") : ".";
  if (!output.filename().empty() && !fs::is_directory(output)) return output;
  const fs::path name = draft.has("name") ? fs::path(draft.text("name")).filename() : "sample";
  return output / (name.string() + (frames == 1 ? ".png" : ".mp4"));
}

// Predicted actions are kept beside the video unless a place for them is given.
fs::path action_file(const fs::path& video) {
  return video.parent_path() / (video.stem().string() + "_action.json");
}

// Every result has a place to go, and a place is given for results that there are only.
void check_results(const Draft& draft, Format format, const Outline& outline) {
  if (outline.sampling_rate == 0 && draft.has("save_sound")) {
    refuse("--save-sound: no sound is made; add --enable-sound");
  }
  if (outline.sampling_rate > 0 && is_still(format) && !draft.has("save_sound")) {
    refuse("--enable-sound: a still image holds no sound; name a file for it with --save-sound");
  }
  if (!outline.predicts_action && draft.has("save_action")) {
    refuse(
        "--save-action: no actions are predicted; they are by --action-mode policy and "
        "inverse_dynamics");
  }
}

// The model's own files, and not what was written beside them.
bool is_model_file(const fs::path& file) {
  for (const char* extension : {".json", ".safetensors", ".jinja", ".txt"}) {
    if (file.extension() == extension) return true;
  }
  return false;
}

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

void claim_inputs(FileClaims& claims, const Draft& draft, const Request& request,
                  const EngineOptions& options) {
  const auto claim = [&](const char* name, const fs::path& file) {
    const Draft::Value* value = draft.find(name);
    const auto folder = draft.folders.find(name);
    const bool is_beside = folder != draft.folders.end() && file.is_relative();
    claims.reads(value != nullptr ? value->from : name, is_beside ? folder->second / file : file);
  };
  for (const char* name :
       {"prompt_file", "from", "vision_path", "video_path", "action_path", "latents"}) {
    if (draft.has(name)) claim(name, draft.text(name));
  }
  if (request.transfer) {
    for (const Control& control : request.transfer->controls) {
      if (control.video.source) claim("control", control.video.source->path);
    }
  }
  for (const LoraFile& lora : options.lora) claims.reads("--lora", lora.file);
  if (options.attention.find('{') == std::string::npos) {
    claims.reads("--attention", options.attention);
  }
  std::error_code error;
  for (fs::recursive_directory_iterator at(model_of(draft), error), end; !error && at != end;
       at.increment(error)) {
    if (is_model_file(at->path())) claims.reads("--model", at->path());
  }
}

Outputs::Outputs(const Draft& draft, const Request& request, const EngineOptions& options,
                 const Outline& outline) {
  const fs::path media = media_file(draft, outline.frames);
  if (media == "-") {
    refuse("--output -: pictures and videos are not written to standard output; name a file");
  }
  const Format format = format_of(media);
  check_format(format, outline.frames, outline.sampling_rate);
  check_results(draft, format, outline);
  claim_inputs(claims_, draft, request, options);
  const auto open_if_given = [&](const char* role, const char* name, auto encode) {
    if (const Draft::Value* value = draft.find(name))
      open(role, value->from, draft.text(name), encode);
  };
  open("output", "--output", media,
       [format, crf = request.crf](const Result& result) { return encode(result, format, crf); });
  open_if_given("latents", "save_latents", encode_latents);
  open_if_given("sound", "save_sound", encode_sound);
  if (outline.predicts_action) {
    const fs::path file =
        draft.has("save_action") ? fs::path(draft.text("save_action")) : action_file(media);
    open("action", "--save-action", file, [kind = action_format_of(file)](const Result& result) {
      return encode_action(result, kind);
    });
  }
  open_if_given("report", "report", [this](const Result& result) {
    return bytes_of(with_files(result.report, names_));
  });
}

void Outputs::open(const std::string& role, const std::string& from, const fs::path& file,
                   std::function<std::vector<uint8_t>(const Result&)> encode) {
  outputs_.push_back({role, claims_.open(from, file), std::move(encode)});
}

void Outputs::save(const Result& result) {
  std::string failed, written;
  std::optional<ErrorKind> kind;
  for (Output& output : outputs_) {
    const std::string name = output.file.target().string();
    try {
      output.file.write(output.encode(result));
      output.file.commit();
      names_[output.role] = name;
      written += (written.empty() ? "" : ", ") + name;
    } catch (const Error& error) {
      if (!kind) kind = error.kind();
      failed += (failed.empty() ? "" : "; ") + std::string(error.what());
    }
  }
  if (kind) throw Error(*kind, failed + "; written: " + (written.empty() ? "nothing" : written));
}

void Outputs::print_names() const {
  // Standard output may be one of the files.
  std::FILE* to = stdout;
  for (const Output& output : outputs_) {
    if (output.file.is_standard_output()) to = stderr;
  }
  for (const char* role : {"output", "action"}) {
    if (const auto name = names_.find(role); name != names_.end()) {
      std::fprintf(to, "%s\n", name->second.c_str());
    }
  }
}

}  // namespace orrery::cli
