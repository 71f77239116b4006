#include "model/lora.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>

#include "base/error.h"
#include "base/json.h"
#include "io/fault_list.h"

namespace orrery {

namespace {

namespace fs = std::filesystem;

// The matrices an adapter may change: weights of linear layers, nothing else.
class MatrixLister final : public WeightVisitor {
 public:
  std::map<std::string, Shape> matrices;
  void tensor(View&, const std::string&, Shape, Split) override {}
  void linear(Linear&, const std::vector<std::string>& prefixes, const std::vector<int64_t>& out,
              int64_t in, Split, bool) override {
    for (size_t i = 0; i < prefixes.size(); ++i)
      matrices[prefixes[i] + ".weight"] = Shape{out[i], in};
  }
};

// Framework name, checkpoint name (docs/internals/transformer.md). Whole dotted parts.
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

// One key of an adapter file, taken apart.
struct Key {
  enum class Part { a, b, alpha, other } part = Part::other;
  std::string module;
};

Key parse_key(const std::string& name) {
  Key key;
  if (name.ends_with(".alpha"))
    return {Key::Part::alpha, lora_module(name.substr(0, name.size() - 6))};
  for (const auto& [mark, part] : {std::pair{".lora_A", Key::Part::a}, {".lora_B", Key::Part::b}}) {
    const size_t at = name.rfind(mark);
    if (at == std::string::npos) continue;
    // ".weight", or ".<adapter>.weight" with one plain adapter name.
    const std::string rest = name.substr(at + std::strlen(mark));
    if (!rest.starts_with('.') || !rest.ends_with(".weight")) continue;
    const std::string adapter = rest.substr(0, rest.size() - std::strlen(".weight"));
    if (adapter.size() == 1 || std::count(adapter.begin(), adapter.end(), '.') > 1) continue;
    key.part = part;
    key.module = lora_module(name.substr(0, at));
  }
  return key;
}

double positive(double value, const std::string& where) {
  require(std::isfinite(value) && value > 0, ErrorKind::corrupt, where, ": alpha is ", value,
          "; it must be a positive number");
  return value;
}

double number_of(const Json& value) {
  if (!value.is_string()) return value.as_double();
  return Json::parse(value.as_string(), value.where()).as_double();
}

// Whatever a configuration says that this merge would not do is refused rather than passed over.
std::optional<double> alpha_of(const Json& config, const std::string& prefix) {
  for (const char* flag : {"use_rslora", "use_dora"}) {
    const Json* value = config.find(prefix + flag);
    require(value == nullptr || !value->is_boolean() || !value->as_bool(), ErrorKind::unsupported,
            config.where(), ": ", flag, " is set; only plain LoRA adapters can be merged");
  }
  const Json* pattern = config.find(prefix + "alpha_pattern");
  require(pattern == nullptr || !pattern->is_object() || pattern->members().empty(),
          ErrorKind::unsupported, config.where(),
          ": alpha_pattern is set; only one alpha for all modules is supported");
  const Json* alpha = config.find(prefix + "lora_alpha");
  if (alpha == nullptr || alpha->is_null()) return std::nullopt;
  return positive(number_of(*alpha), alpha->where());
}

// Alpha of a whole file.
std::optional<double> file_alpha(const Safetensors& file, const fs::path& path) {
  for (const char* key : {"lora_alpha", "alpha"}) {
    const auto it = file.metadata().find(key);
    if (it == file.metadata().end()) continue;
    const std::string where = concat(path.string(), ": metadata ", key);
    return positive(Json::parse(it->second, where).as_double(), where);
  }
  if (const auto it = file.metadata().find("lora_adapter_metadata"); it != file.metadata().end()) {
    const Json config = Json::parse(it->second, path.string() + ": metadata lora_adapter_metadata");
    for (const char* prefix : {"transformer.", ""}) {
      if (const auto alpha = alpha_of(config, prefix)) return alpha;
    }
  }
  const fs::path beside = path.parent_path() / "adapter_config.json";
  if (fs::is_regular_file(beside)) return alpha_of(Json::load(beside), "");
  return std::nullopt;
}

float element(const View& view, int64_t i) {
  const auto* at = static_cast<const std::byte*>(view.data) + i * size_of(view.dtype);
  if (view.dtype == DType::f32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return view.dtype == DType::bf16 ? to_float(bf16{bits}) : to_float(f16{bits});
}

}  // namespace

std::string lora_module(std::string_view key) {
  for (bool stripped = true; stripped;) {
    stripped = false;
    for (std::string_view prefix : {"transformer.", "base_model.", "model."}) {
      if (!key.starts_with(prefix)) continue;
      key.remove_prefix(prefix.size());
      stripped = true;
    }
  }
  for (const auto& [framework, own] : kFrameworkNames) {
    if (key == framework) return std::string(own);
    const bool is_tail = key.size() > framework.size() && key.ends_with(framework) &&
                         key[key.size() - framework.size() - 1] == '.';
    if (is_tail)
      return std::string(key.substr(0, key.size() - framework.size())) + std::string(own);
  }
  return std::string(key);
}

LoraAdapters::LoraAdapters(const std::vector<Source>& sources, const VisitFunction& visit) {
  if (sources.empty()) return;
  MatrixLister lister;
  visit(lister);
  for (const Source& source : sources) add(source, lister.matrices);
}

void LoraAdapters::add(const Source& source, const std::map<std::string, Shape>& matrices) {
  require(std::isfinite(source.scale), "lora ", source.file.string(), ": the scale is ",
          source.scale);
  const Safetensors file = Safetensors::open_file(source.file);
  struct Module {
    std::string a, b, alpha;  // keys in the file
  };
  std::map<std::string, Module> modules;
  FaultList faults;
  for (const StoredTensor& tensor : file.tensors()) {
    const Key key = parse_key(tensor.name);
    if (key.part == Key::Part::other) {
      faults.add("surplus", tensor.name, " is no part of a LoRA adapter (lora_A, lora_B, alpha)");
      continue;
    }
    Module& module = modules[key.module];
    std::string& slot = key.part == Key::Part::a   ? module.a
                        : key.part == Key::Part::b ? module.b
                                                   : module.alpha;
    if (!slot.empty()) faults.add("duplicate", slot, " and ", tensor.name, " name the same matrix");
    slot = tensor.name;
  }
  if (modules.empty()) faults.add("empty", "the file has no lora_A and lora_B tensors");

  const std::optional<double> common = file_alpha(file, source.file);
  for (const auto& [name, module] : modules) {
    const std::string any_key = !module.a.empty()   ? module.a
                                : !module.b.empty() ? module.b
                                                    : module.alpha;
    const auto matrix = matrices.find(name + ".weight");
    if (matrix == matrices.end()) {
      faults.add("surplus", any_key, " names ", name, ", which is no linear layer of this model");
      continue;
    }
    if (module.a.empty() || module.b.empty()) {
      faults.add("missing", name, " has no ", module.a.empty() ? "lora_A" : "lora_B");
      continue;
    }
    const Shape a = file.find(module.a)->shape, b = file.find(module.b)->shape;
    const Shape& w = matrix->second;
    const bool fits =
        a.rank() == 2 && b.rank() == 2 && a[1] == w[1] && b[0] == w[0] && a[0] == b[1] && a[0] > 0;
    if (!fits) {
      faults.add("shape", name, " is ", w, "; lora_A ", a, " and lora_B ", b,
                 " do not make such a matrix");
      continue;
    }
    double alpha = common.value_or(static_cast<double>(a[0]));
    if (!module.alpha.empty()) {
      const Tensor scalar = file.read(module.alpha, DType::f32);
      if (scalar.view.numel() != 1) {
        faults.add("shape", module.alpha, " ", scalar.view.shape, " is no scalar");
        continue;
      }
      alpha = positive(static_cast<double>(scalar.view.as<float>()[0]),
                       source.file.string() + ": " + module.alpha);
    }
    Change change;
    for (const auto& [key, slot] : {std::pair{module.a, &change.a}, {module.b, &change.b}}) {
      factors_.push_back(file.read(key, DType::f32));
      *slot = factors_.back().view;
      const float* values = slot->as<float>();
      const bool finite =
          std::all_of(values, values + slot->numel(), [](float v) { return std::isfinite(v); });
      if (!finite) faults.add("value", key, " holds a value that is not finite");
    }
    change.scale = static_cast<float>(source.scale * alpha / static_cast<double>(a[0]));
    changes_[name + ".weight"].push_back(change);
  }
  faults.raise(ErrorKind::corrupt, "lora " + source.file.string());
}

Tensor LoraAdapters::merged(const std::string& name, const View& stored) const {
  const auto found = changes_.find(name);
  if (found == changes_.end()) return {};
  require(stored.dtype == DType::f32 || stored.dtype == DType::bf16 || stored.dtype == DType::f16,
          ErrorKind::unsupported, "lora: ", name, " is stored as ", name_of(stored.dtype),
          "; adapters can be merged into f32, bf16 and f16 weights");
  // f16 becomes f32: rounding back to it could overflow, and no backend computes in it anyway.
  Tensor out =
      allocate_host_tensor(stored.shape, stored.dtype == DType::bf16 ? DType::bf16 : DType::f32);
  const int64_t rows = stored.dim(0), columns = stored.dim(1);
  std::vector<float> row(static_cast<size_t>(columns));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c)
      row[static_cast<size_t>(c)] = element(stored, r * columns + c);
    for (const Change& change : found->second) {
      const int64_t rank = change.a.dim(0);
      for (int64_t k = 0; k < rank; ++k) {
        const float factor = change.scale * change.b.as<float>()[r * rank + k];
        const float* a = change.a.as<float>() + k * columns;
        for (int64_t c = 0; c < columns; ++c) row[static_cast<size_t>(c)] += factor * a[c];
      }
    }
    for (int64_t c = 0; c < columns; ++c) {
      const float value = row[static_cast<size_t>(c)];
      require(std::isfinite(value), ErrorKind::numeric, "lora: ", name,
              " is not finite after the merge at [", r, ", ", c, "]; lower the scale");
      if (out.view.dtype == DType::f32)
        out.view.as<float>()[r * columns + c] = value;
      else
        out.view.as<bf16>()[r * columns + c] = to_bf16(value);
    }
  }
  return out;
}

}  // namespace orrery
