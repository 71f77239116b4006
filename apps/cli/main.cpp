// orrery: the command line.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <optional>
#include <tuple>

#include "bench/bench.h"
#include "commands.h"
#include "failure.h"
#include "orrery/media.h"

namespace {

using namespace orrery;

const std::vector<std::string> kOnOff{"on", "off"};

[[noreturn]] void refuse(const std::string& sentence) {
  throw Error(ErrorKind::invalid_argument, sentence);
}

// A flag that takes one of the names of E.
template <typename E, typename Target>
CLI::Option* add_choice(CLI::App& app, const char* flag, Target& target, const std::string& help) {
  return app.add_option_function<std::string>(
      flag,
      [flag, &target](const std::string& given) {
        const std::optional<E> value = value_named<E>(given);
        if (!value) {
          throw CLI::ValidationError(flag, "\"" + given + "\" is not one of " + list_of_names<E>());
        }
        target = *value;
      },
      help + ": " + list_of_names<E>());
}

// The two sides of NAME=VALUE.
std::pair<std::string, std::string> parse_pair(const char* flag, const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == 0 || equals == std::string::npos || equals + 1 == text.size()) {
    refuse(std::string(flag) + " \"" + text + "\": expected HINT=VALUE");
  }
  return {text.substr(0, equals), text.substr(equals + 1)};
}

ControlHint hint_named(const std::string& name) {
  const std::optional<ControlHint> hint = value_named<ControlHint>(name);
  if (!hint) {
    refuse("control \"" + name + "\" is not known; it is " + list_of_names<ControlHint>());
  }
  return *hint;
}

// The whole text as a number.
std::optional<double> parse_number(const std::string& text) {
  try {
    size_t used = 0;
    const double value = std::stod(text, &used);
    if (used == text.size()) return value;
  } catch (const std::exception&) {
  }
  return std::nullopt;
}

// Flags of structural control.
struct TransferFlags {
  std::vector<std::string> controls, weights;
  std::optional<ControlPreset> edge_preset, blur_preset;
  std::vector<double> guidance_interval, control_guidance_interval;
  TransferRequest transfer;

  void add(CLI::App& app) {
    app.add_option("--control", controls,
                   "Control video as HINT=FILE, hint edge, blur, depth, seg or wsm; may be given "
                   "several times. edge or "
                   "blur alone: computed from --video-path")
        ->take_all();
    add_choice<ControlPreset>(app, "--preset-edge-threshold", edge_preset,
                              "Of a computed edge control");
    add_choice<ControlPreset>(app, "--preset-blur-strength", blur_preset,
                              "Of a computed blur control");
    app.add_option("--control-weight", weights,
                   "Weight of one of several controls as HINT=NUMBER; default 1 each")
        ->take_all();
    app.add_flag("--emphasize-control-in-prompt", transfer.emphasize_control_in_prompt,
                 "Add a sentence to the prompt that asks to follow the controls");
    app.add_option("--control-guidance", transfer.control_guidance,
                   "How much the controls count, 1 for plain; default by hint");
    app.add_option("--num-conditional-frames", transfer.num_conditional_frames,
                   "Frames a chunk takes over from the one before")
        ->capture_default_str();
    app.add_option("--num-first-chunk-conditional-frames",
                   transfer.num_first_chunk_conditional_frames,
                   "Frames of --video-path that the first chunk keeps")
        ->capture_default_str();
    app.add_option("--num-video-frames-per-chunk", transfer.num_video_frames_per_chunk,
                   "Frames made at once; default all, 101 for a wsm control alone");
    add_choice<ChunkNoise>(app, "--chunk-noise", transfer.chunk_noise,
                           "Later chunks, whether the generator goes on or starts from seed + c");
    app.add_option("--guidance-interval", guidance_interval,
                   "Timesteps between which guidance works, A B")
        ->expected(2);
    app.add_option("--control-guidance-interval", control_guidance_interval,
                   "Timesteps between which control guidance works, A B")
        ->expected(2);
    add_choice<ControlAttention>(app, "--control-attention", transfer.attention,
                                 "Several controls, each on its own or all together");
  }

  // Whether any flag of transfer was given without a control.
  bool is_stray(const CLI::App& app) const {
    for (const char* flag :
         {"--preset-edge-threshold", "--preset-blur-strength", "--emphasize-control-in-prompt",
          "--chunk-noise", "--control-weight", "--control-guidance", "--num-conditional-frames",
          "--num-first-chunk-conditional-frames", "--num-video-frames-per-chunk",
          "--guidance-interval", "--control-guidance-interval", "--control-attention"}) {
      if (app.count(flag) > 0) return true;
    }
    return false;
  }

  // Reads the videos.
  std::optional<TransferRequest> resolve(const CLI::App& app) const {
    if (controls.empty()) {
      if (is_stray(app))
        refuse("a flag of structural control is given without --control HINT=FILE");
      return std::nullopt;
    }
    TransferRequest out = transfer;
    for (const std::string& text : controls) {
      if (text == "edge" || text == "blur") {
        out.controls.push_back({*value_named<ControlHint>(text), {}});
        continue;
      }
      const auto [hint, file] = parse_pair("--control", text);
      out.controls.push_back({hint_named(hint), load_clip(file)});
    }
    for (const auto& [hint, flag, preset] :
         {std::tuple{ControlHint::edge, "--preset-edge-threshold", edge_preset},
          {ControlHint::blur, "--preset-blur-strength", blur_preset}}) {
      if (!preset) continue;
      const auto control = std::find_if(out.controls.begin(), out.controls.end(),
                                        [hint = hint](const Control& c) { return c.hint == hint; });
      if (control == out.controls.end())
        refuse(std::string(flag) + ": there is no --control " + std::string(name_of(hint)));
      control->preset = preset;
    }
    for (const std::string& text : weights) {
      const auto [hint, number] = parse_pair("--control-weight", text);
      const std::optional<double> weight = parse_number(number);
      if (!weight) refuse("--control-weight " + text + ": \"" + number + "\" is no number");
      bool found = false;
      for (Control& control : out.controls) {
        if (name_of(control.hint) != hint) continue;
        control.weight = weight;
        found = true;
      }
      if (!found) refuse("--control-weight " + text + ": there is no --control " + hint + "=FILE");
    }
    const auto interval = [](const std::vector<double>& ends) -> std::optional<TimestepInterval> {
      if (ends.empty()) return std::nullopt;
      return TimestepInterval{ends[0], ends[1]};
    };
    out.guidance_interval = interval(guidance_interval);
    out.control_guidance_interval = interval(control_guidance_interval);
    return out;
  }
};

// Flags that say what to generate; shared by generate and plan.
struct RequestFlags {
  Request request;
  std::string karras, scheduler, use_system_prompt;
  std::optional<ActionMode> action_mode;
  ActionRequest action;
  TransferFlags transfer;
  bool no_duration = false, no_resolution = false;

  void add(CLI::App& app) {
    app.add_option("--negative-prompt", request.negative_prompt, "What the picture should not be");
    app.add_option("--height", request.height,
                   "Pixels, a multiple of the VAE's factor (16); default 720");
    app.add_option("--width", request.width,
                   "Pixels, a multiple of the VAE's factor (16); default 1280");
    app.add_option("--num-frames", request.num_frames,
                   "4 n + 1 frames; 1 makes an image; default 189");
    app.add_option("--fps", request.fps,
                   "Frames a second; default 24, of a transfer that of --video-path");
    app.add_option("--num-inference-steps", request.num_inference_steps,
                   "Denoising steps; default 35");
    app.add_option("--guidance-scale", request.guidance_scale,
                   "Classifier-free guidance, 1 for none; default 6");
    app.add_option("--flow-shift", request.flow_shift,
                   "Shift of the sigma grid; switches Karras sigmas off");
    app.add_option("--karras", karras,
                   "Karras sigmas: on or off; default as the checkpoint, see --scheduler")
        ->check(CLI::IsMember(kOnOff));
    app.add_option("--scheduler", scheduler,
                   "auto: the recommended grid where the checkpoint's own blurs video; checkpoint: "
                   "the file's own")
        ->check(CLI::IsMember({"auto", "checkpoint"}));
    app.add_option("--seed", request.seed, "Seed of the noise")->capture_default_str();
    add_choice<RngKind>(app, "--rng", request.rng,
                        "Whose generator's numbers a seed means, PyTorch's of");
    add_choice<NoiseType>(app, "--noise-dtype", request.noise_dtype, "Stream of that generator");
    app.add_flag("--no-duration-template", no_duration,
                 "Do not append the duration sentence to the prompts");
    app.add_flag("--no-resolution-template", no_resolution,
                 "Do not append the resolution sentence to the prompts");
    app.add_option("--use-system-prompt", use_system_prompt,
                   "on or off; default as the checkpoint, off for actions")
        ->check(CLI::IsMember(kOnOff));
    app.add_flag("--vae-tiling", request.vae_tiling,
                 "Decode and encode in spatial tiles: less memory");
    app.add_flag("--enable-sound", request.enable_sound, "Generate sound with the video");
    app.add_option("--condition-frame-indexes-vision", request.condition_frame_indexes_vision,
                   "Latent frames that a conditioning video fixes, with blanks or commas between; "
                   "default 0,1")
        ->delimiter(',');
    add_choice<VideoKeep>(app, "--condition-video-keep", request.condition_video_keep,
                          "Which end of the video");
    add_choice<VideoFit>(app, "--video-fit", request.video_fit,
                         "Videos and controls of another shape");
    add_choice<ActionMode>(app, "--action-mode", action_mode, "What to do with actions");
    app.add_option("--action-chunk-size", action.chunk_size, "Actions in the clip")
        ->capture_default_str();
    app.add_option("--domain-name", action.domain_name, "Embodiment, for example pusht");
    add_choice<ViewPoint>(app, "--view-point", action.view_point, "Where the camera is");
    app.add_option("--resolution-tier", action.resolution_tier, "256, 480, 704 or 720")
        ->capture_default_str();
    transfer.add(app);
  }

  Request resolve(const CLI::App& app) const {
    Request out = request;
    out.transfer = transfer.resolve(app);
    if (!karras.empty()) out.karras = karras == "on";
    out.checkpoint_scheduler = scheduler == "checkpoint";
    if (!use_system_prompt.empty()) out.use_system_prompt = use_system_prompt == "on";
    out.add_duration_template = !no_duration;
    out.add_resolution_template = !no_resolution;
    if (action_mode) {
      out.action = action;
      out.action->mode = *action_mode;
      // As the public entry point does.
      if (use_system_prompt.empty()) out.use_system_prompt = false;
    }
    return out;
  }
};

// FILE or FILE:SCALE. A file whose own name ends like that is taken as a file.
LoraFile parse_lora(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || std::filesystem::exists(text)) return {text, 1};
  const std::string number = text.substr(colon + 1);
  const std::optional<double> scale = parse_number(number);
  if (!scale) {
    refuse("--lora \"" + text + "\": \"" + number +
           "\" after the colon is no number; expected FILE or FILE:SCALE");
  }
  return {text.substr(0, colon), *scale};
}

// Flags of what a request reads.
void add_input_flags(CLI::App& app, RequestFlags& flags, cli::GenerateFiles& files) {
  CLI::Option* prompt = app.add_option("--prompt", flags.request.prompt, "What to generate");
  app.add_option("--prompt-file", files.prompt_file,
                 "File with the prompt: text, or JSON with \"prompt\" and perhaps "
                 "\"negative_prompt\"; any other "
                 "JSON object is the caption itself")
      ->excludes(prompt);
  app.add_option("--vision-path,--image", files.vision,
                 "Image that becomes the first frame; for actions also a video");
  app.add_option("--video-path", files.video, "Video that conditions the generation");
  app.add_option("--action-path", files.action,
                 "Actions for forward_dynamics: JSON rows or safetensors");
  flags.add(app);
}

// The same for commands that run it.
void add_run_flags(CLI::App& app, RequestFlags& flags, cli::GenerateFiles& files) {
  app.add_option("--model", files.model, "Model folder (diffusers layout)")->required();
  add_input_flags(app, flags, files);
  app.add_option("--latents", files.latents,
                 "Safetensors file whose \"latents\" replace the noise");
  app.add_option("--crf", files.crf, "H.264 quality, 1 to 51, lower is better")
      ->check(CLI::Range(1, 51))
      ->capture_default_str();
}

void add_device_flags(CLI::App& app, EngineOptions& options) {
  app.add_option("--device", options.device, "cpu, cuda, cuda:N or auto")->capture_default_str();
  add_choice<ComputeType>(app, "--dtype", options.dtype,
                          "Of activations; auto is fp32 on the CPU, bf16 on CUDA");
  app.add_option("--threads", options.num_threads, "CPU threads; 0: all cores");
  add_choice<Offload>(app, "--offload", options.offload,
                      "Weights that leave the device: none, all but the part in use, all but a few "
                      "layers");
  app.add_flag("--graphs,!--no-graphs", options.graphs,
               "Replay denoising steps as recorded graphs (CUDA); default on");
}

void add_engine_flags(CLI::App& app, EngineOptions& options) {
  add_device_flags(app, options);
  app.add_option("--attention", options.attention,
                 "Attention strategy: a JSON file, JSON text, or dense")
      ->envname("ORRERY_ATTENTION");
}

void add_warm_up_flag(CLI::App& app, EngineOptions& options) {
  add_choice<WarmUpMode>(app, "--warm-up", options.warm_up,
                         "Run every attention layout once before the first step");
}

// The degrees of a mesh of ranks.
void add_mesh_flags(CLI::App& app, EngineOptions& options) {
  app.add_option("--tp-degree", options.tp_degree, "Ranks that cut the weights")
      ->capture_default_str();
  app.add_option("--cp-degree", options.cp_degree, "Ranks that cut the generation sequence")
      ->capture_default_str();
  app.add_option("--cfg-degree", options.cfg_degree,
                 "Ranks that share out the guidance branches, 1 or 2")
      ->capture_default_str();
}

// Parses on every rank of a job; all must be given the same. Help is no error.
void parse_together(CLI::App& app, int argc, char** argv, Job& job) {
  std::optional<CLI::ParseError> help;
  job.agree([&] {
    std::string all;
    for (int i = 1; i < argc; ++i) all += std::string(argv[i]) + '\n';
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      if (error.get_exit_code() != 0)
        throw Error(ErrorKind::invalid_argument, cli::explain_failure(&app, error));
      help = error;
    }
    return all;
  });
  if (help) throw *help;
}

int run(int argc, char** argv, Job& job) {
  CLI::App app{"Native inference for NVIDIA Cosmos 3 world models"};
  app.require_subcommand(1);
  app.failure_message(cli::explain_failure);
  app.set_version_flag("--version", version());

  RequestFlags generate_flags;
  cli::GenerateFiles files;
  EngineOptions generate_options;
  CLI::App* generate = app.add_subcommand("generate", "Make an image or a video from a prompt");
  generate
      ->add_option("--output", files.output,
                   "File (.mp4 .png .jpg), or a folder for sample.mp4 or sample.png")
      ->capture_default_str();
  add_run_flags(*generate, generate_flags, files);
  add_engine_flags(*generate, generate_options);
  add_mesh_flags(*generate, generate_options);
  add_warm_up_flag(*generate, generate_options);
  generate->add_option("--save-latents", files.save_latents,
                       "Write the final latents here (safetensors)");
  generate->add_option("--save-action", files.save_action,
                       "Write predicted actions here (.json or .safetensors)");
  generate->add_option("--save-sound", files.save_sound, "Write the sound here too (.wav)");
  generate->add_option("--report", files.report,
                       "Write a JSON report: settings, times, memory, dispatch");
  std::vector<std::string> lora;
  generate
      ->add_option("--lora", lora,
                   "LoRA adapter to merge, FILE or FILE:SCALE; may be given several times")
      ->take_all();
  CLI::Option* guardrail = generate->add_option(
      "--guardrail", generate_options.guardrail,
      "Shell command that approves the prompt and the frames; see docs/modes.md");
  bool no_safety_check = false;
  generate
      ->add_flag("--no-safety-check,--disable-safety-checker", no_safety_check,
                 "No guardrail is wanted; the result says that the check was switched off")
      ->excludes(guardrail);
  generate
      ->add_option("--guardrail-timeout", generate_options.guardrail_timeout,
                   "Seconds a verdict may take")
      ->capture_default_str();
  generate->add_flag("--profile", generate_options.profile, "Time every operation for the report");
  generate->add_flag("--quiet", files.quiet, "Print nothing but the output's name");

  RequestFlags compare_flags;
  cli::CompareFiles compare_files;
  CompareOptions compare_options;
  EngineOptions compare_engine;
  CLI::App* compare =
      app.add_subcommand("compare", "One request under several attention strategies, side by side");
  compare
      ->add_option(
          "--attention", compare_files.attention,
          "Strategy: a JSON file, JSON text, or dense; several times, the first is the yardstick")
      ->required()
      ->take_all();
  compare
      ->add_option("--output", compare_files.inputs.output,
                   "Video file, or a folder for compare.mp4; a .png, .json "
                   "and .txt of the same name lie beside it")
      ->capture_default_str();
  compare
      ->add_option("--repeats", compare_options.repeats,
                   "Runs of each strategy; the fastest counts, step by step")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  add_run_flags(*compare, compare_flags, compare_files.inputs);
  add_device_flags(*compare, compare_engine);
  add_warm_up_flag(*compare, compare_engine);
  compare->add_flag("--quiet", compare_files.inputs.quiet, "Print nothing but the table");

  RequestFlags plan_flags;
  EngineOptions plan_options;
  cli::GenerateFiles plan_files;
  bool plan_json = false;
  CLI::App* plan =
      app.add_subcommand("plan", "Memory, flops and time floor of a request, before loading");
  plan_flags.request.prompt = "A prompt.";  // its length counts
  plan->add_option("model,--model", plan_files.model, "Model folder")->required();
  add_input_flags(*plan, plan_flags, plan_files);
  plan->add_flag("--json", plan_json, "Print JSON");
  add_engine_flags(*plan, plan_options);
  add_mesh_flags(*plan, plan_options);

  std::filesystem::path inspect_model;
  std::string inspect_strategy;
  bool inspect_json = false;
  EngineOptions inspect_options;
  CLI::App* inspect =
      app.add_subcommand("inspect", "Components, parameters and abilities of a model folder");
  inspect->add_option("model,--model", inspect_model, "Model folder")->required();
  inspect->add_option("--attention", inspect_strategy,
                      "Print this strategy resolved on the model instead");
  inspect->add_option("--device", inspect_options.device, "Where the strategy would run")
      ->capture_default_str();
  inspect->add_flag("--json", inspect_json, "Print JSON");
  bool inspect_verify = false;
  inspect->add_flag("--verify", inspect_verify,
                    "Read every byte: values finite and likely, checksums where they lie beside "
                    "the files");

  std::filesystem::path tokenize_model;
  std::string text;
  std::vector<int64_t> ids;
  CLI::App* tokenize = app.add_subcommand("tokenize", "Token ids of a text, or the text of ids");
  tokenize->add_option("model,--model", tokenize_model, "Model folder")->required();
  CLI::Option* text_option = tokenize->add_option("text,--text", text, "Text");
  tokenize->add_option("--decode", ids, "Ids to turn into text")->excludes(text_option);

  CheckpointOptions checkpoint_options;
  std::filesystem::path checkpoint_folder;
  CLI::App* make_checkpoint = app.add_subcommand(
      "make-checkpoint", "Write a model folder of a published size with random weights");
  make_checkpoint->add_option("--config", checkpoint_options.config, "nano, super or edge")
      ->check(CLI::IsMember({"nano", "super", "edge"}))
      ->capture_default_str();
  make_checkpoint->add_option("--num-layers", checkpoint_options.num_layers,
                              "Layers; 0: the config's");
  make_checkpoint->add_option("--seed", checkpoint_options.seed, "Seed of the weights")
      ->capture_default_str();
  make_checkpoint->add_option("--tokenizer", checkpoint_options.tokenizer,
                              "Folder of a tokenizer to copy; default: one token a byte");
  make_checkpoint->add_option("--out", checkpoint_folder, "Folder to write, new or empty")
      ->required();

  BenchOptions bench_options;
  EngineOptions bench_engine;
  CLI::App* bench =
      app.add_subcommand("bench", "Measure a published model size with random weights; JSON lines");
  bench->add_option("what", bench_options.what, "layer, step, vae, e2e, attention, load or link")
      ->check(CLI::IsMember({"layer", "step", "vae", "e2e", "attention", "load", "link"}))
      ->capture_default_str();
  bench->add_option("--model", bench_options.model, "Model folder to load, of load");
  bench->add_option("--config", bench_options.config, "nano, super or edge")->capture_default_str();
  bench->add_option("--num-layers", bench_options.num_layers, "Layers; 0: the config's");
  bench->add_option("--height", bench_options.height, "Pixels")->capture_default_str();
  bench->add_option("--width", bench_options.width, "Pixels")->capture_default_str();
  bench->add_option("--num-frames", bench_options.num_frames, "Frames")->capture_default_str();
  bench->add_option("--num-inference-steps", bench_options.num_inference_steps, "Steps")
      ->capture_default_str();
  bench->add_option("--guidance-scale", bench_options.guidance_scale, "1 runs one branch")
      ->capture_default_str();
  bench->add_option("--text-tokens", bench_options.text_tokens, "Tokens of each prompt")
      ->capture_default_str();
  bench->add_option("--meshes", bench_options.meshes,
                    "step, vae and link: meshes of ranks beside one device, as in cp2,cfg2,tp2cp2; "
                    "cp2@N: at least N rows "
                    "travel at once; none: that of the degrees");
  bench->add_flag("--timeline", bench_options.timeline,
                  "step: the times of every operation of one layer too");
  bench->add_option("--query-tokens", bench_options.query_tokens,
                    "Of attention; 0: the request's tokens");
  bench->add_option("--key-tokens", bench_options.key_tokens,
                    "Of attention; 0: the queries and the text tokens");
  bench->add_option("--heads", bench_options.heads, "Of attention; 0: the config's");
  bench->add_option("--kv-heads", bench_options.kv_heads, "Of attention; 0: the config's");
  bench->add_option("--head-dim", bench_options.head_dim, "Of attention; 0: the config's");
  bench
      ->add_option("--sparsity", bench_options.sparsity,
                   "Share of key blocks left out, of attention")
      ->capture_default_str();
  add_engine_flags(*bench, bench_engine);

  try {
    if (job.size() == 1)
      app.parse(argc, argv);
    else
      parse_together(app, argc, argv, job);
  } catch (const CLI::ParseError& error) {
    // Help and version are successes; whatever else the parser refuses is the user's to mend.
    if (job.rank() > 0) return 0;
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (job.size() > 1 && !*generate && !*bench) {
    throw Error(ErrorKind::invalid_argument,
                "only generate and bench run on several ranks; start this command without mpirun");
  }

  generate_options.safety_check = !no_safety_check;
  for (const std::string& adapter : lora) generate_options.lora.push_back(parse_lora(adapter));

  if (*generate)
    return cli::generate(generate_flags.resolve(*generate), files, generate_options, job);
  if (*compare)
    return cli::compare(compare_flags.resolve(*compare), compare_files, compare_options,
                        compare_engine);
  if (*plan) return cli::plan(plan_flags.resolve(*plan), plan_files, plan_options, plan_json);
  if (*bench) {
    bench_options.attention = bench_engine.attention;
    bench_engine.job = &job;
    for (int i = 0; i < argc; ++i) bench_options.command += (i ? " " : "") + std::string(argv[i]);
    run_bench(bench_options, bench_engine,
              [](const std::string& line) { std::cout << line << std::endl; });
    return 0;
  }
  if (*make_checkpoint) return cli::make_checkpoint(checkpoint_folder, checkpoint_options);
  if (*inspect) {
    if (inspect_verify) {
      std::cout << orrery::verify(inspect_model);
      return 0;
    }
    std::cout << (inspect_strategy.empty() ? orrery::inspect(inspect_model, inspect_json)
                                           : orrery::inspect_attention(
                                                 inspect_model, inspect_strategy, inspect_options));
    return 0;
  }
  if (!ids.empty()) {
    std::cout << detokenize(tokenize_model, ids) << "\n";
    return 0;
  }
  const char* separator = "";
  for (int64_t id : orrery::tokenize(tokenize_model, text)) {
    std::cout << separator << id;
    separator = " ";
  }
  std::cout << "\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::optional<orrery::Job> job;
  // A rank that fails ends all, unless all have failed of the same: then rank 0 tells.
  const auto ended = [&](const char* message, int status) {
    const int rank = job ? job->rank() : 0;
    const bool together = job && job->failed_together();
    if (rank == 0)
      std::fprintf(stderr, "orrery: %s\n", message);
    else if (!together)
      std::fprintf(stderr, "orrery: rank %d: %s\n", rank, message);
    if (job && !together) job->abort(status);
    return status;
  };
  try {
    job.emplace(orrery::Job::join());
    return run(argc, argv, *job);
  } catch (const orrery::Error& error) {
    return ended(error.what(), orrery::cli::exit_status(error.kind()));
  } catch (const std::exception& error) {
    return ended(error.what(), 1);
  }
}
