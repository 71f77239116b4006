#include "model/lora.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>

#include "base/config_reader.h"
#include "base/error.h"
#include "base/json.h"
#include "base/parallel.h"
#include "model/lora_names.h"

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
    for (size_t i = 0; i < prefixes.size(); ++i) matrices[prefixes[i]] = Shape{out[i], in};
  }
};

double positive(double value, const std::string& where) {
  require(std::isfinite(value) && value > 0, ErrorKind::corrupt, where, ": alpha is ", value,
          "; it must be a positive number");
  return value;
}

double number_of(const Json& value) {
  if (!value.is_string()) return value.as_double();
  return Json::parse(value.as_string(), value.where()).as_double();
}

// What a file says of all its modules.
struct AdapterConfig {
  std::optional<double> alpha;
  std::vector<std::pair<std::string, double>> alpha_pattern;  // end of a module's name, alpha
  bool rank_stabilised = false;

  double alpha_of(const std::string& module, int64_t rank) const {
    for (const auto& [tail, value] : alpha_pattern) {
      const bool whole =
          module.size() == tail.size() ||
          (module.size() > tail.size() && module[module.size() - tail.size() - 1] == '.');
      if (module.ends_with(tail) && whole) return value;
    }
    return alpha.value_or(static_cast<double>(rank));
  }
};

// PEFT's LoraConfig. Keys that only say how the adapter was trained, or repeat what its tensors
// show, are harmless.
AdapterConfig peft_config(const Json& json) {
  ConfigReader reader(json);
  AdapterConfig config;
  if (const Json* type = reader.find("peft_type")) {
    require(type->as_string() == "LORA", ErrorKind::unsupported, type->where(), ": peft_type is \"",
            type->as_string(), "\"; only LoRA adapters can be merged");
  }
  if (const Json* alpha = reader.find("lora_alpha"))
    config.alpha = positive(number_of(*alpha), alpha->where());
  if (const Json* patterns = reader.find("alpha_pattern")) {
    for (const auto& [module, alpha] : patterns->members()) {
      require(module.find_first_of("*+?^$|()[]{}\\") == std::string::npos, ErrorKind::unsupported,
              patterns->where(), ": the pattern ", module,
              " is an expression; only names of modules are supported");
      config.alpha_pattern.emplace_back(module, positive(alpha.as_double(), alpha.where()));
    }
  }
  reader.read("use_rslora", config.rank_stabilised);
  reader.harmless({"r",
                   "rank_pattern",
                   "target_modules",
                   "exclude_modules",
                   "layers_to_transform",
                   "layers_pattern",
                   "base_model_name_or_path",
                   "revision",
                   "auto_mapping",
                   "task_type",
                   "inference_mode",
                   "init_lora_weights",
                   "lora_dropout",
                   "loftq_config",
                   "eva_config",
                   "corda_config",
                   "lora_ga_config",
                   "velora_config",
                   "megatron_config",
                   "megatron_core",
                   "qalora_group_size",
                   "peft_version",
                   "runtime_config",
                   "ensure_weight_tying"});
  reader.refuse_rest("the merge of plain LoRA adapters");
  return config;
}

// diffusers puts "transformer." before each key of the part that is the transformer's.
Json without_prefix(const Json& json, std::string_view prefix) {
  Json out = Json::object();
  for (const auto& [key, value] : json.members()) {
    if (key.starts_with(prefix)) out.set(key.substr(prefix.size()), value);
  }
  return out.members().empty() ? json : out;
}

AdapterConfig config_of(const Safetensors& file, const fs::path& path) {
  for (const char* key : {"lora_alpha", "alpha"}) {
    const auto it = file.metadata().find(key);
    if (it == file.metadata().end()) continue;
    const std::string where = concat(path.string(), ": metadata ", key);
    AdapterConfig config;
    config.alpha = positive(Json::parse(it->second, where).as_double(), where);
    return config;
  }
  if (const auto it = file.metadata().find("lora_adapter_metadata"); it != file.metadata().end()) {
    const Json json = Json::parse(it->second, path.string() + ": metadata lora_adapter_metadata");
    return peft_config(without_prefix(json, "transformer."));
  }
  const fs::path beside = path.parent_path() / "adapter_config.json";
  return fs::is_regular_file(beside) ? peft_config(Json::load(beside)) : AdapterConfig{};
}

// The adapter's file where a folder is named.
fs::path file_of(const fs::path& given) {
  std::error_code none;
  if (!fs::is_directory(given, none)) return given;
  constexpr std::array<const char*, 2> kNames{"adapter_model", "pytorch_lora_weights"};
  std::vector<fs::path> found;
  for (const std::string name : kNames) {
    if (fs::exists(given / (name + ".safetensors"), none))
      found.push_back(given / (name + ".safetensors"));
    require(!found.empty() || !fs::exists(given / (name + ".bin"), none), ErrorKind::unsupported,
            "lora ", given.string(), ": ", name,
            ".bin holds Python objects, which are not read; save the adapter as safetensors");
  }
  require(!found.empty(), ErrorKind::not_found, "lora ", given.string(),
          ": the folder has neither ", kNames[0], ".safetensors nor ", kNames[1], ".safetensors");
  require(found.size() == 1, "lora ", given.string(), ": the folder has ", kNames[0],
          ".safetensors and ", kNames[1], ".safetensors; name one of them");
  return found.front();
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

// One matrix of a file: the keys of its parts.
struct LoraAdapters::Module {
  std::string layer, spelled;  // name in the checkpoint, in the file
  std::string down, up, alpha;
  const std::string& any_key() const { return !down.empty() ? down : !up.empty() ? up : alpha; }
};

struct LoraAdapters::AdapterFile {
  const Safetensors& file;
  const fs::path& path;
  double scale;
  AdapterConfig config;
};

LoraAdapters::LoraAdapters(const std::vector<Source>& sources, const VisitFunction& visit) {
  if (sources.empty()) return;
  MatrixLister lister;
  visit(lister);
  for (const Source& source : sources) add(source, lister.matrices);
}

void LoraAdapters::add(const Source& source, const Matrices& matrices) {
  require(std::isfinite(source.scale), "lora ", source.file.string(), ": the scale is ",
          source.scale);
  const fs::path path = file_of(source.file);
  const Safetensors file = Safetensors::open_file(path);
  std::vector<std::string> layers;
  for (const auto& [name, shape] : matrices) layers.push_back(name);
  const LoraModules names(layers);
  std::map<std::string, Module> modules;
  FaultList faults;
  for (const StoredTensor& tensor : file.tensors()) {
    const LoraKey key = parse_lora_key(tensor.name);
    const std::string_view method = other_method(tensor.name);
    if (!method.empty()) {
      faults.add("other method", tensor.name, " belongs to ", method,
                 "; only LoRA of this model's linear layers can be merged");
      continue;
    }
    if (key.part == LoraKey::Part::other) {
      faults.add("surplus", tensor.name,
                 " is no part of a LoRA adapter (lora_A, lora_B, lora_down, lora_up, alpha)");
      continue;
    }
    const std::string layer = names.layer_of(key.module);
    Module& module = modules[layer];
    module.layer = layer;
    module.spelled = key.module;
    std::string& slot = key.part == LoraKey::Part::down ? module.down
                        : key.part == LoraKey::Part::up ? module.up
                                                        : module.alpha;
    if (!slot.empty()) faults.add("duplicate", slot, " and ", tensor.name, " name the same matrix");
    slot = tensor.name;
  }
  if (modules.empty() && faults.count() == 0)
    faults.add("empty", "the file has no lora_A and lora_B tensors");

  const AdapterFile from{file, path, source.scale, config_of(file, path)};
  for (const auto& [layer, module] : modules) {
    const auto matrix = matrices.find(layer);
    if (matrix == matrices.end())
      faults.add("surplus", module.any_key(), " names ", layer,
                 ", which is no linear layer of this model");
    else if (module.down.empty() || module.up.empty())
      faults.add("missing", layer, " has no ",
                 module.down.empty() ? "lora_A (lora_down)" : "lora_B (lora_up)");
    else
      add_module(from, module, matrix->second, faults);
  }
  faults.raise(ErrorKind::corrupt, "lora " + path.string());
}

void LoraAdapters::add_module(const AdapterFile& from, const Module& module, const Shape& matrix,
                              FaultList& faults) {
  const Shape a = from.file.find(module.down)->shape, b = from.file.find(module.up)->shape;
  const bool fits = a.rank() == 2 && b.rank() == 2 && a[1] == matrix[1] && b[0] == matrix[0] &&
                    a[0] == b[1] && a[0] > 0;
  if (!fits)
    return faults.add("shape", module.layer, " is ", matrix, "; ", module.down, " ", a, " and ",
                      module.up, " ", b, " do not make such a matrix");
  double alpha = from.config.alpha_of(module.spelled, a[0]);
  if (!module.alpha.empty()) {
    const Tensor scalar = from.file.read(module.alpha, DType::f32);
    if (scalar.view.numel() != 1)
      return faults.add("shape", module.alpha, " ", scalar.view.shape, " is no scalar");
    alpha = positive(static_cast<double>(scalar.view.as<float>()[0]),
                     from.path.string() + ": " + module.alpha);
  }
  Change change;
  for (const auto& [key, slot] : {std::pair{module.down, &change.a}, {module.up, &change.b}}) {
    factors_.push_back(from.file.read(key, DType::f32));
    *slot = factors_.back().view;
    const float* values = slot->as<float>();
    const bool finite =
        std::all_of(values, values + slot->numel(), [](float v) { return std::isfinite(v); });
    if (!finite) faults.add("value", key, " holds a value that is not finite");
  }
  const auto rank = static_cast<double>(a[0]);
  change.scale = from.scale * alpha / (from.config.rank_stabilised ? std::sqrt(rank) : rank);
  changes_[module.layer + ".weight"].push_back(change);
}

std::optional<DType> LoraAdapters::merged_type(const std::string& name, DType stored,
                                               DType run) const {
  if (changes_.find(name) == changes_.end()) return std::nullopt;
  return stored == DType::bf16 && run == DType::bf16 ? DType::bf16 : DType::f32;
}

Tensor LoraAdapters::merged(const std::string& name, const View& stored, DType run) const {
  const auto found = changes_.find(name);
  if (found == changes_.end()) return {};
  require(stored.dtype == DType::f32 || stored.dtype == DType::bf16 || stored.dtype == DType::f16,
          ErrorKind::unsupported, "lora: ", name, " is stored as ", name_of(stored.dtype),
          "; adapters can be merged into f32, bf16 and f16 weights");
  Tensor out = allocate_host_tensor(stored.shape, *merged_type(name, stored.dtype, run));
  const bool narrow = out.view.dtype == DType::bf16;
  const int64_t rows = stored.dim(0), columns = stored.dim(1);
  constexpr int64_t kRows = 64;  // of one piece of work
  parallel_for((rows + kRows - 1) / kRows, [&](int64_t piece) {
    std::vector<double> row(static_cast<size_t>(columns));
    for (int64_t r = piece * kRows; r < std::min(rows, (piece + 1) * kRows); ++r) {
      for (int64_t c = 0; c < columns; ++c)
        row[static_cast<size_t>(c)] = double(element(stored, r * columns + c));
      for (const Change& change : found->second) {
        const int64_t rank = change.a.dim(0);
        for (int64_t k = 0; k < rank; ++k) {
          const double factor = change.scale * double(change.b.as<float>()[r * rank + k]);
          const float* a = change.a.as<float>() + k * columns;
          for (int64_t c = 0; c < columns; ++c)
            row[static_cast<size_t>(c)] += factor * double(a[c]);
        }
      }
      for (int64_t c = 0; c < columns; ++c) {
        const auto value = static_cast<float>(row[static_cast<size_t>(c)]);
        require(std::isfinite(value), ErrorKind::numeric, "lora: ", name,
                " is not finite after the merge at [", r, ", ", c, "]; lower the scale");
        if (narrow)
          out.view.as<bf16>()[r * columns + c] = to_bf16(value);
        else
          out.view.as<float>()[r * columns + c] = value;
      }
    }
  });
  return out;
}

}  // namespace orrery
