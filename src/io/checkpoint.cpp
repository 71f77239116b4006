#include "io/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/parallel.h"
#include "io/fault_list.h"

namespace orrery {

void check_tensors(const Safetensors& files, const std::vector<TensorExpectation>& expected,
                   const std::function<bool(std::string_view)>& ignored) {
  FaultList faults;
  std::vector<std::string_view> names;
  for (const TensorExpectation& want : expected) {
    names.push_back(want.name);
    const StoredTensor* found = files.find(want.name);
    if (!found) {
      if (!want.optional) faults.add("missing", want.name, " ", want.shape, " is missing");
      continue;
    }
    if (!(found->shape == want.shape)) {
      faults.add("shape", want.name, " is ", found->shape, " in ", found->file, ", but ",
                 want.shape, " is expected");
    }
    const bool fits = want.stored ? found->dtype == want.stored
                                  : found->dtype == DType::f32 || found->dtype == DType::bf16 ||
                                        found->dtype == DType::f16;
    if (!fits && want.stored) {
      faults.add("dtype", want.name, " is stored as ", found->stored_type, " in ", found->file,
                 ", but ", name_of(*want.stored), " is expected");
    } else if (!fits) {
      faults.add("dtype", want.name, " is stored as ", found->stored_type, " in ", found->file,
                 ", but only F32, BF16 and F16 weights can be used");
    }
  }
  std::sort(names.begin(), names.end());
  for (const StoredTensor& found : files.tensors()) {
    if (std::binary_search(names.begin(), names.end(), found.name)) continue;
    if (ignored && ignored(found.name)) continue;
    faults.add("surplus", found.name, " ", found.shape, " in ", found.file,
               " has no place in this model");
  }
  faults.raise(ErrorKind::corrupt, files.origin().string());
}

namespace {

// Index of the first element whose magnitude bits reach those of infinity; `count` when there is
// none.
template <typename Bits>
int64_t find_non_finite(const std::byte* data, int64_t count, Bits infinity) {
  constexpr int64_t kBlock = 8192;
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max();  // all but the sign
  const auto magnitude = [&](int64_t i) {
    Bits bits;
    std::memcpy(&bits, data + i * static_cast<int64_t>(sizeof bits), sizeof bits);
    return static_cast<Bits>(bits & kMagnitude);
  };
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    Bits largest = 0;  // a maximum without early exit vectorises
    for (int64_t i = begin; i < end; ++i) largest = std::max(largest, magnitude(i));
    if (largest < infinity) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (magnitude(i) >= infinity) return i;
    }
  }
  return count;
}

Shape position_of(int64_t index, const Shape& shape) {
  Shape position = shape;
  for (int d = shape.rank() - 1; d >= 0; --d) {
    position[d] = index % shape[d];
    index /= shape[d];
  }
  return position;
}

}  // namespace

std::optional<std::string> first_non_finite(const View& view) {
  require(view.device == DeviceKind::cpu && view.contiguous(),
          "first_non_finite: the tensor is not contiguous in host memory");
  const auto* data = static_cast<const std::byte*>(view.data);
  const int64_t count = view.numel();
  int64_t at = count;
  bool is_nan = false;
  const auto search = [&](auto infinity) {
    using Bits = decltype(infinity);
    at = find_non_finite<Bits>(data, count, infinity);
    if (at == count) return;
    Bits bits;
    std::memcpy(&bits, data + at * static_cast<int64_t>(sizeof bits), sizeof bits);
    is_nan = (bits & std::numeric_limits<Bits>::max()) != infinity;
  };
  switch (view.dtype) {
    case DType::f32: search(int32_t{0x7f800000}); break;
    case DType::bf16: search(int16_t{0x7f80}); break;
    case DType::f16: search(int16_t{0x7c00}); break;
    case DType::f8e4m3: search(int8_t{0x7f}); break;
    case DType::i32:
    case DType::i64:
    case DType::u8:
    case DType::i8: return std::nullopt;
  }
  if (at == count) return std::nullopt;
  return concat(is_nan ? "NaN" : "Inf", " at ", position_of(at, view.shape));
}

void check_finite(const Safetensors& files, const std::vector<TensorExpectation>& expected) {
  std::vector<std::optional<std::string>> found(expected.size());
  parallel_for(static_cast<int64_t>(expected.size()), [&](int64_t i) {
    const auto at = static_cast<size_t>(i);
    const StoredTensor* tensor = files.find(expected[at].name);
    if (tensor && tensor->dtype) found[at] = first_non_finite(files.view(expected[at].name));
  });
  FaultList faults;
  for (size_t i = 0; i < expected.size(); ++i) {
    const std::string& name = expected[i].name;
    if (found[i])
      faults.add("not finite", name, " in ", files.find(name)->file, " holds ", *found[i]);
  }
  faults.raise(ErrorKind::numeric, files.origin().string());
}

namespace {

constexpr const char* kTaskIndex = "model_index.json";
constexpr const char* kModularIndex = "modular_model_index.json";
constexpr const char* kMissingFile = "missing file";
constexpr const char* kField = "field";
constexpr std::string_view kDistilledClass = "Cosmos3DistilledModularPipeline";

struct ComponentKind {
  const char* name;
  const char* config;  // null: none is read
  bool has_weights;
};

// Gathers what an index says of the pipeline and its components.
class FolderReader {
 public:
  explicit FolderReader(const std::filesystem::path& folder) { model_.folder = folder; }

  ModelFolder read() {
    const Json task = load_index(kTaskIndex, {"Cosmos3OmniPipeline"});
    const Json modular = load_index(kModularIndex, {"Cosmos3OmniModularPipeline", kDistilledClass});
    if (task.is_null() && modular.is_null()) refuse_without_index();
    const Json& index = task.is_null() ? modular : task;
    index_name_ = task.is_null() ? kModularIndex : kTaskIndex;
    model_.class_name = class_of(index);

    required(index, {"transformer", "config.json", true}, model_.transformer);
    required(index, {"vae", "config.json", true}, model_.vae);
    required(index, {"text_tokenizer", nullptr, false}, model_.text_tokenizer);
    required(index, {"scheduler", "scheduler_config.json", false}, model_.scheduler);
    model_.sound_tokenizer = component(index, {"sound_tokenizer", "config.json", true});
    if (!model_.text_tokenizer.folder.empty()) {
      needs_file(model_.text_tokenizer.folder / "tokenizer.json");
    }
    read_flag(index, "enable_safety_checker", model_.enable_safety_checker);
    read_flag(index, "default_use_system_prompt", model_.default_use_system_prompt);
    read_flag(index, "use_native_flow_schedule", model_.use_native_flow_schedule);
    if (const Json* shift = index.find("native_flow_shift"); shift && !shift->is_null()) {
      if (shift->is_number() && shift->as_double() > 0)
        model_.native_flow_shift = shift->as_double();
      else
        faults_.add(kField, index_name_, ": native_flow_shift is not a number above 0");
    }
    if (!modular.is_null()) read_distilled(modular);

    refuse_quantised();
    const bool only_missing = faults_.count() == faults_.count(kMissingFile);
    faults_.raise(only_missing ? ErrorKind::not_found : ErrorKind::corrupt, model_.folder.string());
    return std::move(model_);
  }

 private:
  bool exists(const std::filesystem::path& path) const {
    std::error_code none;
    return std::filesystem::exists(path, none);
  }
  std::string relative(const std::filesystem::path& path) const {
    return path.lexically_relative(model_.folder).string();
  }
  void needs_file(const std::filesystem::path& path) {
    if (!exists(path)) faults_.add(kMissingFile, relative(path), " is missing");
  }

  // Null when there is no such file. A pipeline of another kind is refused at once: nothing else
  // that could be said of its folder would help.
  Json load_index(const char* name, std::initializer_list<std::string_view> classes) const {
    const auto file = model_.folder / name;
    if (!exists(file)) return {};
    Json index = Json::load(file);
    const std::string class_name = index.at("_class_name").as_string();
    if (std::find(classes.begin(), classes.end(), class_name) == classes.end()) {
      fail(ErrorKind::unsupported, file.string(), ": the pipeline class ", class_name,
           " is not supported, only ", *classes.begin(),
           classes.size() > 1 ? concat(" and ", *(classes.end() - 1)) : "");
    }
    return index;
  }
  static std::string class_of(const Json& index) { return index.at("_class_name").as_string(); }

  [[noreturn]] void refuse_without_index() const {
    const auto above = std::filesystem::absolute(model_.folder).lexically_normal() / "..";
    const bool is_component = exists(above / kTaskIndex) || exists(above / kModularIndex);
    fail(ErrorKind::not_found, model_.folder.string(), ": holds neither ", kTaskIndex, " nor ",
         kModularIndex,
         is_component ? "; this is a component, name the model folder above it" : "");
  }

  // What an index says of one component.
  struct Entry {
    bool present = false;
    std::string class_name;
    std::string subfolder;
    std::string source;  // the repository a modular index takes it from
  };

  static std::string text_or_empty(const Json* value) {
    return value && value->is_string() ? value->as_string() : "";
  }

  // null, [null, null], [library, class] or, in a modular index, [library, class, {where}]. There a
  // null class only means that it had not been loaded when the index was written.
  Entry entry_of(const Json& index, const char* name) {
    Entry entry{false, "", name, ""};
    const Json* value = index.find(name);
    if (!value || value->is_null()) return entry;
    if (!value->is_array() || value->items().size() < 2) {
      faults_.add(kField, index_name_, ": ", name,
                  " is neither null nor a list of library and class");
      return entry;
    }
    entry.class_name = text_or_empty(&value->at(1));
    entry.present = !entry.class_name.empty();
    if (value->items().size() > 2 && value->at(2).is_object()) {
      const Json& where = value->at(2);
      entry.source = text_or_empty(where.find("pretrained_model_name_or_path"));
      if (const std::string folder = text_or_empty(where.find("subfolder")); !folder.empty()) {
        entry.subfolder = folder;
      }
      if (!is_plain_file_name(entry.subfolder)) {
        faults_.add(kField, index_name_, ": ", name, ": the subfolder \"", entry.subfolder,
                    "\" is not a plain name inside the model folder");
        entry.present = false;
        return entry;
      }
      entry.present = entry.present || exists(model_.folder / entry.subfolder);
    }
    return entry;
  }

  std::optional<Component> component(const Json& index, const ComponentKind& kind) {
    const Entry entry = entry_of(index, kind.name);
    if (!entry.present) return std::nullopt;
    Component found{model_.folder / entry.subfolder, entry.class_name, {}};
    if (!exists(found.folder)) {
      faults_.add(kMissingFile, entry.subfolder, "/ is missing, which ", index_name_, " names",
                  entry.source.empty() ? "" : concat(" (it takes it from ", entry.source, ")"));
      return found;
    }
    if (kind.config) read_config(found, found.folder / kind.config);
    if (kind.has_weights && !exists(found.folder / kWeightsName) &&
        !exists(found.folder / kWeightsIndexName)) {
      faults_.add(kMissingFile, entry.subfolder, "/ has no weights: neither ", kWeightsName,
                  " nor ", kWeightsIndexName);
    }
    return found;
  }

  void required(const Json& index, const ComponentKind& kind, Component& slot) {
    const int64_t before = faults_.count();
    if (auto found = component(index, kind)) {
      slot = std::move(*found);
    } else if (faults_.count() == before) {
      faults_.add(kField, index_name_, ": ", kind.name, " is missing or null");
    }
  }

  void read_config(Component& component, const std::filesystem::path& file) {
    if (!exists(file)) {
      faults_.add(kMissingFile, relative(file), " is missing");
      return;
    }
    try {
      component.config = Json::load(file);
      if (const Json* name = component.config.find("_class_name"))
        component.class_name = name->as_string();
    } catch (const Error& error) {
      faults_.add(kField, error.what());
    }
  }

  void read_flag(const Json& index, const char* name, bool& flag) {
    const Json* value = index.find(name);
    if (!value || value->is_null()) return;
    if (value->is_boolean())
      flag = value->as_bool();
    else
      faults_.add(kField, index_name_, ": ", name, " is neither true nor false");
  }

  void read_distilled(const Json& modular) {
    const Json* flag = modular.find("is_distilled");
    if (flag && !flag->is_boolean()) {
      faults_.add(kField, kModularIndex, ": is_distilled is neither true nor false");
      return;
    }
    if (!(flag ? flag->as_bool() : class_of(modular) == kDistilledClass)) return;
    const Json* sigmas = modular.find("distilled_sigmas");
    bool good = sigmas && sigmas->is_array() && !sigmas->items().empty();
    double last = 1;
    for (size_t i = 0; good && i < sigmas->items().size(); ++i) {
      const Json& sigma = sigmas->at(i);
      good = sigma.is_number() && sigma.as_double() > 0 &&
             (i == 0 ? sigma.as_double() <= last : sigma.as_double() < last);
      if (!good) break;
      last = sigma.as_double();
      model_.distilled_sigmas.push_back(last);
    }
    if (!good) {
      faults_.add(
          kField, kModularIndex,
          ": distilled_sigmas of a distilled model must be numbers falling from at most 1, found ",
          sigmas ? sigmas->dump() : "none");
    }
  }

  // The algorithm a quantisation entry names; empty when it says that there is none.
  static std::string algorithm_of(const Json* entry) {
    if (!entry || entry->is_null()) return "";
    if (!entry->is_object()) return entry->dump();
    for (const char* key : {"quant_algo", "quant_method"}) {
      if (const Json* value = entry->find(key)) return value->is_null() ? "" : text_or_dump(*value);
    }
    return "an unnamed method";
  }
  static std::string text_or_dump(const Json& value) {
    return value.is_string() ? value.as_string() : value.dump();
  }

  void refuse_quantised() const {
    const auto refuse = [&](const std::string& algorithm, const std::filesystem::path& said_by) {
      if (algorithm.empty() || algorithm == "FP8") return;  // the transformer's config says more
      fail(ErrorKind::unsupported, model_.folder.string(), ": ", relative(said_by),
           " says that the weights are quantised with ", algorithm,
           ", which cannot be read; use the checkpoint with bf16 weights");
    };
    for (const auto& folder : {model_.folder, model_.transformer.folder}) {
      const auto file = folder / "hf_quant_config.json";
      if (folder.empty() || !exists(file)) continue;
      const Json config = Json::load(file);
      refuse(algorithm_of(config.has("quantization") ? config.find("quantization") : &config),
             file);
    }
  }

  ModelFolder model_;
  const char* index_name_ = kTaskIndex;
  FaultList faults_;
};

}  // namespace

ModelFolder open_model_folder(const std::filesystem::path& folder) {
  std::error_code none;
  require(std::filesystem::is_directory(folder, none), ErrorKind::not_found, folder.string(),
          ": the model folder does not exist");
  return FolderReader(folder).read();
}

}  // namespace orrery
