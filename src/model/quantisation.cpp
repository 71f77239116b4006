#include "model/quantisation.h"

#include <fnmatch.h>

#include <algorithm>
#include <set>
#include <string_view>

#include "base/error.h"

namespace orrery {

Precision StepPolicy::at(int64_t step, int64_t num_steps) const {
  if (num_steps == 1) return standard;
  const bool is_first = step < first, is_last = step >= num_steps - last;
  if (is_first && is_last) return at_both;
  return is_first ? at_first : is_last ? at_last : standard;
}

namespace {

// An object all of whose keys are asked for: one that is missing, or left over, is an error.
class Strict {
 public:
  explicit Strict(const Json& object) : object_(object) {
    require(object.is_object(), ErrorKind::unsupported, object.where(), " is not an object");
  }
  const Json& at(const std::string& key) {
    const Json* value = object_.find(key);
    require(value != nullptr, ErrorKind::unsupported, object_.where(), " lacks ", key);
    known_.insert(key);
    return *value;
  }
  void only(const std::string& key, const Json& wanted) {
    const Json& value = at(key);
    require(value.dump() == wanted.dump(), ErrorKind::unsupported, object_.where(), ": ", key,
            " is ", value.dump(), "; this engine knows ", wanted.dump());
  }
  Precision precision(const std::string& key) {
    const Json& value = at(key);
    const std::string name = value.is_string() ? value.as_string() : value.dump();
    require(name == "native" || name == "a16", ErrorKind::unsupported, object_.where(), ": ", key,
            " is \"", name, "\"; it is native or a16");
    return name == "native" ? Precision::native : Precision::a16;
  }
  void finish() const {
    for (const auto& [key, value] : object_.members()) {
      require(known_.contains(key), ErrorKind::unsupported, object_.where(), ": the key ", key,
              " is not known");
    }
  }

 private:
  const Json& object_;
  std::set<std::string> known_;
};

void read_end(const Json& end, const std::string& name, int64_t& count, Precision& mode) {
  Strict keys(end);
  const Json& number = keys.at("count");
  require(number.is_number() && number.as_double() >= 0, ErrorKind::unsupported, end.where(), ": ",
          name, " counts ", number.dump(), " steps, expected 0 or more");
  count = number.as_int();
  mode = keys.precision("mode");
  keys.finish();
}

std::string text_of(const Json& config, const char* key) {
  const Json* value = config.find(key);
  if (value == nullptr || value->is_null()) return "";
  return value->is_string() ? value->as_string() : value->dump();
}

// 8-bit floats, as a group of either format says it.
void require_e4m3(const Json& group, const char* key) {
  const Json* of = group.find(key);
  if (of == nullptr || of->is_null()) return;
  for (const auto& [name, wanted] : {std::pair{"num_bits", "8"}, {"type", "float"}}) {
    const std::string given = text_of(*of, name);
    require(given == wanted, ErrorKind::unsupported, of->where(), ": ", name, " is ", given,
            "; this engine reads 8-bit floats");
  }
}

bool is_dynamic(const Json& group) {
  const Json* inputs = group.find("input_activations");
  const Json* dynamic = inputs && inputs->is_object() ? inputs->find("dynamic") : nullptr;
  return dynamic != nullptr && dynamic->is_boolean() && dynamic->as_bool();
}

}  // namespace

StepPolicy StepPolicy::from_json(const Json& json) {
  StepPolicy policy;
  Strict keys(json);
  keys.only("schema_version", Json(1));
  keys.only("type", Json("first_last_n"));
  keys.only("index_space", Json("denoising_loop_iteration"));
  const Json& scope = keys.at("scope");
  bool is_ours = false;
  for (const Json& part : scope.items())
    is_ours |= part.is_string() && part.as_string() == "transformer";
  policy.standard = keys.precision("default_mode");
  read_end(keys.at("first_steps"), "first_steps", policy.first, policy.at_first);
  read_end(keys.at("last_steps"), "last_steps", policy.last, policy.at_last);
  policy.at_both = keys.precision("overlap");
  policy.text = keys.precision("reasoner");
  keys.finish();
  return is_ours ? policy : StepPolicy{};
}

Quantisation Quantisation::from_json(const Json& transformer_config) {
  Quantisation out;
  const Json* config = transformer_config.find("quantization_config");
  if (config == nullptr || config->is_null()) return out;
  const std::string method = text_of(*config, "quant_method");
  if (method == "modelopt") {
    const std::string algorithm = text_of(*config, "quant_algo");
    require(algorithm == "FP8", ErrorKind::unsupported, config->where(), ": quant_algo is ",
            algorithm.empty() ? "missing" : algorithm, "; of modelopt this engine reads FP8");
    out.method = "modelopt FP8";
  } else if (method == "compressed-tensors") {
    const std::string format = text_of(*config, "format");
    require(format == "float-quantized", ErrorKind::unsupported, config->where(), ": format is ",
            format.empty() ? "missing" : format,
            "; of compressed-tensors this engine reads float-quantized");
    out.method = "compressed-tensors float-quantized";
  } else {
    fail(ErrorKind::unsupported, config->where(), ": the weights are quantised with ",
         method.empty() ? "an unnamed method" : method,
         "; this engine reads modelopt FP8 and compressed-tensors float-quantized");
  }
  out.has_input_scales = true;
  if (const Json* groups = config->find("config_groups"); groups && groups->is_object()) {
    for (const auto& [name, group] : groups->members()) {
      require_e4m3(group, "weights");
      require_e4m3(group, "input_activations");
      if (is_dynamic(group)) out.has_input_scales = false;
    }
  }
  if (const Json* ignore = config->find("ignore"); ignore && ignore->is_array()) {
    for (const Json& pattern : ignore->items()) out.ignore.push_back(pattern.as_string());
  }
  const Json* runtime = config->find("runtime");
  if (runtime && runtime->is_object() && runtime->has("diffusion_step_policy")) {
    const Json& policy = *runtime->find("diffusion_step_policy");
    if (!policy.is_null()) out.policy = StepPolicy::from_json(policy);
  }
  return out;
}

Dialect Quantisation::dialect() const {
  if (method.empty()) return stored_as_listed;
  return [has_input_scales = has_input_scales](const Safetensors& files, const std::string& name,
                                               const Shape& shape) {
    StoredAs as = stored_as_listed(files, name, shape);
    const StoredTensor* weight = files.find(as.parts.front().name);
    constexpr std::string_view kWeight = ".weight";
    if (!weight || weight->dtype != DType::f8e4m3 || shape.rank() != 2 ||
        !weight->name.ends_with(kWeight))
      return as;
    require(files.find(weight->name + "_scale_inv") == nullptr, ErrorKind::unsupported,
            files.origin().string(), ": ", weight->name,
            "_scale_inv: scales of blocks of a matrix are not supported");
    as.parts.front().stored = DType::f8e4m3;
    // A scalar, [1], or one a row; what is neither is held against one a row.
    const auto expect = [&](const std::string& scale, bool by_rows) {
      const StoredTensor* found = files.find(scale);
      const bool is_one = found && found->shape.numel() == 1;
      as.parts.push_back({scale, is_one ? found->shape : by_rows ? Shape{shape[0], 1} : Shape{}});
      return scale;
    };
    as.scales = expect(weight->name + "_scale", true);
    if (has_input_scales) {
      const size_t stem = weight->name.size() - kWeight.size();
      as.input_scale = expect(weight->name.substr(0, stem) + ".input_scale", false);
    }
    return as;
  };
}

HoldRule Quantisation::hold_rule(const HoldRule& other) const {
  if (method.empty()) return other;
  return HoldRule([ignore = ignore, has_input_scales = has_input_scales,
                   other](const WeightPart& part) -> Held {
    const auto is_ignored = [&](const std::string& pattern) {
      const std::string module = part.name.substr(0, part.name.rfind('.'));
      return fnmatch(pattern.c_str(), module.c_str(), 0) == 0;
    };
    if (part.kind != WeightPart::Kind::matrix ||
        std::any_of(ignore.begin(), ignore.end(), is_ignored))
      return other(part);
    return {DType::f8e4m3, ScaleBlock{1, 0}, has_input_scales};
  });
}

bool Quantisation::is_unused(std::string_view name) {
  return name.ends_with("_quantizer._amax") || name.ends_with("_quantizer._scale");
}

}  // namespace orrery
