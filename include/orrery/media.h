// Reading what a request is conditioned on and writing what it made.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "orrery/export.h"
#include "orrery/result.h"

namespace ORRERY_API orrery {

// Which frames of a clip are decoded and kept, and at which size.
struct ClipLimits {
  int64_t max_frames = 0;  // 0: all
  VideoKeep keep = VideoKeep::first;
  int64_t height = 0, width = 0;  // brought to this size as they are decoded; 0: as stored
  VideoFit fit = VideoFit::stretch;
};
// What can matter of Request::video, or of the video of a control, to a request whose other
// settings are in place.
ClipLimits clip_limits(const Request& request);

Frames load_image(const std::filesystem::path& file);
Frames load_video(const std::filesystem::path& file, const ClipLimits& limits = {});
// A video, or a still picture (by its extension) as a clip of one frame.
Frames load_clip(const std::filesystem::path& file, const ClipLimits& limits = {});
// The same from memory; `name` stands for the file in messages.
Frames decode_picture(std::span<const uint8_t> bytes, const std::string& name = "picture");
Frames decode_clip(std::span<const uint8_t> bytes, const ClipLimits& limits = {},
                   const std::string& name = "clip");
// JSON ([[...], ...], {"actions": [[...], ...]}, or either in one more pair of brackets) or
// safetensors ("actions").
FloatTensor load_actions(const std::filesystem::path& file);
// A safetensors file with a tensor "latents".
FloatTensor load_latents(const std::filesystem::path& file);

// What pictures and clips are written as.
enum class Format { png, jpeg, mp4, mov, mkv, webm };
// By the extension, in any case; refuses others with a list of those that this build writes.
Format format_of(const std::filesystem::path& file);
bool is_still(Format format);
// Refuses, before generation, what `format` cannot hold: many frames in a still picture, sound of a
// rate that it cannot write (`sampling_rate`; 0: no sound), an encoder this build lacks.
void check_format(Format format, int64_t frames, int64_t sampling_rate = 0);

// The bytes of a picture (one frame) or a video with sound. crf: 1 (best) to 51, of videos.
std::vector<uint8_t> encode(const Result& result, Format format, int crf = 18);
std::vector<uint8_t> encode_latents(const Result& result);  // safetensors, "latents"
std::vector<uint8_t> encode_sound(const Result& result);    // WAV
// Refuses a result without actions. JSON {"actions": [[...], ...]}, or safetensors "actions".
enum class ActionFormat { json, safetensors };
ActionFormat action_format_of(const std::filesystem::path& file);  // JSON unless .safetensors
std::vector<uint8_t> encode_action(const Result& result, ActionFormat format);

// A report (Result::report) that also names the files that were written, by what they hold.
std::string with_files(const std::string& report, const std::map<std::string, std::string>& files);

// The same as an output file (orrery/output.h), whose extension names the format.
void save_output(const std::filesystem::path& file, const Result& result, int crf = 18);
void save_latents(const std::filesystem::path& file, const Result& result);
void save_action(const std::filesystem::path& file, const Result& result);
void save_sound(const std::filesystem::path& file, const Result& result);
void save_text(const std::filesystem::path& file, const std::string& text);

}  // namespace orrery
