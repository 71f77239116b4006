// Where golden data lies and how it is compared. ORRERY_GOLDEN_DIR names another folder of the same
// layout; a case the folder lacks is skipped by name, never passed in silence.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "base/json.h"
#include "engine/backends.h"
#include "io/safetensors.h"
#include "support/source_dir.h"

namespace orrery::golden {

inline std::filesystem::path directory() {
  if (const char* set = std::getenv("ORRERY_GOLDEN_DIR"); set && *set) return set;
  return source_dir() / "tests/golden/data";
}

// The second set: every mode as the program runs it. ORRERY_GOLDEN_MODES_DIR names another folder
// of the same layout.
inline std::filesystem::path modes_directory() {
  if (const char* set = std::getenv("ORRERY_GOLDEN_MODES_DIR"); set && *set) return set;
  return source_dir() / "tests/golden/data_modes";
}

inline std::filesystem::path model_directory() { return source_dir() / "models/cosmos3-pico"; }

// Where the networks run: ORRERY_TEST_DEVICE (cpu), ORRERY_TEST_DTYPE (fp32) and
// ORRERY_TEST_OFFLOAD (none).
inline EngineOptions engine_options() {
  EngineOptions options;
  if (const char* device = std::getenv("ORRERY_TEST_DEVICE"); device && *device)
    options.device = device;
  const char* dtype = std::getenv("ORRERY_TEST_DTYPE");
  options.dtype = value_named<ComputeType>(dtype && *dtype ? dtype : "fp32").value();
  if (const char* offload = std::getenv("ORRERY_TEST_OFFLOAD"); offload && *offload)
    options.offload = value_named<Offload>(offload).value();
  return options;
}

// Sub-folders of directory()/area that hold a case.json, sorted; empty when the area is absent.
inline std::vector<std::string> cases(const std::string& area) {
  std::vector<std::string> names;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(directory() / area, none)) {
    if (std::filesystem::exists(entry.path() / "case.json")) {
      names.push_back(entry.path().filename().string());
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Tensors of one case as host f32 / i64 vectors.
class Tensors {
 public:
  explicit Tensors(const std::filesystem::path& file) : file_(Safetensors::open_file(file)) {}
  bool has(const std::string& name) const { return file_.find(name) != nullptr; }
  Shape shape(const std::string& name) const { return file_.view(name).shape; }
  std::vector<float> floats(const std::string& name) const {
    const Tensor tensor = file_.read(name, DType::f32);
    const float* data = tensor.view.as<float>();
    return {data, data + tensor.view.numel()};
  }
  std::vector<int64_t> integers(const std::string& name) const {
    const Tensor tensor = file_.read(name, DType::i64);
    const int64_t* data = tensor.view.as<int64_t>();
    return {data, data + tensor.view.numel()};
  }
  std::vector<uint8_t> bytes(const std::string& name) const {
    const StoredTensor* tensor = file_.find(name);
    const auto* data = reinterpret_cast<const uint8_t*>(tensor->data);
    return {data, data + tensor->bytes};
  }

 private:
  Safetensors file_;
};

// |got - want| / |want| in the Euclidean norm; infinite when a value is not finite or sizes differ.
inline double relative_error(std::span<const float> got, std::span<const float> want) {
  if (got.size() != want.size()) return INFINITY;
  double difference = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    const double d = double(got[i]) - double(want[i]);
    difference += d * d;
    norm += double(want[i]) * double(want[i]);
  }
  if (norm == 0) return difference == 0 ? 0 : INFINITY;
  return std::sqrt(difference / norm);
}

}  // namespace orrery::golden

// For parameterised suites over cases that may be absent.
#define ORRERY_SKIP_WITHOUT(area)                                                               \
  if (!std::filesystem::exists(::orrery::golden::directory() / (area))) {                       \
    GTEST_SKIP() << "no golden data for " << (area) << " in " << ::orrery::golden::directory(); \
  }
