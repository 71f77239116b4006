#include "engine/settings.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "attention/strategy.h"
#include "base/error.h"
#include "engine/request_fields.h"
#include "engine/transfer.h"
#include "model/embodiments.h"
#include "model/scheduler_choice.h"

namespace orrery {

namespace {

constexpr int64_t kDefaultSteps = 35;
constexpr double kDefaultGuidance = 6.0, kDefaultFps = 24;

bool blank(const std::string& text) {
  return std::all_of(text.begin(), text.end(),
                     [](unsigned char c) { return c == ' ' || (c >= 9 && c <= 13); });
}

// The nearest sizes that divide, for the remedy in a message.
std::string nearest_multiple(int64_t value, int64_t factor) {
  const int64_t below = value / factor * factor, above = below + factor;
  if (below <= 0) return std::to_string(above);
  return value - below <= above - value ? std::to_string(below) : std::to_string(above);
}

}  // namespace

int64_t checked_side(const char* name, int64_t value, int64_t factor) {
  require(value % factor == 0, name, " must be a multiple of ", factor, ", got ", value,
          "; the nearest is ", nearest_multiple(value, factor));
  return value;
}

namespace {

double default_guidance(const Request& request) {
  return request.transfer ? transfer_defaults(*request.transfer).guidance : kDefaultGuidance;
}

void resolve_sampling(const Request& request, const Checkpoint& checkpoint, Settings& settings) {
  const bool distilled = checkpoint.folder.is_distilled();
  const auto& sigmas = checkpoint.folder.distilled_sigmas;
  int64_t steps = request.num_inference_steps.value_or(
      distilled ? static_cast<int64_t>(sigmas.size()) : kDefaultSteps);
  double guidance = request.guidance_scale.value_or(distilled ? 1.0 : default_guidance(request));
  if (distilled) {
    require(steps == static_cast<int64_t>(sigmas.size()), "num_inference_steps is ", steps,
            ", but this distilled checkpoint fixes ", sigmas.size(), " steps; leave it unset");
    require(guidance == 1.0, "guidance_scale is ", guidance,
            ", but guidance is baked into this distilled checkpoint; leave it unset or give 1");
    require(!request.flow_shift && !request.karras,
            "flow_shift and karras have no meaning for a distilled checkpoint, whose sigmas are "
            "fixed; leave them unset");
    if (!request.negative_prompt.empty()) {
      settings.notices.push_back(
          "the negative prompt is ignored: a distilled checkpoint runs without guidance");
    }
  }
  settings.guidance_scale = guidance;

  SamplingMode mode = SamplingMode::video;
  if (settings.mode == Mode::text_to_image) mode = SamplingMode::image;
  if (settings.action) mode = SamplingMode::action;
  if (settings.transfer) mode = SamplingMode::transfer;
  SchedulerOverrides overrides;
  overrides.flow_shift = request.flow_shift;
  overrides.karras = request.karras;
  overrides.checkpoint = request.scheduler == SamplerSource::checkpoint;
  const SchedulerChoice choice =
      choose_scheduler(checkpoint.scheduler, mode, settings.height, settings.width, overrides);
  settings.scheduler = choice.config;
  settings.scheduler_note = choice.reason;
  settings.schedule = make_schedule(choice.config, static_cast<int>(steps), sigmas);
}

void resolve_vision(const Request& request, const Checkpoint& checkpoint, Settings& s) {
  const VaeConfig& vae = checkpoint.vae;
  s.requested_frames = request.num_frames.value_or(kDefaultFrames);
  s.height =
      checked_side("height", request.height.value_or(kDefaultHeight), vae.scale_factor_spatial);
  s.width = checked_side("width", request.width.value_or(kDefaultWidth), vae.scale_factor_spatial);
  s.latent_frames = vae.latent_frames(s.requested_frames);
  s.frames = vae.decoded_frames(s.latent_frames);
  if (s.frames != s.requested_frames) {
    s.notices.push_back(concat("num_frames ", s.requested_frames, " is not ",
                               vae.scale_factor_temporal, " n + 1: ", s.frames,
                               " frames are made"));
  }
  s.latent_height = s.height / vae.scale_factor_spatial;
  s.latent_width = s.width / vae.scale_factor_spatial;
  s.canvas_height = s.height;
  s.canvas_width = s.width;
  s.conditioning.noisy.assign(static_cast<size_t>(s.latent_frames), true);

  require(!(request.image && request.video),
          "image and video are both given; pass either an image (image to video) or a video (video "
          "to video)");
  s.mode = s.requested_frames == 1 ? Mode::text_to_image : Mode::text_to_video;
  if (request.image) {
    require(s.requested_frames > 1, "an image condition needs num_frames > 1, got ",
            s.requested_frames);
    s.mode = Mode::image_to_video;
    s.conditioning.noisy[0] = false;
    s.conditioning.encoded_frames = 1;
  }
  if (request.video) {
    require(s.requested_frames > 1, "a video condition needs num_frames > 1, got ",
            s.requested_frames);
    require(!request.condition_frame_indexes_vision.empty(),
            "condition_frame_indexes_vision is empty");
    require(request.video->count > 0, "the conditioning video has no frames");
    int64_t last = 0;
    for (int64_t index : request.condition_frame_indexes_vision) {
      require(index >= 0, "condition_frame_indexes_vision holds ", index, "; indexes start at 0");
      require(index < s.latent_frames, "condition_frame_indexes_vision holds ", index,
              ", but num_frames ", s.requested_frames, " makes ", s.latent_frames,
              " latent frames (0 to ", s.latent_frames - 1, ")");
      s.conditioning.noisy[static_cast<size_t>(index)] = false;
      last = std::max(last, index);
    }
    s.mode = Mode::video_to_video;
    s.conditioning.encoded_frames = vae.decoded_frames(last + 1);
  }
}

Mode mode_of(ActionMode mode) {
  switch (mode) {
    case ActionMode::policy: return Mode::policy;
    case ActionMode::forward_dynamics: return Mode::forward_dynamics;
    case ActionMode::inverse_dynamics: return Mode::inverse_dynamics;
  }
  fail(ErrorKind::invalid_argument, "the action mode is none of ", list_of_names<ActionMode>());
}

void resolve_action(const Request& request, const Checkpoint& checkpoint, Settings& s) {
  const ActionRequest& action = *request.action;
  const TransformerConfig& model = checkpoint.transformer;
  const VaeConfig& vae = checkpoint.vae;
  require(model.action_gen, "this checkpoint has no action head (action_gen is false)");
  require(!request.num_frames && !request.height && !request.width,
          "num_frames, height and width follow from the action's chunk_size and resolution_tier; "
          "leave them unset");
  s.mode = mode_of(action.mode);
  const bool has_image = request.image.has_value(), has_video = request.video.has_value();
  require(has_image != has_video, "an action run needs ", has_image ? "either" : "",
          " an image or a video", has_image ? ", not both" : "");
  require(s.mode != Mode::inverse_dynamics || has_video, "inverse_dynamics needs a video");
  const Embodiment& body = find_embodiment(action.domain_name);
  require(body.raw_width <= model.action_dim, "domain_name \"", action.domain_name, "\" has ",
          body.raw_width, " action values, the checkpoint's action_dim is ", model.action_dim);
  require(body.domain < model.num_embodiment_domains, "domain_name \"", action.domain_name,
          "\" is domain ", body.domain, ", the checkpoint has ", model.num_embodiment_domains);

  ActionSettings out;
  out.chunk = action.chunk_size;
  out.domain = body.domain;
  out.raw_width = body.raw_width;
  if (s.mode == Mode::forward_dynamics) {
    require(action.raw_actions.has_value(), "forward_dynamics needs raw actions");
    const FloatTensor& raw = *action.raw_actions;
    require(raw.shape.size() == 2, "raw actions must be a matrix [rows, values], got ",
            raw.shape.size(), " dimensions");
    require(raw.shape[0] > 0 && raw.shape[1] > 0, "raw actions are empty (", raw.shape[0], " x ",
            raw.shape[1], ")");
    require(raw.shape[1] == body.raw_width, "raw actions have ", raw.shape[1],
            " values a row, domain \"", action.domain_name, "\" has ", body.raw_width);
    out.noisy = false;
    if (raw.shape[0] != out.chunk) {
      s.notices.push_back(
          concat(raw.shape[0], " rows of actions are given for a chunk of ", out.chunk,
                 raw.shape[0] > out.chunk ? ": the rest is left out" : ": the last row is held"));
    }
    out.clean.assign(static_cast<size_t>(out.chunk * model.action_dim), 0.0f);
    for (int64_t row = 0; row < out.chunk; ++row) {
      const int64_t from = std::min(row, raw.shape[0] - 1);  // the last row is held
      for (int64_t c = 0; c < body.raw_width; ++c) {
        const float value = raw.values[static_cast<size_t>(from * raw.shape[1] + c)];
        require(std::isfinite(value), "raw actions: row ", from, ", value ", c, " is not finite");
        out.clean[static_cast<size_t>(row * model.action_dim + c)] = value;
      }
    }
  }

  const Frames& source = has_image ? *request.image : *request.video;
  require(source.count > 0, "the conditioning clip has no frames");
  const ActionGeometry canvas =
      action_geometry(action.resolution_tier, source.height, source.width);
  s.requested_frames = out.chunk + 1;
  s.latent_frames = vae.latent_frames(s.requested_frames);
  s.frames = vae.decoded_frames(s.latent_frames);
  s.canvas_height = canvas.height;
  s.canvas_width = canvas.width;
  s.latent_height = std::max<int64_t>(canvas.content_height / vae.scale_factor_spatial, 1);
  s.latent_width = std::max<int64_t>(canvas.content_width / vae.scale_factor_spatial, 1);
  s.height = s.latent_height * vae.scale_factor_spatial;
  s.width = s.latent_width * vae.scale_factor_spatial;
  s.conditioning.noisy.assign(static_cast<size_t>(s.latent_frames),
                              s.mode != Mode::inverse_dynamics);
  s.conditioning.noisy[0] = false;
  s.conditioning.encoded_frames = s.mode == Mode::inverse_dynamics ? s.frames : 1;
  s.action = std::move(out);
}

void resolve_prompt(const Request& request, const Checkpoint& checkpoint, Settings& s) {
  require(s.action || !blank(request.prompt), "the prompt is empty; say what to generate");
  SystemPrompt system = SystemPrompt::none;
  if (request.use_system_prompt.value_or(checkpoint.folder.default_use_system_prompt)) {
    system = s.mode == Mode::text_to_image ? SystemPrompt::image : SystemPrompt::video;
  }
  std::string positive, negative;
  if (s.transfer) {
    if (request.use_system_prompt.value_or(true)) system = SystemPrompt::transfer;
    // As written, no templates.
    positive = request.transfer->emphasize_control_in_prompt
                   ? emphasized_text(request.prompt, s.transfer->hints)
                   : request.prompt;
    negative = request.negative_prompt;
  } else if (s.action) {
    ActionCaption caption;
    caption.prompt = request.prompt;
    caption.view_point = std::string(name_of(request.action->view_point));
    caption.chunk_size = s.action->chunk;
    caption.fps = s.fps;
    caption.canvas_height = s.canvas_height;
    caption.canvas_width = s.canvas_width;
    positive = action_text(caption);
    negative = request.negative_prompt;
  } else {
    PromptSettings templates;
    templates.num_frames = s.requested_frames;
    templates.height = s.height;
    templates.width = s.width;
    templates.fps = s.fps;
    templates.duration_template = request.add_duration_template;
    templates.resolution_template = request.add_resolution_template;
    positive = positive_text(request.prompt, templates);
    negative = negative_text(request.negative_prompt, templates);
  }
  for (auto [text, conversation] :
       {std::pair{&positive, &s.conditional}, {&negative, &s.unconditional}}) {
    if (system != SystemPrompt::none)
      conversation->push_back({"system", std::string(text_of(system))});
    conversation->push_back({"user", *text});
  }
}

}  // namespace

std::string_view name_of(Mode mode) {
  switch (mode) {
    case Mode::text_to_image: return "text to image";
    case Mode::text_to_video: return "text to video";
    case Mode::image_to_video: return "image to video";
    case Mode::video_to_video: return "video to video";
    case Mode::policy: return "policy";
    case Mode::forward_dynamics: return "forward dynamics";
    case Mode::inverse_dynamics: return "inverse dynamics";
    case Mode::transfer: return "transfer";
  }
  return "?";
}

Checkpoint read_checkpoint(const std::filesystem::path& model) {
  Checkpoint checkpoint;
  checkpoint.folder = open_model_folder(model);
  const Json& transformer = checkpoint.folder.transformer.config;
  checkpoint.transformer = TransformerConfig::from_json(transformer);
  if (const Json* strategy = AttentionStrategy::checkpoint_strategy(transformer)) {
    checkpoint.attention_strategy = *strategy;
  }
  checkpoint.vae = VaeConfig::from_json(checkpoint.folder.vae.config);
  checkpoint.scheduler = SchedulerConfig::from_json(checkpoint.folder.scheduler.config);
  checkpoint.scheduler.native_schedule |= checkpoint.folder.use_native_flow_schedule;
  if (checkpoint.folder.sound_tokenizer) {
    checkpoint.sound = SoundConfig::from_json(checkpoint.folder.sound_tokenizer->config);
  }
  require(checkpoint.vae.z_dim == checkpoint.transformer.latent_channel, ErrorKind::corrupt,
          model.string(), ": the VAE has ", checkpoint.vae.z_dim,
          " latent channels, the transformer ", checkpoint.transformer.latent_channel);
  if (checkpoint.makes_sound()) {
    require(checkpoint.sound->latent_dim == checkpoint.transformer.sound_dim, ErrorKind::corrupt,
            model.string(), ": the sound tokenizer has ", checkpoint.sound->latent_dim,
            " channels, the transformer's sound head ", checkpoint.transformer.sound_dim);
  }
  return checkpoint;
}

namespace {

// Clips are taken frame by frame, as in the public pipeline.
void note_rate(const std::string& what, const Frames& clip, Settings& s) {
  constexpr double kSame = 0.01;
  if (clip.count < 2 || clip.fps <= 0 || std::abs(clip.fps / s.fps - 1) < kSame) return;
  s.notices.push_back(concat("the ", what, " has ", clip.fps, " frames a second, the request ",
                             s.fps, ": its frames are taken one by one, so that it runs at ",
                             s.fps / clip.fps, " of its speed; give fps ", clip.fps,
                             " to keep it"));
}

}  // namespace

Settings resolve(const Request& request, const Checkpoint& checkpoint) {
  check_fields(request_table(), request);
  Settings s;
  s.fps = request.fps.value_or(request.transfer ? transfer_fps(request) : kDefaultFps);
  require(s.fps > 0, "fps must be a positive number, got ", s.fps);
  s.seed = request.seed;
  if (request.transfer)
    resolve_transfer(request, checkpoint, s);
  else if (request.action)
    resolve_action(request, checkpoint, s);
  else
    resolve_vision(request, checkpoint, s);
  if (request.enable_sound) {
    require(checkpoint.transformer.sound_gen,
            "enable_sound: this checkpoint makes no sound (sound_gen is false in "
            "transformer/config.json)");
    require(checkpoint.sound.has_value(),
            "enable_sound: this checkpoint has no sound_tokenizer folder");
    s.sound_frames = checkpoint.sound->latent_frames(s.requested_frames, s.fps);
    require(s.sound_frames > 0, "enable_sound: ", s.requested_frames, " frames at ", s.fps,
            " fps last less than one sample");
  }
  if (request.latents) {
    std::vector<int64_t> shape = request.latents->shape;
    if (shape.size() == 5 && shape.front() == 1) shape.erase(shape.begin());
    const std::vector<int64_t> want{checkpoint.vae.z_dim, s.latent_frames, s.latent_height,
                                    s.latent_width};
    require(shape == want, "latents must be [", want[0], ", ", want[1], ", ", want[2], ", ",
            want[3], "] for this request; the given tensor has another shape");
    for (float value : request.latents->values)
      require(std::isfinite(value), "latents hold a value that is not finite");
  }
  if (request.video) note_rate("video", *request.video, s);
  if (request.transfer) {
    for (const Control& control : request.transfer->controls) {
      note_rate(concat(name_of(control.hint), " control"), control.video, s);
    }
  }
  resolve_sampling(request, checkpoint, s);
  resolve_prompt(request, checkpoint, s);
  return s;
}

namespace {

Image to_image(const Frames& frames, int64_t index) {
  const uint8_t* begin = frames.frame(index);
  return {frames.height, frames.width, {begin, begin + frames.height * frames.width * 3}};
}

}  // namespace

Image fitted(const Frames& frames, int64_t index, VideoFit fit, const Settings& s) {
  const Image image = to_image(frames, index);
  return fit == VideoFit::cover ? cover_8bit(image, s.height, s.width)
                                : resize_8bit(image, s.height, s.width);
}

std::vector<float> conditioning_pixels(const Request& request, const Settings& s) {
  const int64_t frames = s.conditioning.encoded_frames, plane = s.canvas_height * s.canvas_width;
  if (s.action) {
    const Frames& source = request.image ? *request.image : *request.video;
    std::vector<Image> clip;
    for (int64_t i = 0; i < std::min(source.count, frames); ++i)
      clip.push_back(to_image(source, i));
    return action_canvas(clip, frames, request.action->resolution_tier).pixels;
  }
  if (request.image) return condition_image(to_image(*request.image, 0), s.height, s.width);

  // Video: the first or last `frames` source frames stand at the start, the last of them is held.
  const Frames& source = *request.video;
  const int64_t kept = std::min(source.count, frames);
  const int64_t first = request.condition_video_keep == VideoKeep::last ? source.count - kept : 0;
  std::vector<float> pixels(static_cast<size_t>(3 * frames * plane));
  std::vector<float> frame;
  for (int64_t i = 0; i < frames; ++i) {
    if (i < kept) frame = normalized(fitted(source, first + i, request.video_fit, s));
    for (int64_t c = 0; c < 3; ++c) {
      std::copy_n(frame.begin() + c * plane, plane, pixels.begin() + (c * frames + i) * plane);
    }
  }
  return pixels;
}

}  // namespace orrery
