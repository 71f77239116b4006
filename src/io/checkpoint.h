// A checkpoint against what a model expects of it: the folder's layout, the tensors of a component,
// and their values. Each check reports everything it finds in one Error.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "io/safetensors.h"
#include "io/value_range.h"

namespace orrery {

struct TensorExpectation {
  std::string name;  // as stored
  Shape shape;
  bool optional = false;
  std::optional<DType> stored = {};  // empty: f32, bf16 or f16
};

// Throws one Error{corrupt} that lists all missing, surplus and wrongly shaped tensors and those
// whose stored type is not the expected one. Stored names for which `ignored` holds are never
// surplus.
void check_tensors(const Safetensors& files, const std::vector<TensorExpectation>& expected,
                   const std::function<bool(std::string_view)>& ignored = {});

// Throws one Error{numeric} that names every expected tensor with NaN or Inf in it. Reads them all,
// at memory speed, on several threads; tensors that are absent or have no DType are passed over.
// Returns a clause for every tensor with a value that is finite but unlikely (value_range.h): "NAME
// in FILE holds ...".
std::vector<std::string> check_finite(const Safetensors& files,
                                      const std::vector<TensorExpectation>& expected);

struct Component {
  std::filesystem::path folder;
  std::string class_name;  // of its own config, else of the index; "" when neither says
  Json config;             // config.json or scheduler_config.json; null for the tokenizer
};

// A model folder in the diffusers layout. Components are taken from model_index.json, or from
// modular_model_index.json when that is the only one; the distilled settings are the latter's.
struct ModelFolder {
  std::filesystem::path folder;
  std::string class_name;
  Component transformer;
  Component vae;
  Component text_tokenizer;
  Component scheduler;
  std::optional<Component> sound_tokenizer;
  bool enable_safety_checker = true;
  bool default_use_system_prompt = true;
  bool use_native_flow_schedule = false;
  std::optional<double> native_flow_shift;
  std::vector<double> distilled_sigmas;  // of a few-step model, falling from at most 1; else empty

  bool is_distilled() const { return !distilled_sigmas.empty(); }
};

// Reads the index and the components' configs and looks for their files; reads no weights. Throws
// Error{not_found} or Error{corrupt} with every missing file and bad field, and Error{unsupported}
// with the name of a pipeline class, key or quantisation that cannot be run.
ModelFolder open_model_folder(const std::filesystem::path& folder);

}  // namespace orrery
