#include "io/checkpoint.h"

#include <algorithm>

#include "base/config_reader.h"
#include "base/error.h"
#include "base/parallel.h"
#include "io/fault_list.h"
#include "io/folder_hints.h"

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

std::vector<std::string> check_finite(const Safetensors& files,
                                      const std::vector<TensorExpectation>& expected) {
  std::vector<ValueRange> found(expected.size());
  parallel_for(static_cast<int64_t>(expected.size()), [&](int64_t i) {
    const auto at = static_cast<size_t>(i);
    const StoredTensor* tensor = files.find(expected[at].name);
    if (tensor && tensor->dtype) found[at] = value_range(files.view(expected[at].name));
  });
  FaultList faults;
  std::vector<std::string> unlikely;
  for (size_t i = 0; i < expected.size(); ++i) {
    const ValueRange& range = found[i];
    if (!range.fault && range.is_likely()) continue;
    const std::string where = concat(expected[i].name, " in ", files.find(expected[i].name)->file);
    if (range.fault)
      faults.add("not finite", where, " holds ", *range.fault);
    else
      unlikely.push_back(concat(where, " holds ", range.unlikely()));
  }
  faults.raise(ErrorKind::numeric, files.origin().string());
  return unlikely;
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
    for (const Json* given : {&task, &modular}) {
      if (!given->is_null()) refuse_unknown(*given);
    }
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
  // Components beyond the known ones would be run by the public pipeline; the safety checker is the
  // guardrail's business, and the vision encoder the reasoner's.
  static void refuse_unknown(const Json& index) {
    ConfigReader reader(index);
    reader.harmless({"transformer", "vae", "text_tokenizer", "scheduler", "sound_tokenizer",
                     "safety_checker", "vision_encoder", "enable_safety_checker",
                     "default_use_system_prompt", "use_native_flow_schedule", "native_flow_shift",
                     "is_distilled", "distilled_sigmas"});
    reader.refuse_rest("this engine");
  }
  static std::string class_of(const Json& index) { return index.at("_class_name").as_string(); }

  [[noreturn]] void refuse_without_index() const {
    const auto above = std::filesystem::absolute(model_.folder).lexically_normal() / "..";
    const bool is_component = exists(above / kTaskIndex) || exists(above / kModularIndex);
    std::string hint = hint_without_index(model_.folder);
    if (hint.empty() && is_component)
      hint = "; this is a component, name the model folder above it";
    fail(ErrorKind::not_found, model_.folder.string(), ": holds neither ", kTaskIndex, " nor ",
         kModularIndex, hint);
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
      ConfigReader where(value->at(2));
      where.harmless({"type_hint", "revision", "default_creation_method"});
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
      where.refuse_rest("this engine, which takes the component's own files,");
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
                  " nor ", kWeightsIndexName, hint_without_weights(found.folder));
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
      if (algorithm.empty()) return;
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
    if (model_.transformer.config.is_object()) {
      refuse(algorithm_of(model_.transformer.config.find("quantization_config")),
             model_.transformer.folder / "config.json");
    }
  }

  ModelFolder model_;
  const char* index_name_ = kTaskIndex;
  FaultList faults_;
};

}  // namespace

ModelFolder open_model_folder(const std::filesystem::path& folder) {
  std::error_code none;
  require(std::filesystem::is_directory(folder, none), ErrorKind::not_found, folder.string(), ": ",
          std::filesystem::exists(folder, none) ? "is a file, a model folder is needed"
                                                : "the model folder does not exist",
          hint_without_folder(folder));
  return FolderReader(folder).read();
}

}  // namespace orrery
