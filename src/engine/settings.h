// A request resolved against a checkpoint: every default filled in, every contradiction refused.
// Pure: reads configs, touches no weight.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "io/resize.h"
#include "model/scheduler.h"
#include "model/sound.h"
#include "model/transformer_config.h"
#include "model/vae.h"
#include "orrery/request.h"
#include "text/prompt.h"

namespace orrery {

inline constexpr int64_t kDefaultHeight = 720, kDefaultWidth = 1280, kDefaultFrames = 189;
inline constexpr int64_t kMaxSide = 16384, kMaxFrames = 5000;

enum class Mode {
  text_to_image,
  text_to_video,
  image_to_video,
  video_to_video,
  policy,
  forward_dynamics,
  inverse_dynamics,
  transfer,
};
std::string_view name_of(Mode mode);

// What the configs of a checkpoint say; read once when it is opened.
struct Checkpoint {
  ModelFolder folder;
  TransformerConfig transformer;
  VaeConfig vae;
  std::optional<SoundConfig> sound;
  SchedulerConfig scheduler;
  std::optional<Json> attention_strategy;  // runtime.attention_strategy of transformer/config.json

  bool makes_sound() const { return sound && transformer.sound_gen; }
};
Checkpoint read_checkpoint(const std::filesystem::path& model);

struct ActionSettings {
  int64_t chunk = 0;
  int64_t domain = 0;
  int64_t raw_width = 0;
  bool noisy = true;         // forward dynamics is given its actions
  std::vector<float> clean;  // [chunk, action_dim], zero-padded; forward dynamics
};

// What is fixed in a stretch of video that is denoised at once.
struct Conditioning {
  std::vector<bool> noisy;     // per latent frame
  int64_t encoded_frames = 0;  // pixel frames that can matter: the causal prefix; 0: none
};

struct TransferSettings {
  std::vector<std::string> hints;  // in the reference's order; of request.transfer's controls
  std::vector<size_t> order;       // hints[i] is the request's control order[i]
  std::vector<float> weights;      // normalised; empty: joint attention
  double control_guidance = 1;
  TimestepInterval guidance_interval, control_guidance_interval;
  int64_t chunk = 0;   // frames denoised at once: 4 n + 1
  int64_t stride = 0;  // frames from one chunk's beginning to the next one's
  int64_t chunks = 1;
  int64_t first_conditional = 0;  // frames of the given video that the first chunk keeps
  int64_t conditional = 0;        // frames that later chunks take over
  bool reseeds = false;           // chunk c draws from seed + c
  bool amplifies() const { return control_guidance != 1.0; }
};

struct Settings {
  Mode mode = Mode::text_to_video;
  int64_t height = 0, width = 0;  // of the frames that come out
  int64_t frames = 0;             // that come out; 4 n + 1 except for transfer
  int64_t requested_frames = 0;
  double fps = 24;
  double guidance_scale = 1;
  int64_t seed = 0;

  int64_t latent_frames = 0, latent_height = 0, latent_width = 0;
  Conditioning conditioning;  // of the first chunk
  int64_t canvas_height = 0,
          canvas_width = 0;  // what the VAE encodes; larger than the frames for actions
  int64_t sound_frames = 0;  // latent; 0: none
  std::optional<ActionSettings> action;
  std::optional<TransferSettings> transfer;

  std::vector<Message> conditional, unconditional;
  SchedulerConfig scheduler;
  Schedule schedule;
  std::string scheduler_note;        // what was chosen and why
  std::vector<std::string> notices;  // what was adjusted, one sentence each

  // Transfer knows no guidance below 1.
  bool guided() const { return transfer ? guidance_scale > 1.0 : guidance_scale != 1.0; }
  int64_t chunks() const { return transfer ? transfer->chunks : 1; }
};

Settings resolve(const Request& request, const Checkpoint& checkpoint);

// A frame of a conditioning clip at the size that comes out, by the request's video_fit.
Image fitted(const Frames& frames, int64_t index, VideoFit fit, const Settings& settings);

// `value` when it is a size the VAE can make, else Error naming the nearest one.
int64_t checked_side(const char* name, int64_t value, int64_t factor);

// Planar [3, encoded_frames, canvas_height, canvas_width] in [-1, 1]: what the VAE encodes (first
// chunk).
std::vector<float> conditioning_pixels(const Request& request, const Settings& settings);

}  // namespace orrery
