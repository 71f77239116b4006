// What a caller asks for and gets: plain data.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "orrery/choices.h"

namespace orrery {

// 8-bit RGB frames of one size, in memory.
struct Frames {
  int64_t count = 0;
  int64_t height = 0;
  int64_t width = 0;
  std::vector<uint8_t> rgb;  // [count, height, width, 3]
  double fps = 0;            // of the file they were read from; 0: not known
  const uint8_t* frame(int64_t i) const { return rgb.data() + i * height * width * 3; }
};

// A host tensor of floats, row-major.
struct FloatTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;
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

// One sample. Fields that are not set take the checkpoint's or the public pipeline's default.
struct Request {
  std::string prompt;
  std::string negative_prompt;
  std::optional<int64_t> height, width, num_frames;  // 720, 1280, 189
  std::optional<double> fps;  // 24; transfer: the given video's, else 10 for wsm alone
  std::optional<int64_t> num_inference_steps;  // 35; distilled checkpoints fix it
  std::optional<double> guidance_scale;        // 6; 1 runs one branch
  std::optional<double> flow_shift;            // sets Karras off, as the public entry point does
  std::optional<bool> karras;
  bool checkpoint_scheduler = false;  // the file's own settings, whatever they are
  int64_t seed = 0;
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
};

// What one attention preset did in the generation tower of a run.
struct AttentionUse {
  std::string preset;
  std::string implementation;  // what the backend ran
  int64_t calls = 0;
  int64_t dense_calls = 0;  // of the calls: those that know no blocks and read every key
  int64_t kept_blocks = 0;  // of the other calls, over all heads
  int64_t all_blocks = 0;
  double seconds = 0;  // 0 unless the run was profiled
};
// Mean over the calls of the share of key blocks that were read; a dense call reads all of them.
double kept_share(const std::vector<AttentionUse>& uses);
// One line for people.
std::string to_text(const AttentionUse& use);

struct Result {
  Frames frames;
  double fps = 24;
  FloatTensor latents;                    // final, normalised, [1, C, T, h, w]
  std::vector<std::vector<float>> sound;  // planar [channels][samples]; empty without sound
  int64_t sampling_rate = 0;
  std::optional<FloatTensor> action;    // [chunk, raw width], model-normalised
  std::vector<AttentionUse> attention;  // one entry for each preset that ran
  std::string report;                   // JSON: settings, seed, versions, times, memory, dispatch
  std::map<std::string, std::string> metadata;  // what an output file should carry
};

struct Progress {
  std::string
      stage;  // "guardrail", "prompt", "encode", "load", "warm-up", "denoise", "decode", "sound"
  int64_t step = 0;  // finished, of total
  int64_t total = 0;
  double seconds = 0;  // since the stage began
};
using ProgressCallback = std::function<void(const Progress&)>;

}  // namespace orrery
