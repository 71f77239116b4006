#include "model/lora_names.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace orrery {

namespace {

// Framework name, checkpoint name. Whole dotted parts at the end of a module.
constexpr std::array<std::pair<std::string_view, std::string_view>, 14> kFrameworkNames{{
    {"q_proj", "to_q"},
    {"k_proj", "to_k"},
    {"v_proj", "to_v"},
    {"o_proj", "to_out"},
    {"q_proj_moe_gen", "add_q_proj"},
    {"k_proj_moe_gen", "add_k_proj"},
    {"v_proj_moe_gen", "add_v_proj"},
    {"o_proj_moe_gen", "to_add_out"},
    {"vae2llm", "proj_in"},
    {"llm2vae", "proj_out"},
    {"time_embedder.mlp.0", "time_embedder.linear_1"},
    {"time_embedder.mlp.2", "time_embedder.linear_2"},
    {"sound2llm", "audio_proj_in"},
    {"llm2sound", "audio_proj_out"},
}};

constexpr std::array<std::string_view, 6> kPrefixes{
    "transformer", "base_model", "model", "net", "language_model", "diffusion_model"};
constexpr std::string_view kUnderscored = "lora_unet_";

// `name` without any of the prefixes, each followed by `separator`.
std::string_view without_prefixes(std::string_view name, char separator) {
  for (bool stripped = true; stripped;) {
    stripped = false;
    for (const std::string_view prefix : kPrefixes) {
      if (name.size() <= prefix.size() || !name.starts_with(prefix) ||
          name[prefix.size()] != separator)
        continue;
      name.remove_prefix(prefix.size() + 1);
      stripped = true;
    }
  }
  return name;
}

// `name` with the tail `from` (whole dotted parts) replaced by `to`; empty when it ends otherwise.
std::string with_tail(std::string_view name, std::string_view from, std::string_view to) {
  if (name != from && (!name.ends_with(from) || name[name.size() - from.size() - 1] != '.'))
    return {};
  return std::string(name.substr(0, name.size() - from.size())) + std::string(to);
}

std::string underscored(std::string name) {
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
}

}  // namespace

LoraKey parse_lora_key(const std::string& key) {
  constexpr std::string_view kAlpha = ".alpha", kWeight = ".weight";
  if (key.ends_with(kAlpha))
    return {LoraKey::Part::alpha, key.substr(0, key.size() - kAlpha.size())};
  for (const auto& [mark, part] : {std::pair{".lora_A", LoraKey::Part::down},
                                   {".lora_B", LoraKey::Part::up},
                                   {".lora_down", LoraKey::Part::down},
                                   {".lora_up", LoraKey::Part::up}}) {
    const size_t at = key.rfind(mark);
    if (at == std::string::npos) continue;
    // ".weight", or ".<adapter>.weight" with one plain adapter name.
    const std::string rest = key.substr(at + std::strlen(mark));
    if (!rest.starts_with('.') || !rest.ends_with(kWeight)) continue;
    const std::string adapter = rest.substr(0, rest.size() - kWeight.size());
    if (adapter.size() == 1 || std::count(adapter.begin(), adapter.end(), '.') > 1) continue;
    return {part, key.substr(0, at)};
  }
  return {};
}

std::string_view other_method(std::string_view key) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 11> kMarks{{
      {".hada_w", "LoHa"},
      {".lokr_w", "LoKr"},
      {".dora_scale", "DoRA"},
      {".lora_magnitude_vector", "DoRA"},
      {".oft_", "OFT"},
      {".lora_mid", "LoCon with a Tucker core"},
      {".vera_lambda", "VeRA"},
      {".ia3_l", "IA3"},
      {".lora_embedding_", "LoRA of an embedding"},
      {"lora_te", "LoRA of a text encoder"},
      {"text_encoder", "LoRA of a text encoder"},
  }};
  if (key.ends_with(".diff") || key.ends_with(".diff_b")) return "a full difference of weights";
  for (const auto& [mark, method] : kMarks) {
    if (key.find(mark) != std::string_view::npos) return method;
  }
  return "";
}

std::string lora_module(std::string_view dotted) {
  dotted = without_prefixes(dotted, '.');
  for (const auto& [framework, own] : kFrameworkNames) {
    if (std::string found = with_tail(dotted, framework, own); !found.empty()) return found;
  }
  return std::string(dotted);
}

LoraModules::LoraModules(const std::vector<std::string>& layers) {
  for (const std::string& layer : layers) {
    underscored_.emplace(underscored(layer), layer);
    for (const auto& [framework, own] : kFrameworkNames) {
      if (const std::string name = with_tail(layer, own, framework); !name.empty())
        underscored_.emplace(underscored(name), layer);
    }
  }
}

std::string LoraModules::layer_of(const std::string& module) const {
  if (!module.starts_with(kUnderscored)) return lora_module(module);
  const std::string_view rest =
      without_prefixes(std::string_view(module).substr(kUnderscored.size()), '_');
  const auto found = underscored_.find(std::string(rest));
  return found == underscored_.end() ? module : found->second;
}

}  // namespace orrery
