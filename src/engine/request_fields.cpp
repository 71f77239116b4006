#include "engine/request_fields.h"

#include <algorithm>

#include "io/sha256.h"
#include "orrery/media.h"

namespace orrery {

namespace {

constexpr auto kBasic = "Basic", kInput = "Input", kSampling = "Sampling", kPrompts = "Prompts",
               kActions = "Actions", kControl = "Structural control", kOutput = "Output",
               kDevice = "Device and memory", kRanks = "Ranks", kSafety = "Safety";

// A new member needs a row below, or a reason why it has none; then it is counted here.
static_assert(member_count<Request>() == 28);
static_assert(member_count<ActionRequest>() == 6);
static_assert(member_count<TransferRequest>() == 10);
static_assert(member_count<Control>() == 4);
static_assert(member_count<EngineOptions>() == 18);

// --- media: rows that read files ---

SourceFile source_of(const Json& file) {
  return {file.at("path").as_string(), file.at("sha256").as_string()};
}

ClipLimits limits_of(const Json& file) {
  const Json* given = file.find("limits");
  if (given == nullptr) return {};
  ClipLimits limits;
  limits.max_frames = given->at("max_frames").as_int();
  limits.keep = *value_named<VideoKeep>(given->at("keep").as_string());
  limits.height = given->at("height").as_int();
  limits.width = given->at("width").as_int();
  limits.fit = *value_named<VideoFit>(given->at("fit").as_string());
  return limits;
}

Json path_or(const std::optional<SourceFile>& source, const char* what, size_t count) {
  if (source) return Json(source->path);
  return Json::object().set(what, static_cast<int64_t>(count));
}
Json write_frames(const std::optional<Frames>& frames) {
  return frames ? path_or(frames->source, "frames", static_cast<size_t>(frames->count)) : Json();
}
Json write_tensor(const std::optional<FloatTensor>& tensor) {
  return tensor ? path_or(tensor->source, "values", tensor->values.size()) : Json();
}

template <typename S, typename T>
Field<S> file_field(std::optional<T> S::*member, T (*load)(const std::filesystem::path&),
                    Json (*write)(const std::optional<T>&), FieldInfo info) {
  info.type = FieldType::file;
  return {std::move(info),
          [member, load](S& to, const Json& file) {
            to.*member = load(file.at("open").as_string());
            (to.*member)->source = source_of(file);
          },
          [member, write](const S& from) { return write(from.*member); }};
}

Frames clip_of(const Json& file) {
  Frames clip = load_clip(file.at("open").as_string(), limits_of(file));
  clip.source = source_of(file);
  return clip;
}

// A picture is the image that is given, a film the video.
void read_vision(Request& to, const Json& file) {
  Frames clip = clip_of(file);
  require(clip.count == 1 || !to.video,
          "vision_path and video_path are both videos; give one of them");
  (clip.count == 1 ? to.image : to.video) = std::move(clip);
}

// --- controls: one a hint ---

// The control of this hint; made where `make` is set, else null when there is none.
Control* control_of(TransferRequest& transfer, std::string_view hint, bool make) {
  for (Control& control : transfer.controls) {
    if (name_of(control.hint) == hint) return &control;
  }
  if (!make) return nullptr;
  const std::optional<ControlHint> known = value_named<ControlHint>(hint);
  require(known.has_value(), "control \"", hint, "\" is not known; it is ",
          list_of_names<ControlHint>());
  transfer.controls.push_back({*known, {}});
  return &transfer.controls.back();
}

void read_controls(TransferRequest& to, const Json& files) {
  for (const auto& [hint, file] : files.members()) {
    Control* control = control_of(to, hint, true);
    if (file.is_boolean()) continue;  // computed from the video
    control->video = clip_of(file);
  }
}
Json write_controls(const TransferRequest& from) {
  Json files = Json::object();
  for (const Control& control : from.controls) {
    files.set(std::string(name_of(control.hint)),
              control.video.count == 0
                  ? Json(true)
                  : path_or(control.video.source, "frames", size_t(control.video.count)));
  }
  return from.controls.empty() ? Json() : files;
}

void read_weights(TransferRequest& to, const Json& weights) {
  for (const auto& [hint, weight] : weights.members()) {
    Control* control = control_of(to, hint, false);
    require(control != nullptr, "control_weight ", hint, ": there is no --control ", hint);
    control->weight = weight.as_double();
  }
}
Json write_weights(const TransferRequest& from) {
  Json weights = Json::object();
  for (const Control& control : from.controls) {
    if (control.weight) weights.set(std::string(name_of(control.hint)), *control.weight);
  }
  return weights.members().empty() ? Json() : weights;
}

Field<TransferRequest> preset_field(ControlHint hint, FieldInfo info) {
  info.type = FieldType::choice;
  info.choices = choices_of<ControlPreset>();
  const std::string flag = flag_of(info);
  return {std::move(info),
          [hint, flag](TransferRequest& to, const Json& preset) {
            Control* control = control_of(to, name_of(hint), false);
            require(control != nullptr, flag, ": there is no --control ", name_of(hint));
            control->preset = value_named<ControlPreset>(preset.as_string());
          },
          [hint](const TransferRequest& from) {
            for (const Control& control : from.controls) {
              if (control.hint == hint && control.preset)
                return Json(std::string(name_of(*control.preset)));
            }
            return Json();
          }};
}

std::vector<Field<ActionRequest>> action_rows() {
  using A = ActionRequest;
  return {
      field(&A::mode, {.name = "action_mode",
                       .group = kActions,
                       .help = "What is made of a clip and actions",
                       .otherwise = "no actions"}),
      field(&A::chunk_size, {.name = "action_chunk_size",
                             .group = kActions,
                             .help = "Actions in the clip; it has a frame more",
                             .otherwise = "16",
                             .least = 1,
                             .most = 1024,
                             .needs = "action_mode"}),
      field(&A::domain_name, {.name = "domain_name",
                              .group = kActions,
                              .help = "Embodiment, for example pusht",
                              .otherwise = "none; an action run needs one",
                              .needs = "action_mode"}),
      field(&A::view_point, {.name = "view_point",
                             .group = kActions,
                             .help = "Where the camera is",
                             .otherwise = "ego_view",
                             .needs = "action_mode"}),
      field(&A::resolution_tier, {.name = "resolution_tier",
                                  .group = kActions,
                                  .help = "Size of the canvas: 256, 480, 704 or 720",
                                  .otherwise = "480",
                                  .needs = "action_mode",
                                  .aliases = "image_size"}),
      file_field(&A::raw_actions, load_actions, write_tensor,
                 {.name = "action_path",
                  .group = kActions,
                  .help = "Actions for forward_dynamics: JSON rows or safetensors",
                  .otherwise = "none",
                  .needs = "action_mode"}),
  };
}

std::vector<Field<TransferRequest>> transfer_rows() {
  using T = TransferRequest;
  std::vector<Field<T>> rows;
  rows.push_back(
      {{.name = "control",
        .group = kControl,
        .help = "Control video as HINT=FILE, hint edge, blur, depth, seg or wsm; edge or "
                "blur alone: computed from --video-path",
        .otherwise = "no structural control",
        .type = FieldType::hint_files},
       read_controls,
       write_controls});
  rows.push_back({{.name = "control_weight",
                   .group = kControl,
                   .help = "Weight of one of several controls as HINT=NUMBER",
                   .otherwise = "1 each",
                   .least = 0,
                   .needs = "control",
                   .type = FieldType::hint_numbers},
                  read_weights,
                  write_weights});
  rows.push_back(preset_field(ControlHint::edge, {.name = "preset_edge_threshold",
                                                  .group = kControl,
                                                  .help = "How strong a computed edge control is",
                                                  .otherwise = "medium",
                                                  .needs = "control"}));
  rows.push_back(preset_field(ControlHint::blur, {.name = "preset_blur_strength",
                                                  .group = kControl,
                                                  .help = "How strong a computed blur control is",
                                                  .otherwise = "medium",
                                                  .needs = "control"}));
  const auto add = [&](auto member, FieldInfo info) {
    info.needs = "control";
    rows.push_back(field(member, info));
  };
  add(&T::control_guidance, {.name = "control_guidance",
                             .group = kControl,
                             .help = "How much the controls count, 1 for plain",
                             .otherwise = "by hint; 1 of distilled checkpoints",
                             .least = -1e4,
                             .most = 1e4});
  add(&T::num_conditional_frames, {.name = "num_conditional_frames",
                                   .group = kControl,
                                   .help = "Frames that a chunk takes over from the one before",
                                   .otherwise = "1",
                                   .unit = "frames",
                                   .least = 0});
  add(&T::num_first_chunk_conditional_frames,
      {.name = "num_first_chunk_conditional_frames",
       .group = kControl,
       .help = "Frames of --video-path that the first chunk keeps",
       .otherwise = "0",
       .unit = "frames",
       .least = 0});
  add(&T::num_video_frames_per_chunk, {.name = "num_video_frames_per_chunk",
                                       .group = kControl,
                                       .help = "Frames made at once",
                                       .otherwise = "all; 101 for a wsm control alone",
                                       .unit = "frames",
                                       .least = 1});
  add(&T::guidance_interval, {.name = "guidance_interval",
                              .group = kControl,
                              .help = "Timesteps between which guidance works, A B",
                              .otherwise = "all",
                              .unit = "timesteps, 0 to 1000"});
  add(&T::control_guidance_interval, {.name = "control_guidance_interval",
                                      .group = kControl,
                                      .help = "Timesteps between which control guidance works, A B",
                                      .otherwise = "all",
                                      .unit = "timesteps, 0 to 1000"});
  add(&T::attention, {.name = "control_attention",
                      .group = kControl,
                      .help = "Several controls, each attended on its own or all in one sequence",
                      .otherwise = "weighted"});
  add(&T::emphasize_control_in_prompt,
      {.name = "emphasize_control_in_prompt",
       .group = kControl,
       .help = "Add a sentence to the prompt that asks to follow the controls",
       .otherwise = "off"});
  add(&T::chunk_noise,
      {.name = "chunk_noise",
       .group = kControl,
       .help = "Later chunks, whether the generator goes on or chunk c starts from seed + c",
       .otherwise = "continue"});
  return rows;
}

std::vector<Field<Request>> basic_rows() {
  using R = Request;
  return {
      field(&R::prompt, {.name = "prompt",
                         .group = kBasic,
                         .help = "What to generate",
                         .otherwise = "none",
                         .flags = "-p",
                         .essential = true}),
      field(&R::negative_prompt, {.name = "negative_prompt",
                                  .group = kBasic,
                                  .help = "What the picture should not be",
                                  .otherwise = "empty",
                                  .flags = "-n",
                                  .essential = true}),
      field(&R::height, {.name = "height",
                         .group = kBasic,
                         .help = "Height, a multiple of the VAE's factor (16)",
                         .otherwise = "720",
                         .unit = "pixels",
                         .least = 1,
                         .most = 16384,
                         .flags = "-H",
                         .essential = true}),
      field(&R::width, {.name = "width",
                        .group = kBasic,
                        .help = "Width, a multiple of the VAE's factor (16)",
                        .otherwise = "1280",
                        .unit = "pixels",
                        .least = 1,
                        .most = 16384,
                        .flags = "-W",
                        .essential = true}),
      field(&R::num_frames, {.name = "num_frames",
                             .group = kBasic,
                             .help = "Frames, 4 n + 1; 1 makes an image",
                             .otherwise = "189; of structural control those of the first control",
                             .least = 1,
                             .most = 5000,
                             .essential = true}),
      field(&R::fps, {.name = "fps",
                      .group = kBasic,
                      .help = "Frames a second",
                      .otherwise = "24; of structural control those of --video-path",
                      .most = 1000,
                      .essential = true}),
      field(&R::seed, {.name = "seed",
                       .group = kBasic,
                       .help = "Seed of the noise, with the range and meaning of PyTorch's "
                               "manual_seed: -2^63 to 2^64 - 1, a negative one is 2^64 + seed",
                       .otherwise = "0",
                       .flags = "-s",
                       .essential = true}),
      Field<R>{{.name = "vision_path",
                .group = kInput,
                .help = "Picture that becomes the first frame, or a video as --video-path",
                .otherwise = "none",
                .flags = "--image",
                .essential = true,
                .type = FieldType::file},
               read_vision,
               [](const R& from) { return write_frames(from.image); }},
      Field<R>{{.name = "video_path",
                .group = kInput,
                .help = "Video that conditions the generation",
                .otherwise = "none",
                .essential = true,
                .type = FieldType::file},
               [](R& to, const Json& file) {
                 to.video = load_video(file.at("open").as_string(), limits_of(file));
                 to.video->source = source_of(file);
               },
               [](const R& from) { return write_frames(from.video); }},
      field(&R::condition_frame_indexes_vision,
            {.name = "condition_frame_indexes_vision",
             .group = kInput,
             .help = "Latent frames that a conditioning video fixes, with commas between",
             .otherwise = "0,1",
             .least = 0,
             .needs = "video_path vision_path"}),
      field(&R::condition_video_keep, {.name = "condition_video_keep",
                                       .group = kInput,
                                       .help = "Which end of the video is kept",
                                       .otherwise = "first",
                                       .needs = "video_path vision_path"}),
      field(&R::video_fit, {.name = "video_fit",
                            .group = kInput,
                            .help = "How videos and controls of another shape come to the frame's",
                            .otherwise = "stretch",
                            .needs = "video_path vision_path control"}),
      file_field(&R::latents, load_latents, write_tensor,
                 {.name = "latents",
                  .group = kInput,
                  .help = "Safetensors file whose \"latents\" replace the noise",
                  .otherwise = "none"}),
  };
}

std::vector<Field<Request>> sampling_rows() {
  using R = Request;
  return {
      field(&R::num_inference_steps, {.name = "num_inference_steps",
                                      .group = kSampling,
                                      .help = "Denoising steps",
                                      .otherwise = "35; distilled checkpoints fix it",
                                      .least = 1,
                                      .most = 1000,
                                      .aliases = "num_steps",
                                      .flags = "--steps",
                                      .essential = true}),
      field(&R::guidance_scale, {.name = "guidance_scale",
                                 .group = kSampling,
                                 .help = "Classifier-free guidance, 1 for none",
                                 .otherwise = "6; 3 or 1 with controls; 1 of distilled checkpoints",
                                 .least = -1e4,
                                 .most = 1e4,
                                 .aliases = "guidance",
                                 .flags = "--guidance,--cfg-scale",
                                 .essential = true}),
      field(&R::flow_shift, {.name = "flow_shift",
                             .group = kSampling,
                             .help = "Shift of the sigma grid; switches Karras sigmas off",
                             .otherwise = "by the checkpoint and the size",
                             .aliases = "shift"}),
      field(&R::karras, {.name = "karras",
                         .group = kSampling,
                         .help = "Karras sigmas",
                         .otherwise = "as the checkpoint, see --scheduler"}),
      field(&R::scheduler, {.name = "sampler_source",
                            .group = kSampling,
                            .help = "The recommended sigma grid where the checkpoint's own blurs "
                                    "video, or the checkpoint's own",
                            .otherwise = "auto",
                            .flags = "--scheduler",
                            .renamed = true}),
      field(&R::rng, {.name = "rng",
                      .group = kSampling,
                      .help = "Whose generator's numbers a seed means, PyTorch's of",
                      .otherwise = "cpu"}),
      field(&R::noise_dtype, {.name = "noise_dtype",
                              .group = kSampling,
                              .help = "Which stream of that generator; auto: that of --dtype",
                              .otherwise = "auto"}),
      field(&R::use_system_prompt, {.name = "use_system_prompt",
                                    .group = kPrompts,
                                    .help = "Begin with the model's system prompt",
                                    .otherwise = "as the checkpoint; off for actions"}),
      field(&R::add_duration_template, {.name = "add_duration_template",
                                        .group = kPrompts,
                                        .help = "Append the duration sentence to the prompts",
                                        .otherwise = "on",
                                        .aliases = "use_duration_template",
                                        .flags = "!--no-duration-template"}),
      field(&R::add_resolution_template, {.name = "add_resolution_template",
                                          .group = kPrompts,
                                          .help = "Append the resolution sentence to the prompts",
                                          .otherwise = "on",
                                          .aliases = "use_resolution_template",
                                          .flags = "!--no-resolution-template"}),
      field(&R::enable_sound, {.name = "enable_sound",
                               .group = kOutput,
                               .help = "Generate sound with the video",
                               .otherwise = "off",
                               .aliases = "generate_sound"}),
      field(&R::vae_tiling, {.name = "vae_tiling",
                             .group = kDevice,
                             .help = "Decode and encode in spatial tiles: less memory",
                             .otherwise = "off"}),
      field(&R::crf, {.name = "crf",
                      .group = kOutput,
                      .help = "H.264 quality, lower is better",
                      .otherwise = "18",
                      .least = 1,
                      .most = 51}),
  };
}

// --- the engine ---

Json write_adapters(const EngineOptions& from) {
  Json list = Json::array();
  for (const LoraFile& lora : from.lora) {
    list.push(Json::object().set("file", lora.file.string()).set("scale", lora.scale));
  }
  return from.lora.empty() ? Json() : list;
}
void read_adapters(EngineOptions& to, const Json& list) {
  for (const Json& lora : list.items())
    to.lora.push_back({lora.at("file").as_string(), lora.at("scale").as_double()});
}

// No rows: job and log are objects of the process.
std::vector<Field<EngineOptions>> engine_rows() {
  using E = EngineOptions;
  return {
      field(&E::device, {.name = "device",
                         .group = kDevice,
                         .help = "cpu, cuda, cuda:N or auto",
                         .otherwise = "cpu",
                         .flags = "-d",
                         .essential = true}),
      field(&E::dtype,
            {.name = "dtype",
             .group = kDevice,
             .help = "What the networks compute in; auto is fp32 on the CPU, bf16 on CUDA",
             .otherwise = "auto"}),
      field(&E::num_threads, {.name = "threads",
                              .group = kDevice,
                              .help = "CPU threads; 0: all cores",
                              .otherwise = "0",
                              .least = 0}),
      field(&E::attention, {.name = "attention",
                            .group = kSampling,
                            .help = "Attention strategy: a JSON file, JSON text, or dense",
                            .otherwise = "the checkpoint's, else dense"}),
      field(&E::warm_up, {.name = "warm_up",
                          .group = kDevice,
                          .help = "Run every attention layout once before the first step",
                          .otherwise = "auto"}),
      Field<E>{{.name = "lora",
                .group = kInput,
                .help = "LoRA adapter to merge, FILE or FILE:SCALE",
                .otherwise = "none",
                .type = FieldType::adapters},
               read_adapters,
               write_adapters},
      field(&E::guardrail, {.name = "guardrail",
                            .group = kSafety,
                            .help = "Shell command that approves the prompt and the frames; see "
                                    "docs/modes.md",
                            .otherwise = "none"}),
      field(&E::guardrail_timeout, {.name = "guardrail_timeout",
                                    .group = kSafety,
                                    .help = "How long a verdict may take",
                                    .otherwise = "300",
                                    .unit = "seconds",
                                    .needs = "guardrail"}),
      field(&E::safety_check, {.name = "safety_check",
                               .group = kSafety,
                               .help = "Whether a guardrail is wanted; the result says when not",
                               .otherwise = "on",
                               .flags = "!--no-safety-check,!--disable-safety-checker"}),
      field(&E::tp_degree, {.name = "tp_degree",
                            .group = kRanks,
                            .help = "Ranks that cut the weights",
                            .otherwise = "1",
                            .least = 1}),
      field(&E::cp_degree, {.name = "cp_degree",
                            .group = kRanks,
                            .help = "Ranks that cut the generation sequence",
                            .otherwise = "1",
                            .least = 1}),
      field(&E::cfg_degree, {.name = "cfg_degree",
                             .group = kRanks,
                             .help = "Ranks that share out the guidance branches",
                             .otherwise = "1",
                             .least = 1,
                             .most = 2}),
      field(&E::offload, {.name = "offload",
                          .group = kDevice,
                          .help = "Weights that leave the device: none, all but the part in use, "
                                  "all but a few layers",
                          .otherwise = "none"}),
      field(&E::resident, {.name = "resident",
                           .group = kDevice,
                           .help = "Whether the text tower stays on the device between requests; "
                                   "auto: when it fits",
                           .otherwise = "auto"}),
      field(&E::graphs, {.name = "graphs",
                         .group = kDevice,
                         .help = "Replay denoising steps as recorded graphs (CUDA)",
                         .otherwise = "on",
                         .flags = "!--no-graphs"}),
      field(&E::profile, {.name = "profile",
                          .group = kDevice,
                          .help = "Time every operation for the report",
                          .otherwise = "off"}),
  };
}

std::vector<Field<Request>> all_rows() {
  std::vector<Field<Request>> rows = basic_rows();
  for (Field<Request>& row : sampling_rows()) rows.push_back(std::move(row));
  for (const auto& row : action_rows()) rows.push_back(field_of_part(&Request::action, row));
  for (const auto& row : transfer_rows()) rows.push_back(field_of_part(&Request::transfer, row));
  return rows;
}

template <typename S>
Json json_of(const std::vector<Field<S>>& table, const S& from) {
  Json out = Json::object();
  for (const Field<S>& row : table) {
    if (Json value = row.write(from); !value.is_null())
      out.set(std::string(row.name), std::move(value));
  }
  return out;
}

}  // namespace

const std::vector<Field<Request>>& request_table() {
  static const std::vector<Field<Request>> table = all_rows();
  return table;
}

const std::vector<Field<EngineOptions>>& engine_table() {
  static const std::vector<Field<EngineOptions>> table = engine_rows();
  return table;
}

const std::vector<FieldInfo>& request_fields() {
  static const std::vector<FieldInfo> infos = infos_of(request_table());
  return infos;
}

const std::vector<FieldInfo>& engine_fields() {
  static const std::vector<FieldInfo> infos = infos_of(engine_table());
  return infos;
}

Json file_to_read(const std::filesystem::path& open, const std::string& path) {
  return Json::object()
      .set("open", open.string())
      .set("path", path)
      .set("sha256", sha256_of_file(open));
}

Json fields_json(const Request& request) { return json_of(request_table(), request); }
Json fields_json(const EngineOptions& options) { return json_of(engine_table(), options); }

std::string to_json(const Request& request) {
  const Json all = fields_json(request);
  Json given = Json::object();
  for (const std::string& name : given_fields(request)) given.set(name, all.at(name));
  return given.dump(1);
}

std::vector<std::string> given_fields(const Request& request) {
  const Request untouched;
  std::vector<std::string> names;
  for (const Field<Request>& row : request_table()) {
    const Json value = row.write(request);
    if (!value.is_null() && value.dump() != row.write(untouched).dump())
      names.emplace_back(row.name);
  }
  return names;
}

Json inputs_json(const Request& request) {
  Json inputs = Json::object();
  const auto add = [&](const std::optional<SourceFile>& source) {
    if (source) inputs.set(source->path, source->sha256);
  };
  if (request.image) add(request.image->source);
  if (request.video) add(request.video->source);
  if (request.latents) add(request.latents->source);
  if (request.action && request.action->raw_actions) add(request.action->raw_actions->source);
  if (request.transfer) {
    for (const Control& control : request.transfer->controls) add(control.video.source);
  }
  return inputs;
}

}  // namespace orrery
