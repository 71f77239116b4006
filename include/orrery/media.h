// Reading what a request is conditioned on and writing what it made.
#pragma once

#include <filesystem>
#include <string>

#include "orrery/export.h"
#include "orrery/result.h"

namespace ORRERY_API orrery {

Frames load_image(const std::filesystem::path& file);
// At most max_frames frames (0: all).
Frames load_video(const std::filesystem::path& file, int64_t max_frames = 0);
// A video, or a still picture (by its extension) as a clip of one frame.
Frames load_clip(const std::filesystem::path& file);
// JSON ([[...], ...], {"actions": [[...], ...]}, or either in one more pair of brackets) or
// safetensors ("actions").
FloatTensor load_actions(const std::filesystem::path& file);
// A safetensors file with a tensor "latents".
FloatTensor load_latents(const std::filesystem::path& file);

// Refuses, before generation, an output that could not be written: unknown extension, a still image
// for many frames, a folder that is missing or not writable, an encoder this build lacks, sound of
// a rate that it cannot write (`sampling_rate`; 0: no sound).
void check_output(const std::filesystem::path& file, int64_t frames, int64_t sampling_rate = 0);
// Whether the extension is that of a still picture.
bool is_still(const std::filesystem::path& file);
// Writes a picture (one frame) or a video with sound; to a temporary file, then renamed.
void save_output(const std::filesystem::path& file, const Result& result, int crf = 18);
void save_latents(const std::filesystem::path& file, const Result& result);
void save_action(const std::filesystem::path& file, const Result& result);  // .json or .safetensors
void save_sound(const std::filesystem::path& file, const Result& result);   // .wav
void save_text(const std::filesystem::path& file, const std::string& text);

}  // namespace orrery
