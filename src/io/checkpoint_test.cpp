#include "io/checkpoint.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "expect_error.h"
#include "scratch_folder.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

// ---- tensors against a model -------------------------------------------------------------------

class CheckpointTensors : public testing::Test {
 protected:
  // Writes one file with zero tensors of these names, shapes and types.
  Safetensors files(std::initializer_list<std::pair<const char*, View>> tensors) {
    std::vector<NamedTensor> named;
    for (const auto& [name, view] : tensors) named.push_back({name, view});
    const auto path = scratch_.path() / kWeightsName;
    write_safetensors(path, named);
    return Safetensors::open_file(path);
  }
  View zeros(Shape shape, DType dtype) { return make_view(zeros_, shape, dtype); }

  ScratchFolder scratch_;
  alignas(8) const std::byte zeros_[256] = {};
};

TEST_F(CheckpointTensors, Match) {
  const auto stored = files({{"a", zeros({2, 3}, DType::f32)},
                             {"b", zeros({}, DType::bf16)},
                             {"c", zeros({0}, DType::f16)}});
  check_tensors(stored, {{"c", {0}}, {"a", {2, 3}}, {"b", {}}, {"d", {4}, true}});
}

TEST_F(CheckpointTensors, AllFaultsAreReportedTogether) {
  const auto stored = files({{"shape", zeros({2, 3}, DType::f32)},
                             {"rank", zeros({2, 1}, DType::f32)},
                             {"dtype", zeros({2}, DType::i64)},
                             {"both", zeros({2}, DType::u8)},
                             {"surplus", zeros({5}, DType::bf16)},
                             {"visual.x", zeros({5}, DType::bf16)},
                             {"optional", zeros({1}, DType::f32)}});
  const std::string message = expect_error(
      ErrorKind::corrupt,
      {"9 faults", "missing (1):\n    gone [7, 8] is missing", "shape (4):",
       "shape is [2, 3] in diffusion_pytorch_model.safetensors, but [3, 2] is expected",
       "rank is [2, 1] in", "both is [2] in", "optional is [1] in",
       "dtype (2):", "dtype is stored as I64 in", "both is stored as U8",
       "surplus (2):", "surplus [5] in", "visual.x [5]"},
      [&] {
        check_tensors(stored, {{"shape", {3, 2}},
                               {"rank", {2}},
                               {"dtype", {2}},
                               {"both", {3}},
                               {"gone", {7, 8}},
                               {"optional", {2}, true}});
      });
  EXPECT_TRUE(message.starts_with(stored.origin().string())) << message;
}

TEST_F(CheckpointTensors, IgnoredNamesAreNoSurplus) {
  const auto stored = files({{"a", zeros({1}, DType::f32)}, {"visual.x", zeros({5}, DType::u8)}});
  const auto ignored = [](std::string_view name) { return name.starts_with("visual."); };
  check_tensors(stored, {{"a", {1}}}, ignored);
  // What is asked for is checked, ignored or not.
  expect_error(ErrorKind::corrupt, {"visual.x is stored as U8"}, [&] {
    check_tensors(stored, {{"a", {1}}, {"visual.x", {5}}}, ignored);
  });
}

TEST_F(CheckpointTensors, LongListsAreCut) {
  std::vector<TensorExpectation> expected;
  for (int i = 0; i < 100; ++i) expected.push_back({concat("t", i), {1}});
  const std::string message =
      expect_error(ErrorKind::corrupt, {"100 faults", "t19 [1]", "and 80 more"},
                   [&] { check_tensors(files({}), expected); });
  EXPECT_EQ(message.find("t20 [1]"), std::string::npos);
}

// B12, first half: a weight of a type that this program cannot use is refused by name.
TEST_F(CheckpointTensors, B12StoredTypesWithoutADType) {
  const std::string header = R"({"q":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]},)"
                             R"("d":{"dtype":"F64","shape":[1],"data_offsets":[2,10]}})";
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(header.size());
  const auto stored =
      Safetensors::open_file(scratch_.write("m", bytes + header + std::string(10, '\0')));
  expect_error(ErrorKind::corrupt, {"q is stored as F8_E4M3", "d is stored as F64"}, [&] {
    check_tensors(stored, {{"q", {2}}, {"d", {1}}});
  });
  // Where eight bits are expected, they and nothing else are right.
  expect_error(ErrorKind::corrupt, {"d is stored as F64", "f8e4m3 is expected"}, [&] {
    check_tensors(stored, {{"q", {2}, false, DType::f8e4m3}, {"d", {1}, false, DType::f8e4m3}});
  });
}

TEST_F(CheckpointTensors, NonFiniteValuesAreNamed) {
  std::vector<float> fine(6, 1.0f), bad(6, 1.0f), worse(6, 1.0f);
  bad[4] = NAN;
  worse[5] = -INFINITY;
  const std::vector<TensorExpectation> expected = {
      {"a", {6}}, {"b", {2, 3}}, {"c", {3, 2}}, {"d", {1}, true}};
  const auto view = [](const std::vector<float>& values, Shape shape) {
    return make_view(values.data(), shape, DType::f32);
  };
  check_finite(files({{"a", view(fine, {6})}, {"b", view(fine, {2, 3})}}), expected);
  expect_error(
      ErrorKind::numeric,
      {"2 faults", "b in", "holds NaN at [1, 1]", "c in", "holds Inf at [2, 1]"}, [&] {
        check_finite(
            files({{"a", view(fine, {6})}, {"b", view(bad, {2, 3})}, {"c", view(worse, {3, 2})}}),
            expected);
      });
}

// ---- values ------------------------------------------------------------------------------------

// For each place of a tensor longer than one block: exactly that place is found.
template <typename Bits>
void expect_found(DType dtype, Bits largest, Bits infinity, Bits nan) {
  constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  std::vector<Bits> values(20001, largest);
  for (size_t i = 0; i < values.size(); i += 2) values[i] = static_cast<Bits>(largest | kSign);
  const View view = make_view(values.data(), {static_cast<int64_t>(values.size())}, dtype);
  EXPECT_EQ(first_non_finite(view), std::nullopt);
  for (const size_t at :
       {size_t{0}, size_t{1}, size_t{8191}, size_t{8192}, size_t{16385}, size_t{20000}}) {
    const Bits kept = values[at];
    for (const Bits sign : {Bits{0}, kSign}) {
      values[at] = static_cast<Bits>(infinity | sign);
      EXPECT_EQ(first_non_finite(view), concat("Inf at [", at, "]"));
      values[at] = static_cast<Bits>(nan | sign);
      EXPECT_EQ(first_non_finite(view), concat("NaN at [", at, "]"));
    }
    values[at] = kept;
  }
}

TEST(FirstNonFinite, FindsThePlaceInEveryType) {
  expect_found<uint32_t>(DType::f32, 0x7f7fffff, 0x7f800000, 0x7f800001);
  expect_found<uint16_t>(DType::bf16, 0x7f7f, 0x7f80, 0x7f81);
  expect_found<uint16_t>(DType::f16, 0x7bff, 0x7c00, 0x7fff);
}

TEST(FirstNonFinite, FirstOfSeveral) {
  float values[2][3][4] = {};
  values[1][0][2] = INFINITY;
  values[1][2][3] = NAN;
  EXPECT_EQ(first_non_finite(make_view(values, {2, 3, 4}, DType::f32)), "Inf at [1, 0, 2]");
  EXPECT_EQ(first_non_finite(make_view(&values[1][0][2], {}, DType::f32)), "Inf at []");
}

TEST(FirstNonFinite, AnyAlignment) {
  std::byte bytes[2 + 4 * 3] = {};
  const float bad = NAN;
  std::memcpy(bytes + 2 + 8, &bad, 4);
  EXPECT_EQ(first_non_finite(make_view(bytes + 2, {3}, DType::f32)), "NaN at [2]");
  EXPECT_EQ(first_non_finite(make_view(bytes + 2, {2}, DType::f32)), std::nullopt);
}

TEST(FirstNonFinite, IntegersEmptyAndStrided) {
  const int64_t ones[2] = {-1, -1};  // all bits set
  EXPECT_EQ(first_non_finite(make_view(ones, {2}, DType::i64)), std::nullopt);
  EXPECT_EQ(first_non_finite(make_view(ones, {4}, DType::i32)), std::nullopt);
  EXPECT_EQ(first_non_finite(make_view(nullptr, {0, 3}, DType::f32)), std::nullopt);
  const float grid[4] = {};
  expect_error(ErrorKind::invalid_argument, {"contiguous"}, [&] {
    first_non_finite(make_view(grid, {2, 2}, DType::f32).permute({1, 0}));
  });
}

// ---- model folder ------------------------------------------------------------------------------

constexpr const char* kTaskIndexText = R"({
  "_class_name": "Cosmos3OmniPipeline", "_diffusers_version": "0.40", "novel": [1, {}],
  "transformer": ["diffusers", "Cosmos3OmniTransformer"], "vae": ["diffusers", "AutoencoderKLWan"],
  "text_tokenizer": ["transformers", "AnyTokenizer"], "scheduler": ["diffusers", "UniPCMultistepScheduler"],
  "safety_checker": [null, null], "sound_tokenizer": [null, null]})";

class ModelFolderTest : public testing::Test {
 protected:
  void SetUp() override {
    scratch.write("model_index.json", kTaskIndexText);
    scratch.write("transformer/config.json",
                  R"({"_class_name": "Cosmos3OmniTransformer", "hidden_size": 8})");
    scratch.write("transformer/" + std::string(kWeightsIndexName), "{}");
    scratch.write("vae/config.json", R"({"z_dim": 4})");
    scratch.write("vae/" + std::string(kWeightsName), "");
    scratch.write("text_tokenizer/tokenizer.json", "{}");
    scratch.write("scheduler/scheduler_config.json",
                  R"({"_class_name": "UniPCMultistepScheduler"})");
  }
  // The task index with one key set to a JSON text ("" removes it).
  void set(const std::string& key, const std::string& value) {
    const Json task = Json::parse(kTaskIndexText, "");
    Json index = Json::object();
    for (const auto& [name, old] : task.members()) {
      if (name != key) index.set(name, old);
    }
    if (!value.empty()) index.set(key, Json::parse(value, ""));
    scratch.write("model_index.json", index.dump());
  }
  void remove(const std::string& name) { std::filesystem::remove_all(scratch.path() / name); }
  ModelFolder open() { return open_model_folder(scratch.path()); }
  void expect(ErrorKind kind, std::initializer_list<std::string_view> parts) {
    expect_error(kind, parts, [&] { open(); });
  }

  ScratchFolder scratch;
};

TEST_F(ModelFolderTest, ReadsWhatIsThere) {
  const ModelFolder model = open();
  EXPECT_EQ(model.class_name, "Cosmos3OmniPipeline");
  EXPECT_EQ(model.transformer.folder, scratch.path() / "transformer");
  EXPECT_EQ(model.transformer.config.at("hidden_size").as_int(), 8);
  EXPECT_EQ(model.vae.class_name, "AutoencoderKLWan");  // its config does not say
  EXPECT_EQ(model.scheduler.class_name, "UniPCMultistepScheduler");
  EXPECT_TRUE(model.text_tokenizer.config.is_null());
  EXPECT_FALSE(model.sound_tokenizer.has_value());
  EXPECT_TRUE(model.enable_safety_checker);
  EXPECT_TRUE(model.default_use_system_prompt);
  EXPECT_FALSE(model.use_native_flow_schedule);
  EXPECT_FALSE(model.native_flow_shift.has_value());
  EXPECT_FALSE(model.is_distilled());
}

TEST_F(ModelFolderTest, ReadsScalars) {
  set("enable_safety_checker", "false");
  EXPECT_FALSE(open().enable_safety_checker);
  set("default_use_system_prompt", "false");
  EXPECT_FALSE(open().default_use_system_prompt);
  set("use_native_flow_schedule", "true");
  EXPECT_TRUE(open().use_native_flow_schedule);
  set("native_flow_shift", "3");
  EXPECT_EQ(open().native_flow_shift, 3.0);
  set("native_flow_shift", "null");
  EXPECT_EQ(open().native_flow_shift, std::nullopt);
  set("native_flow_shift", "-1");
  expect(ErrorKind::corrupt, {"native_flow_shift"});
  set("enable_safety_checker", "1");
  expect(ErrorKind::corrupt, {"model_index.json: enable_safety_checker is neither true nor false"});
}

TEST_F(ModelFolderTest, OptionalComponents) {
  for (const char* absent : {"", "null", "[null, null]"}) {
    set("sound_tokenizer", absent);
    EXPECT_FALSE(open().sound_tokenizer.has_value()) << absent;
  }
  const std::string named = R"(["diffusers", "Cosmos3AVAEAudioTokenizer"])";
  set("sound_tokenizer", named);
  expect(ErrorKind::not_found, {"sound_tokenizer/ is missing"});
  scratch.write("sound_tokenizer/config.json", "{}");
  expect(ErrorKind::not_found, {"sound_tokenizer/ has no weights"});
  scratch.write("sound_tokenizer/" + std::string(kWeightsName), "");
  EXPECT_EQ(open().sound_tokenizer->class_name, "Cosmos3AVAEAudioTokenizer");
  set("sound_tokenizer", "null");  // the index decides, not the folder
  EXPECT_FALSE(open().sound_tokenizer.has_value());
}

// B11: what is missing is said at once, with the file and the field.
TEST_F(ModelFolderTest, B11NamesEveryMissingFileAndField) {
  remove("transformer/config.json");
  remove("vae");
  remove("text_tokenizer/tokenizer.json");
  scratch.write("scheduler/scheduler_config.json", "[]");
  expect(ErrorKind::corrupt,
         {"4 faults", "transformer/config.json is missing",
          "vae/ is missing, which model_index.json names",
          "text_tokenizer/tokenizer.json is missing", "scheduler_config.json: expected an object"});
}

TEST_F(ModelFolderTest, B11MissingFilesAlone) {
  remove("transformer/" + std::string(kWeightsIndexName));
  expect(ErrorKind::not_found,
         {scratch.path().string() + ": transformer/ has no weights", std::string(kWeightsName)});
}

TEST_F(ModelFolderTest, B11RequiredComponents) {
  set("vae", "[null, null]");
  expect(ErrorKind::corrupt, {"model_index.json: vae is missing or null"});
  set("transformer", "");
  expect(ErrorKind::corrupt, {"model_index.json: transformer is missing or null"});
  set("scheduler", "\"UniPC\"");
  expect(ErrorKind::corrupt, {"scheduler is neither null nor a list"});
}

TEST_F(ModelFolderTest, B11IndexItself) {
  set("_class_name", "");
  expect(ErrorKind::corrupt, {"model_index.json", "\"_class_name\" is missing"});
  set("_class_name", "\"WanPipeline\"");
  expect(ErrorKind::unsupported, {"the pipeline class WanPipeline is not supported"});
  scratch.write("model_index.json", "{");
  expect(ErrorKind::corrupt, {"model_index.json: not valid JSON"});
  remove("model_index.json");
  expect(ErrorKind::not_found, {"neither model_index.json nor modular_model_index.json"});
  expect_error(ErrorKind::not_found, {"/none: the model folder does not exist"},
               [&] { open_model_folder(scratch.path() / "none"); });
}

TEST_F(ModelFolderTest, ComponentNamedInsteadOfModel) {
  for (const char* name : {"transformer", "transformer/"}) {
    expect_error(ErrorKind::not_found, {"name the model folder above it"},
                 [&] { open_model_folder(scratch.path() / name); });
  }
}

TEST_F(ModelFolderTest, TrailingSlash) {
  remove("transformer/config.json");
  expect_error(ErrorKind::not_found, {": transformer/config.json is missing"},
               [&] { open_model_folder(scratch.path() / ""); });
}

// B12, second half: quantised checkpoints are recognised by their side files and refused by name.
TEST_F(ModelFolderTest, B12QuantisedCheckpoints) {
  for (const char* algorithm : {"NVFP4", "FOO"}) {
    const std::string entry = concat("{\"quant_algo\": \"", algorithm, "\"}");
    for (const char* file : {"hf_quant_config.json", "transformer/hf_quant_config.json"}) {
      scratch.write(file, "{\"producer\": {}, \"quantization\": " + entry + "}");
      expect(ErrorKind::unsupported, {file, "quantised with " + std::string(algorithm), "bf16"});
      remove(file);
    }
  }
  scratch.write("hf_quant_config.json", R"({"quantization": {"quant_algo": null}})");
  open();
  // What is read is said by the transformer's own configuration (model/quantisation.h).
  scratch.write("hf_quant_config.json", R"({"quantization": {"quant_algo": "FP8"}})");
  open();
}

constexpr const char* kModularText = R"({
  "_class_name": "%CLASS%", "_blocks_class_name": "Blocks",
  "transformer": ["diffusers", "Cosmos3OmniTransformer",
                  {"pretrained_model_name_or_path": "org/name", "subfolder": "transformer"}],
  "vae": [null, null, {"pretrained_model_name_or_path": "org/base", "subfolder": "vae",
                       "type_hint": ["diffusers", "AutoencoderKLWan"], "variant": null}],
  "text_tokenizer": ["transformers", "Qwen2TokenizerFast", {"subfolder": "text_tokenizer"}],
  "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler", {"subfolder": "%SCHEDULER%"}],
  "sound_tokenizer": [null, null, {"subfolder": "sound_tokenizer"}] %MORE%})";

class ModularFolderTest : public ModelFolderTest {
 protected:
  void write_modular(const std::string& more,
                     const std::string& class_name = "Cosmos3DistilledModularPipeline",
                     const std::string& scheduler = "scheduler") {
    std::string text = kModularText;
    const auto put = [&](std::string_view mark, const std::string& value) {
      text.replace(text.find(mark), mark.size(), value);
    };
    put("%CLASS%", class_name);
    put("%SCHEDULER%", scheduler);
    put("%MORE%", more);
    scratch.write("modular_model_index.json", text);
  }
};

TEST_F(ModularFolderTest, AloneAndWithTheTaskIndex) {
  write_modular(
      R"(, "is_distilled": true, "distilled_sigmas": [1.0, 0.9375, 0.8333333333333334, 0.625])");
  ModelFolder model = open();
  EXPECT_EQ(model.class_name, "Cosmos3OmniPipeline");
  EXPECT_EQ(model.distilled_sigmas, (std::vector<double>{1.0, 0.9375, 0.8333333333333334, 0.625}));
  remove("model_index.json");
  model = open();
  EXPECT_EQ(model.class_name, "Cosmos3DistilledModularPipeline");
  EXPECT_EQ(model.vae.folder, scratch.path() / "vae");
  EXPECT_TRUE(model.is_distilled());
  EXPECT_FALSE(model.sound_tokenizer.has_value());
  remove("transformer");
  expect(ErrorKind::not_found, {"transformer/ is missing", "takes it from org/name"});
}

TEST_F(ModularFolderTest, DistilledOrNot) {
  write_modular("", "Cosmos3OmniModularPipeline");
  EXPECT_FALSE(open().is_distilled());
  write_modular(R"(, "is_distilled": false)");
  EXPECT_FALSE(open().is_distilled());
  for (const char* sigmas :
       {"null", "[]", "[0.5,0.5]", "[0.5,0.75]", "[1.5]", "[1,0]", "[\"1\"]", "4"}) {
    SCOPED_TRACE(sigmas);
    write_modular(R"(, "is_distilled": true, "distilled_sigmas": )" + std::string(sigmas));
    expect(ErrorKind::corrupt, {"modular_model_index.json: distilled_sigmas", sigmas});
  }
  write_modular("");  // the class alone says so
  expect(ErrorKind::corrupt, {"distilled_sigmas", "found none"});
  write_modular(R"(, "is_distilled": 1)");
  expect(ErrorKind::corrupt, {"is_distilled is neither"});
  write_modular("", "OtherModularPipeline");
  expect(ErrorKind::unsupported, {"OtherModularPipeline"});
}

// B01 for folders.
TEST_F(ModularFolderTest, B01SubfoldersStayInside) {
  remove("model_index.json");
  for (const char* folder : {"../scheduler", "/tmp", "a/b", ".."}) {
    write_modular(R"(, "is_distilled": false)", "Cosmos3OmniModularPipeline", folder);
    expect(ErrorKind::corrupt, {"scheduler: the subfolder", folder, "not a plain name"});
  }
}

TEST(Checkpoint, ShippedModelFolder) {
  const auto path = source_dir() / "models/cosmos3-pico";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is not here";
  const ModelFolder model = open_model_folder(path);
  EXPECT_EQ(model.transformer.class_name, "Cosmos3OmniTransformer");
  EXPECT_FALSE(model.enable_safety_checker);
  EXPECT_FALSE(model.sound_tokenizer.has_value());
  const auto files = Safetensors::open_folder(model.transformer.folder);
  std::vector<TensorExpectation> expected;
  for (const StoredTensor& tensor : files.tensors())
    expected.push_back({tensor.name, tensor.shape});
  check_tensors(files, expected);
  check_finite(files, expected);
}

}  // namespace
}  // namespace orrery
