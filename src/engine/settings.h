// A request resolved against a checkpoint: every default filled in, every contradiction refused. Pure:
// reads configs, touches no weight.
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

enum class Mode {
  text_to_image,
  text_to_video,
  image_to_video,
  video_to_video,
  policy,
  forward_dynamics,
  inverse_dynamics,
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
};
Checkpoint read_checkpoint(const std::filesystem::path& model);

struct ActionSettings {
  int64_t chunk = 0;
  int64_t domain = 0;
  int64_t raw_width = 0;
  bool noisy = true;            // forward dynamics is given its actions
  std::vector<float> clean;     // [chunk, action_dim], zero-padded; forward dynamics
};

struct Settings {
  Mode mode = Mode::text_to_video;
  int64_t height = 0, width = 0;         // of the frames that come out
  int64_t frames = 0;                    // decoded: 4 n + 1
  int64_t requested_frames = 0;
  double fps = 24;
  double guidance_scale = 1;
  int64_t seed = 0;

  int64_t latent_frames = 0, latent_height = 0, latent_width = 0;
  std::vector<bool> noisy;               // per latent frame
  bool encodes = false;                  // conditioning pixels exist
  int64_t encoded_frames = 0;            // pixel frames that can matter: the causal prefix
  int64_t canvas_height = 0, canvas_width = 0;  // what the VAE encodes; larger than the frames for actions
  int64_t sound_frames = 0;              // latent; 0: none
  std::optional<ActionSettings> action;

  std::vector<Message> conditional, unconditional;
  SchedulerConfig scheduler;
  Schedule schedule;
  std::string scheduler_note;            // what was chosen and why
  std::vector<std::string> notices;      // what was adjusted, one sentence each

  bool guided() const { return guidance_scale != 1.0; }
  bool any_noisy_frame() const;
};

Settings resolve(const Request& request, const Checkpoint& checkpoint);

// Planar [3, encoded_frames, canvas_height, canvas_width] in [-1, 1]: what the VAE encodes.
std::vector<float> conditioning_pixels(const Request& request, const Settings& settings);

}  // namespace orrery
