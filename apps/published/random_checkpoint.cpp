#include "published/random_checkpoint.h"

#include <optional>
#include <system_error>

#include "backend/dry_run.h"
#include "base/error.h"
#include "engine/clock.h"
#include "io/safetensors.h"
#include "model/random_weights.h"
#include "model/sound.h"
#include "model/transformer.h"
#include "model/vae.h"
#include "orrery/output.h"
#include "text/tokenizer.h"
#include "text/vocabulary.h"

namespace orrery {

namespace {

namespace fs = std::filesystem;

constexpr int64_t kShardBytes = 5'000'000'000;
constexpr int64_t kMegabyte = 1'000'000;
constexpr int64_t kHeadroomBytes = 64'000'000;  // headers, configs, tokenizer

double gigabytes(int64_t bytes) { return static_cast<double>(bytes) * 1e-9; }

// The layout of one component: shards of at most kShardBytes, or of one larger tensor.
struct MadeComponent {
  std::string name;
  std::vector<std::vector<TensorSpec>> shards;

  int64_t bytes() const {
    int64_t total = 0;
    for (const auto& shard : shards) {
      for (const TensorSpec& tensor : shard) total += tensor.bytes();
    }
    return total;
  }
  std::string file_of(size_t shard) const {
    if (shards.size() == 1) return std::string(kWeightsName);
    const auto digits = [](size_t number) {
      const std::string text = std::to_string(number);
      return std::string(5 - std::min<size_t>(5, text.size()), '0') + text;
    };
    return concat("diffusion_pytorch_model-", digits(shard + 1), "-of-", digits(shards.size()),
                  ".safetensors");
  }
};

MadeComponent component_of(std::string name, const std::vector<ListedTensor>& tensors) {
  MadeComponent out{std::move(name), {{}}};
  int64_t filled = 0;
  for (const ListedTensor& tensor : tensors) {
    TensorSpec spec{tensor.name, DType::bf16, tensor.shape};
    if (filled > 0 && filled + spec.bytes() > kShardBytes) {
      out.shards.emplace_back();
      filled = 0;
    }
    filled += spec.bytes();
    out.shards.back().push_back(std::move(spec));
  }
  return out;
}

MadeComponent transformer_of(const TransformerConfig& config) {
  DryRunBackend dry(DeviceKind::cpu);
  Transformer model(dry, config, DType::f32);
  std::vector<ListedTensor> tensors =
      list_tensors([&](WeightVisitor& v) { model.visit_und(v), model.visit_gen(v); });
  // What generation never reads but published checkpoints carry.
  tensors.push_back({"lm_head.weight", {config.vocab_size, config.hidden_size}});
  tensors.push_back({"norm.weight", {config.hidden_size}});
  return component_of("transformer", tensors);
}

MadeComponent vae_of(const VaeConfig& config) {
  DryRunBackend dry(DeviceKind::cpu);
  Vae model(dry, config);
  return component_of("vae", list_tensors([&](WeightVisitor& v) { model.visit(v); }));
}

// Weights in pairs of weight norm and snakes as [1, C, 1], as the public decoder holds them.
MadeComponent sound_of(const SoundConfig& config) {
  DryRunBackend dry(DeviceKind::cpu);
  SoundDecoder model(dry, config);
  std::vector<ListedTensor> stored;
  for (const auto& [name, shape] : list_tensors([&](WeightVisitor& v) { model.visit(v); })) {
    if (name.ends_with(".weight")) {
      stored.push_back({name + "_g", {shape[0], 1, 1}});
      stored.push_back({name + "_v", shape});
    } else {
      const bool is_snake = name.ends_with(".alpha") || name.ends_with(".beta");
      stored.push_back({name, is_snake ? Shape{1, shape[0], 1} : shape});
    }
  }
  return component_of("sound_tokenizer", stored);
}

Json model_index(bool has_sound) {
  const auto component = [](const char* library, const char* name) {
    return Json::array({library, name});
  };
  return Json::object()
      .set("_class_name", "Cosmos3OmniPipeline")
      .set("default_use_system_prompt", true)
      .set("enable_safety_checker", false)
      .set("scheduler", component("diffusers", "UniPCMultistepScheduler"))
      .set("sound_tokenizer", has_sound ? component("diffusers", "Cosmos3AVAEAudioTokenizer")
                                        : Json::array({Json(), Json()}))
      .set("text_tokenizer", component("transformers", "TokenizersBackend"))
      .set("transformer", component("diffusers", "Cosmos3OmniTransformer"))
      .set("use_native_flow_schedule", false)
      .set("vae", component("diffusers", "AutoencoderKLWan"));
}

Json scheduler_config() {
  return Json::object()
      .set("_class_name", "UniPCMultistepScheduler")
      .set("num_train_timesteps", 1000)
      .set("prediction_type", "flow_prediction")
      .set("predict_x0", true)
      .set("solver_order", 2)
      .set("solver_type", "bh2")
      .set("lower_order_final", true)
      .set("final_sigmas_type", "zero")
      .set("timestep_spacing", "linspace")
      .set("use_flow_sigmas", true)
      .set("use_karras_sigmas", false)
      .set("flow_shift", 10.0);
}

constexpr const char* kSpecialTokens[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>",
                                          "<|vision_start|>", "<|vision_end|>"};

// Every byte is a token: no merges, so prompts are longer than those of a trained tokenizer.
Json byte_tokenizer() {
  const ByteAlphabet alphabet;
  Json vocabulary = Json::object();
  for (int byte = 0; byte < 256; ++byte) {
    vocabulary.set(alphabet.symbol(static_cast<unsigned char>(byte)), byte);
  }
  Json added = Json::array();
  int64_t id = 256;
  for (const char* token : kSpecialTokens) {
    Json entry = Json::object().set("id", id++).set("content", token);
    for (const char* flag : {"single_word", "lstrip", "rstrip", "normalized"})
      entry.set(flag, false);
    added.push(entry.set("special", true));
  }
  const Json split = Json::object()
                         .set("type", "Split")
                         .set("pattern", Json::object().set("Regex", "\\s+|\\S+"))
                         .set("behavior", "Isolated")
                         .set("invert", false);
  const Json byte_level = Json::object()
                              .set("type", "ByteLevel")
                              .set("add_prefix_space", false)
                              .set("trim_offsets", true)
                              .set("use_regex", false);
  Json model = Json::object().set("type", "BPE");
  for (const char* absent :
       {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"})
    model.set(absent, Json());
  for (const char* off : {"fuse_unk", "byte_fallback", "ignore_merges"}) model.set(off, false);
  return Json::object()
      .set("version", "1.0")
      .set("truncation", Json())
      .set("padding", Json())
      .set("added_tokens", std::move(added))
      .set("normalizer", Json::object().set("type", "NFC"))
      .set("pre_tokenizer", Json::object()
                                .set("type", "Sequence")
                                .set("pretokenizers", Json::array({split, byte_level})))
      .set("post_processor", Json())
      .set("decoder", byte_level)
      .set("model", model.set("vocab", std::move(vocabulary)).set("merges", Json::array()));
}

constexpr const char* kChatTemplate =
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- "
    "'<|im_start|>assistant\\n' }}{%- endif %}";

void write_text(const fs::path& file, const std::string& text) {
  OutputFile out(file);
  out.write(text.data(), text.size());
  out.commit();
}

void write_tokenizer(const fs::path& folder) {
  write_text(folder / "tokenizer.json", byte_tokenizer().dump(1));
  write_text(folder / "tokenizer_config.json", Json::object()
                                                   .set("eos_token", "<|im_end|>")
                                                   .set("pad_token", "<|endoftext|>")
                                                   .set("tokenizer_class", "TokenizersBackend")
                                                   .dump(1));
  write_text(folder / "chat_template.jinja", kChatTemplate);
}

class Writer {
 public:
  Writer(const fs::path& folder, const CheckpointOptions& options, const ProgressCallback& progress,
         std::stop_token stop, int64_t total)
      : folder_(folder), progress_(progress), stop_(std::move(stop)), total_(total) {
    const std::vector<float> normals = RandomCuts::normals(static_cast<uint64_t>(options.seed));
    block_.reserve(normals.size());
    for (float value : normals) block_.push_back(to_bf16(RandomCuts::kDeviation * value));
  }

  void write(const MadeComponent& component, const Json& config) {
    const fs::path folder = folder_ / component.name;
    fs::create_directories(folder);
    Json map = Json::object();
    for (size_t s = 0; s < component.shards.size(); ++s) {
      const std::vector<TensorSpec>& shard = component.shards[s];
      stream_safetensors(folder / component.file_of(s), shard,
                         [&](size_t i, const TensorSink& sink) { values(shard[i], sink); },
                         {{"format", "pt"}});
      for (const TensorSpec& tensor : shard) map.set(tensor.name, component.file_of(s));
    }
    if (component.shards.size() > 1) {
      write_text(folder / kWeightsIndexName,
                 Json::object()
                     .set("metadata", Json::object().set("total_size", component.bytes()))
                     .set("weight_map", std::move(map))
                     .dump(1));
    }
    write_text(folder / "config.json", config.dump(1));
  }

 private:
  void values(const TensorSpec& tensor, const TensorSink& sink) {
    const int64_t count = tensor.shape.numel();
    if (RandomCuts::is_ones(tensor.name) || tensor.name.ends_with("weight_g")) {
      const std::vector<bf16> ones(static_cast<size_t>(count), to_bf16(1.0f));
      sink(ones.data(), ones.size() * sizeof(bf16));
    } else {
      cuts_.next(count, [&](int64_t, int64_t from, int64_t size) {
        if (stop_.stop_requested())
          fail(ErrorKind::cancelled, "stopped while writing ", folder_.string());
        sink(block_.data() + from, static_cast<size_t>(size) * sizeof(bf16));
      });
    }
    const int64_t before = done_ / kMegabyte;
    done_ += tensor.bytes();
    if (!progress_ || done_ / kMegabyte == before) return;
    Progress progress;
    progress.stage = "write";
    progress.step = done_ / kMegabyte;
    progress.total = total_ / kMegabyte;
    progress.seconds = seconds_since(start_);
    const auto written = static_cast<double>(done_), rest = static_cast<double>(total_ - done_);
    progress.seconds_left = progress.seconds / written * rest;
    progress_(progress);
  }

  fs::path folder_;
  const ProgressCallback& progress_;
  std::stop_token stop_;
  int64_t total_, done_ = 0;
  std::vector<bf16> block_;
  RandomCuts cuts_;
  Clock::time_point start_ = Clock::now();
};

// The absolute path to write, whose folder exists.
fs::path checked_target(const fs::path& folder) {
  require(!folder.empty(), "make-checkpoint: the output folder has no name");
  fs::path target = fs::absolute(folder).lexically_normal();
  if (target.filename().empty()) target = target.parent_path();
  std::error_code none;
  const bool is_free =
      !fs::exists(target, none) || (fs::is_directory(target, none) && fs::is_empty(target, none));
  require(is_free, target.string(), ": exists and is not an empty folder; choose another --out");
  require(fs::is_directory(target.parent_path(), none), ErrorKind::not_found, target.string(),
          ": the folder ", target.parent_path().string(), " does not exist");
  return target;
}

}  // namespace

void write_random_checkpoint(const fs::path& folder, const ModelPreset& preset,
                             const CheckpointOptions& options, const ProgressCallback& progress,
                             std::stop_token stop) {
  const fs::path target = checked_target(folder);
  const TransformerConfig config = TransformerConfig::from_json(preset.transformer);
  const MadeComponent transformer = transformer_of(config),
                      vae = vae_of(VaeConfig::from_json(preset.vae));
  if (!options.tokenizer.empty()) {
    const int64_t ids = Tokenizer::load(options.tokenizer).vocab_size();
    require(ids <= config.vocab_size, options.tokenizer.string(), ": has ids up to ", ids - 1,
            ", but the transformer's vocabulary ends at ", config.vocab_size);
  }

  std::optional<MadeComponent> sound;
  if (!preset.sound.is_null()) sound = sound_of(SoundConfig::from_json(preset.sound));

  const int64_t bytes = transformer.bytes() + vae.bytes() + (sound ? sound->bytes() : 0);
  const auto available = static_cast<int64_t>(fs::space(target.parent_path()).available);
  require(bytes + kHeadroomBytes <= available, ErrorKind::invalid_argument, target.string(), ": ",
          gigabytes(bytes), " GB will be written, but only ", gigabytes(available),
          " GB are free on that disk; choose another --out or fewer --num-layers");
  if (options.log) {
    options.log(concat("writing ", gigabytes(bytes), " GB to ", target.string(), "; ",
                       gigabytes(available), " GB are free there"));
  }

  OutputFolder unfinished(target);
  Writer writer(unfinished.path(), options, progress, std::move(stop), bytes);
  writer.write(transformer, preset.transformer);
  writer.write(vae, preset.vae);
  if (sound) writer.write(*sound, preset.sound);
  fs::create_directories(unfinished.path() / "scheduler");
  write_text(unfinished.path() / "scheduler/scheduler_config.json", scheduler_config().dump(1));
  const fs::path tokenizer = unfinished.path() / "text_tokenizer";
  fs::create_directories(tokenizer);
  if (options.tokenizer.empty())
    write_tokenizer(tokenizer);
  else
    fs::copy(options.tokenizer, tokenizer,
             fs::copy_options::recursive | fs::copy_options::overwrite_existing);
  write_text(unfinished.path() / "model_index.json", model_index(sound.has_value()).dump(1));
  unfinished.commit();
}

void make_checkpoint(const fs::path& folder, const CheckpointOptions& options,
                     const ProgressCallback& progress, std::stop_token stop) {
  ModelPreset preset = model_preset(options.config);
  require(options.num_layers >= 0, "num_layers is ", options.num_layers,
          ", expected 0 (the config's) or more");
  if (options.num_layers > 0) preset.transformer.set("num_hidden_layers", options.num_layers);
  write_random_checkpoint(folder, preset, options, progress, std::move(stop));
}

}  // namespace orrery
