// What a caller asks for: plain data.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "orrery/choices.h"
#include "orrery/export.h"

namespace ORRERY_API orrery {

// The file that something was read from, so that a report can name it and a later run can tell
// whether it is still the same.
struct SourceFile {
  std::string path;    // as it was written
  std::string sha256;  // of its bytes, 64 hexadecimal digits
};

// 8-bit RGB frames of one size, in memory.
struct Frames {
  int64_t count = 0;
  int64_t height = 0;
  int64_t width = 0;
  std::vector<uint8_t> rgb;               // [count, height, width, 3]
  double fps = 0;                         // of the file they were read from; 0: not known
  std::optional<SourceFile> source = {};  // empty: made in memory
  const uint8_t* frame(int64_t i) const { return rgb.data() + i * height * width * 3; }
};

// A host tensor of floats, row-major.
struct FloatTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;
  std::optional<SourceFile> source = {};  // empty: made in memory
};

struct ActionRequest {
  ActionMode mode = ActionMode::policy;
  int64_t chunk_size = 16;
  std::string domain_name;  // "pusht", "bridge_orig_lerobot", ...
  ViewPoint view_point = ViewPoint::ego_view;
  int64_t resolution_tier = 480;
  std::optional<FloatTensor>
      raw_actions;  // [rows, width], model-normalised; forward_dynamics needs it
};

// A video that steers the structure of the result: edges, a blurred picture, depth, ...
struct Control {
  ControlHint hint = ControlHint::edge;
  Frames video;                       // empty: computed from Request::video, for edge and blur
  std::optional<double> weight = {};  // of several; not negative; they are normalised to sum 1
  std::optional<ControlPreset> preset = {};  // of a computed one; medium
};

// Both ends included, in timesteps (0 to 1000).
struct TimestepInterval {
  double begin = 0, end = 1000;
  bool holds(double timestep) const { return begin <= timestep && timestep <= end; }
};

// Structural control. Longer clips than a chunk are made chunk by chunk, each continuing the last
// frames of the one before.
struct TransferRequest {
  std::vector<Control> controls;                   // one per hint
  std::optional<double> control_guidance;          // 1: none; default by hint
  int64_t num_conditional_frames = 1;              // that a chunk takes over from the one before
  int64_t num_first_chunk_conditional_frames = 0;  // of Request::video, fixed in the first chunk
  std::optional<int64_t>
      num_video_frames_per_chunk;  // default: all frames; 101 for a wsm control alone
  std::optional<TimestepInterval> guidance_interval;  // guidance is 1 outside
  std::optional<TimestepInterval> control_guidance_interval;
  ControlAttention attention = ControlAttention::weighted;
  bool emphasize_control_in_prompt =
      false;  // adds a sentence that names the controls to the prompt
  ChunkNoise chunk_noise = ChunkNoise::continued;
};

// One sample. src/engine/request_fields.cpp says of each field what it means, its limits and its
// names in flags and JSON; a new member needs a row there. Fields that are not set take the
// checkpoint's or the public pipeline's default.
struct Request {
  std::string prompt;
  std::string negative_prompt;
  std::optional<int64_t> height, width, num_frames;  // 720, 1280, 189
  std::optional<double> fps;  // 24; transfer: the given video's, else 10 for wsm alone
  std::optional<int64_t> num_inference_steps;  // 35; distilled checkpoints fix it
  std::optional<double> guidance_scale;        // 6; 1 runs one branch
  std::optional<double> flow_shift;            // sets Karras off, as the public entry point does
  std::optional<bool> karras;
  SamplerSource scheduler = SamplerSource::automatic;
  int64_t seed = 0;  // PyTorch's manual_seed: a negative one means 2^64 + seed
  RngKind rng = RngKind::cpu;
  NoiseType noise_dtype = NoiseType::automatic;
  std::optional<bool> use_system_prompt;  // the checkpoint's default
  bool add_duration_template = true;
  bool add_resolution_template = true;

  // Conditioning: at most one of image and video.
  std::optional<Frames> image;  // one frame
  std::optional<Frames> video;
  std::vector<int64_t> condition_frame_indexes_vision{0, 1};
  VideoKeep condition_video_keep = VideoKeep::first;
  VideoFit video_fit = VideoFit::stretch;
  bool enable_sound = false;
  std::optional<ActionRequest> action;
  std::optional<TransferRequest> transfer;

  // Initial noise of the vision latents instead of the seed's, [C, T, h, w] or [1, C, T, h, w].
  std::optional<FloatTensor> latents;

  bool vae_tiling = false;  // decode and encode in spatial tiles
  int crf = 18;             // H.264 quality of a video file, 1 (best) to 51
};

}  // namespace orrery
