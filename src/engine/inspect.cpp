// What a model folder holds and can do, without reading a weight.
#include <iomanip>
#include <sstream>

#include "attention/strategy.h"
#include "backend/dry_run.h"
#include "base/error.h"
#include "engine/settings.h"
#include "model/transformer.h"
#include "orrery/engine.h"

namespace orrery {

namespace {

namespace fs = std::filesystem;

Json component_json(const fs::path& folder) {
  const Safetensors files = Safetensors::open_folder(folder);
  int64_t parameters = 0;
  std::map<std::string, int64_t> types;
  for (const StoredTensor& tensor : files.tensors()) {
    parameters += tensor.shape.numel();
    ++types[tensor.stored_type];
  }
  Json stored = Json::object();
  for (const auto& [type, count] : types) stored.set(type, count);
  return Json::object()
      .set("tensors", static_cast<int64_t>(files.tensors().size()))
      .set("parameters", parameters)
      .set("bytes", files.total_bytes())
      .set("tensors_by_type", std::move(stored));
}

std::string size_text(int64_t bytes) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(1);
  if (bytes >= 1000000000)
    out << static_cast<double>(bytes) * 1e-9 << " GB";
  else
    out << static_cast<double>(bytes) * 1e-6 << " MB";
  return out.str();
}

Json describe(const fs::path& model) {
  const Checkpoint checkpoint = read_checkpoint(model);
  const TransformerConfig& t = checkpoint.transformer;
  Json components = Json::object();
  components.set("transformer", component_json(model / "transformer")
                                    .set("num_hidden_layers", t.num_hidden_layers)
                                    .set("hidden_size", t.hidden_size)
                                    .set("num_attention_heads", t.num_attention_heads)
                                    .set("num_key_value_heads", t.num_key_value_heads)
                                    .set("head_dim", t.head_dim));
  if (!t.quantisation.method.empty()) components.set("quantisation", t.quantisation.method);
  components.set("vae", component_json(model / "vae")
                            .set("latent_channels", checkpoint.vae.z_dim)
                            .set("spatial_factor", checkpoint.vae.scale_factor_spatial)
                            .set("temporal_factor", checkpoint.vae.scale_factor_temporal));
  if (checkpoint.folder.sound_tokenizer) {
    components.set("sound_tokenizer", component_json(model / "sound_tokenizer"));
  }
  const Tokenizer tokenizer = Tokenizer::load(model / "text_tokenizer");
  components.set("text_tokenizer", Json::object().set("tokens", tokenizer.vocab_size()));
  const SchedulerConfig& s = checkpoint.scheduler;
  components.set("scheduler", Json::object()
                                  .set("class", s.kind == SchedulerConfig::Kind::unipc
                                                    ? "UniPCMultistepScheduler"
                                                    : "FlowMatchEulerDiscreteScheduler")
                                  .set("flow_shift", s.flow_shift)
                                  .set("use_karras_sigmas", s.use_karras_sigmas)
                                  .set("native_schedule", s.native_schedule));
  Json modes = Json::array();
  for (const char* mode : {"text to image", "text to video", "image to video", "video to video"})
    modes.push(mode);
  if (checkpoint.makes_sound()) modes.push("sound with any of these");
  if (t.action_gen) {
    for (const char* mode : {"policy", "forward dynamics", "inverse dynamics"}) modes.push(mode);
  }
  return Json::object()
      .set("model", model.string())
      .set("pipeline", checkpoint.folder.class_name)
      .set("distilled", checkpoint.folder.is_distilled())
      .set("components", std::move(components))
      .set("modes", std::move(modes))
      .set("attention_strategy",
           checkpoint.attention_strategy ? "in the checkpoint" : "none (dense)");
}

}  // namespace

std::string inspect(const fs::path& model, bool json) {
  const Json info = describe(model);
  if (json) return info.dump(1);
  std::ostringstream out;
  out << info.at("model").as_string() << " (" << info.at("pipeline").as_string() << ")\n";
  for (const auto& [name, part] : info.at("components").members()) {
    out << "  " << std::left << std::setw(16) << name;
    if (const Json* parameters = part.find("parameters")) {
      out << parameters->as_int() << " parameters in " << part.at("tensors").as_int()
          << " tensors, " << size_text(part.at("bytes").as_int());
      for (const auto& [type, count] : part.at("tensors_by_type").members()) {
        out << ", " << count.as_int() << " " << type;
      }
    }
    const char* separator = part.has("parameters") ? "; " : "";
    for (const auto& [key, value] : part.members()) {
      if (key == "parameters" || key == "tensors" || key == "bytes" || key == "tensors_by_type")
        continue;
      out << separator << key << " " << (value.is_string() ? value.as_string() : value.dump());
      separator = ", ";
    }
    out << "\n";
  }
  out << "  modes           ";
  const char* separator = "";
  for (const Json& mode : info.at("modes").items()) {
    out << separator << mode.as_string();
    separator = ", ";
  }
  out << "\n  attention       " << info.at("attention_strategy").as_string() << "\n";
  return out.str();
}

}  // namespace orrery
