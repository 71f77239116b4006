#include "model/lora.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cpu/cpu_backend.h"
#include "expect_error.h"
#include "model/lora_names.h"
#include "model/weights.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

namespace fs = std::filesystem;

// One layer of three matrices, one of them f32, and a vector.
struct Network {
  Linear q, out;
  View norm;
  void visit(WeightVisitor& v) {
    v.linear(q, {"layers.0.self_attn.add_q_proj", "layers.0.self_attn.add_k_proj"}, {3, 2}, 2,
             Split::rows, false);
    v.linear(out, {"layers.0.self_attn.to_add_out"}, {2}, 3, Split::columns, false);
    v.tensor(norm, "norm.weight", {2});
  }
};

class Lora : public testing::Test {
 protected:
  ScratchFolder scratch_;
  Network network_;
  VisitFunction visit_ = [this](WeightVisitor& v) { network_.visit(v); };

  struct Given {
    std::string name;
    Shape shape;
    std::vector<float> values;
  };
  fs::path save(const std::string& file, const std::vector<Given>& tensors,
                const std::map<std::string, std::string>& metadata = {}) {
    std::vector<NamedTensor> named;
    for (const Given& t : tensors)
      named.push_back({t.name, make_view(t.values.data(), t.shape, DType::f32)});
    write_safetensors(scratch_.path() / file, named, metadata);
    return scratch_.path() / file;
  }
  // A = [[1, 2]], B = [[10], [20], [30]] for the module: B A = [[10, 20], [20, 40], [30, 60]].
  std::vector<Given> pair(const std::string& module, const std::string& adapter = "") {
    return {{module + ".lora_A" + adapter + ".weight", {1, 2}, {1, 2}},
            {module + ".lora_B" + adapter + ".weight", {3, 1}, {10, 20, 30}}};
  }
  std::vector<float> merged_q(const LoraAdapters& lora) {
    const std::vector<float> w{1, 2, 3, 4, 5, 6};
    const Tensor merged = lora.merged("layers.0.self_attn.add_q_proj.weight",
                                      make_view(w.data(), {3, 2}, DType::f32), DType::f32);
    if (!merged) return {};
    const float* values = merged.view.as<float>();
    return {values, values + merged.view.numel()};
  }
};

TEST_F(Lora, AddsTheProductOfItsFactors) {
  const LoraAdapters lora({{save("a.safetensors", pair("layers.0.self_attn.add_q_proj"))}}, visit_);
  EXPECT_EQ(lora.size(), 1u);
  EXPECT_EQ(merged_q(lora), (std::vector<float>{11, 22, 23, 44, 35, 66}));
  const std::vector<float> other(4, 0.0f);
  EXPECT_FALSE(lora.merged("layers.0.self_attn.add_k_proj.weight",
                           make_view(other.data(), {2, 2}, DType::f32), DType::f32));
}

TEST_F(Lora, EverySpellingOfAModuleMeansTheSame) {
  EXPECT_EQ(lora_module("transformer.layers.3.self_attn.q_proj_moe_gen"),
            "layers.3.self_attn.add_q_proj");
  EXPECT_EQ(lora_module("base_model.model.layers.3.self_attn.o_proj"), "layers.3.self_attn.to_out");
  EXPECT_EQ(lora_module("layers.3.mlp_moe_gen.up_proj"), "layers.3.mlp_moe_gen.up_proj");
  EXPECT_EQ(lora_module("layers.3.self_attn.add_q_proj"), "layers.3.self_attn.add_q_proj");
  EXPECT_EQ(lora_module("time_embedder.mlp.2"), "time_embedder.linear_2");
  EXPECT_EQ(lora_module("llm2vae"), "proj_out");
  EXPECT_EQ(lora_module("net.language_model.model.layers.3.self_attn.q_proj"),
            "layers.3.self_attn.to_q");
  int i = 0;
  for (const char* module :
       {"transformer.layers.0.self_attn.add_q_proj", "layers.0.self_attn.q_proj_moe_gen",
        "base_model.model.model.layers.0.self_attn.add_q_proj"}) {
    for (const char* adapter : {"", ".default"}) {
      const LoraAdapters lora({{save(std::to_string(i++), pair(module, adapter))}}, visit_);
      EXPECT_EQ(merged_q(lora).at(0), 11) << module << adapter;
    }
  }
}

// lora_down and lora_up are lora_A and lora_B; kohya and musubi write underscores for dots.
TEST_F(Lora, OtherTrainersSpellings) {
  int i = 0;
  for (const char* module :
       {"diffusion_model.layers.0.self_attn.add_q_proj",
        "model.diffusion_model.layers.0.self_attn.q_proj_moe_gen",
        "lora_unet_layers_0_self_attn_add_q_proj", "lora_unet_layers_0_self_attn_q_proj_moe_gen",
        "lora_unet_language_model_model_layers_0_self_attn_q_proj_moe_gen",
        "language_model.model.layers.0.self_attn.q_proj_moe_gen",
        "net.language_model.model.layers.0.self_attn.q_proj_moe_gen"}) {
    auto tensors = pair(module);
    for (Given& t : tensors) {
      const size_t at = t.name.find(".lora_");
      t.name =
          t.name.substr(0, at) + (t.name[at + 6] == 'A' ? ".lora_down" : ".lora_up") + ".weight";
    }
    const LoraAdapters lora({{save(std::to_string(i++), tensors)}}, visit_);
    EXPECT_EQ(merged_q(lora).at(0), 11) << module;
  }
}

TEST_F(Lora, OtherMethodsAreRefusedByName) {
  const std::string module = "layers.0.self_attn.add_q_proj";
  for (const auto& [key, method] :
       {std::pair{module + ".hada_w1_a", "LoHa"},
        {module + ".lokr_w2", "LoKr"},
        {module + ".lora_magnitude_vector.default.weight", "DoRA"},
        {module + ".lora_mid.weight", "Tucker"},
        {module + ".diff", "full difference"},
        {std::string("lora_te_layers_0.lora_down.weight"), "text encoder"}}) {
    auto tensors = pair(module);
    tensors.push_back({key, {1, 2}, {1, 2}});
    expect_error(ErrorKind::corrupt, {method},
                 [&] { LoraAdapters({{save("other", tensors)}}, visit_); });
  }
}

TEST_F(Lora, FoldersOfPeftAndDiffusers) {
  const std::string module = "layers.0.self_attn.add_q_proj";
  const LoraAdapters::Source folder{scratch_.path()};
  expect_error(ErrorKind::not_found, {"neither"}, [&] { LoraAdapters({folder}, visit_); });
  scratch_.write("adapter_model.bin", "x");
  expect_error(ErrorKind::unsupported, {"safetensors"}, [&] { LoraAdapters({folder}, visit_); });
  scratch_.write("adapter_config.json", R"({"peft_type": "LORA", "r": 1, "lora_alpha": 3})");
  save("adapter_model.safetensors", pair("base_model.model." + module));
  EXPECT_EQ(merged_q(LoraAdapters({folder}, visit_)).at(0), 1 + 30);
  save("pytorch_lora_weights.safetensors", pair(module));
  expect_error(ErrorKind::invalid_argument, {"name one"}, [&] { LoraAdapters({folder}, visit_); });
}

// PEFT's scale: alpha / sqrt(rank) when rank-stabilised; the first pattern that ends a module's
// name gives its alpha.
TEST_F(Lora, RankStabilisedAndPatterns) {
  const std::string module = "layers.0.self_attn.add_q_proj";
  const std::vector<Given> rank4{
      {module + ".lora_A.weight", {4, 2}, {1, 2, 0, 0, 0, 0, 0, 0}},
      {module + ".lora_B.weight", {3, 4}, {10, 0, 0, 0, 20, 0, 0, 0, 30, 0, 0, 0}}};
  const auto first = [&](const std::string& config) {
    scratch_.write("adapter_config.json", config);
    return merged_q(LoraAdapters({{save("r", rank4)}}, visit_)).at(0);
  };
  EXPECT_EQ(first(R"({"lora_alpha": 8})"), 1 + 20);
  EXPECT_EQ(first(R"({"lora_alpha": 8, "use_rslora": true})"), 1 + 40);
  EXPECT_EQ(first(R"({"lora_alpha": 8, "alpha_pattern": {"to_q": 2, "add_q_proj": 4}})"), 1 + 10);
  EXPECT_EQ(first(R"({"lora_alpha": 8, "alpha_pattern": {"q_proj": 4}})"), 1 + 20);
  EXPECT_EQ(first(R"({"alpha_pattern": {"self_attn.add_q_proj": 16}})"), 1 + 40);
}

TEST_F(Lora, AlphaAndScaleMultiply) {
  const std::string module = "layers.0.self_attn.add_q_proj";
  // Rank 1: alpha is the factor. Without one the factor is 1.
  auto tensors = pair(module);
  tensors.push_back({module + ".alpha", {}, {0.5f}});
  const fs::path with_tensor = save("tensor", tensors, {{"lora_alpha", "4"}});
  EXPECT_EQ(merged_q(LoraAdapters({{with_tensor}}, visit_)).at(0),
            1 + 5);  // the tensor comes first
  EXPECT_EQ(merged_q(LoraAdapters({{with_tensor, -2}}, visit_)).at(0), 1 - 10);
  EXPECT_EQ(
      merged_q(LoraAdapters({{save("m", pair(module), {{"lora_alpha", "4"}})}}, visit_)).at(0),
      1 + 40);
  const fs::path nested =
      save("n", pair(module),
           {{"lora_adapter_metadata", R"({"transformer.r": 1, "transformer.lora_alpha": 3})"}});
  EXPECT_EQ(merged_q(LoraAdapters({{nested}}, visit_)).at(0), 1 + 30);
  scratch_.write("adapter_config.json", R"({"r": 1, "lora_alpha": 2})");
  EXPECT_EQ(merged_q(LoraAdapters({{save("c", pair(module))}}, visit_)).at(0), 1 + 20);
}

TEST_F(Lora, SeveralAddUpAndRoundOnce) {
  const std::string module = "layers.0.self_attn.add_q_proj";
  const fs::path file = save("a", pair(module));
  EXPECT_EQ(merged_q(LoraAdapters({{file, 1}, {file, 2}}, visit_)).at(0), 1 + 10 + 20);
  // In bf16 1 + 2^-9 is 1 and so is (1 + 2^-9) + 2^-9 if rounded in between; together they reach
  // the next value, 1 + 2^-7, only past the tie 1 + 2^-8.
  std::vector<bf16> w(6, to_bf16(1.0f));
  const float small = 0x1p-9f * 1.5f;
  const fs::path tiny = save("t", {{module + ".lora_A.weight", {1, 2}, {small, small}},
                                   {module + ".lora_B.weight", {3, 1}, {1, 1, 1}}});
  const LoraAdapters twice({{tiny}, {tiny}}, visit_);
  const View stored = make_view(w.data(), {3, 2}, DType::bf16);
  const Tensor merged = twice.merged(module + ".weight", stored, DType::bf16);
  EXPECT_EQ(merged.view.dtype, DType::bf16);
  EXPECT_EQ(to_float(merged.view.as<bf16>()[0]), 1 + 0x1p-7f);
  // A run in fp32 does not round to the type of the file.
  const Tensor exact = twice.merged(module + ".weight", stored, DType::f32);
  EXPECT_EQ(exact.view.dtype, DType::f32);
  EXPECT_EQ(exact.view.as<float>()[0], 1 + 2 * small);
}

TEST_F(Lora, ListsEveryKeyThatDoesNotFit) {
  auto tensors = pair("layers.0.self_attn.add_q_proj");
  tensors.push_back({"layers.7.self_attn.add_q_proj.lora_A.weight", {1, 2}, {1, 2}});
  tensors.push_back({"layers.0.self_attn.add_k_proj.lora_A.weight", {1, 2}, {1, 2}});
  tensors.push_back({"layers.0.self_attn.to_add_out.lora_A.weight", {1, 2}, {1, 2}});
  tensors.push_back({"layers.0.self_attn.to_add_out.lora_B.weight", {2, 1}, {1, 2}});
  tensors.push_back({"layers.0.self_attn.add_q_proj.lora_magnitude_vector", {3}, {1, 2, 3}});
  tensors.push_back({"norm.lora_A.weight", {1, 2}, {1, 2}});
  const fs::path file = save("bad", tensors);
  try {
    LoraAdapters({{file}}, visit_);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::corrupt);
    const std::string message = error.what();
    for (const char* part :
         {"layers.7.self_attn.add_q_proj", "layers.0.self_attn.add_k_proj has no lora_B",
          "layers.0.self_attn.to_add_out is", "lora_magnitude_vector", "names norm"}) {
      EXPECT_NE(message.find(part), std::string::npos) << part << "\n" << message;
    }
  }
}

TEST_F(Lora, RefusesWhatItWouldNotDo) {
  const std::string module = "layers.0.self_attn.add_q_proj";
  auto nan = pair(module);
  nan[0].values[0] = NAN;
  EXPECT_THROW(LoraAdapters({{save("nan", nan)}}, visit_), Error);
  EXPECT_THROW(LoraAdapters({{save("none", {})}}, visit_), Error);
  EXPECT_THROW(LoraAdapters({{save("inf", pair(module)), INFINITY}}, visit_), Error);
  EXPECT_THROW(LoraAdapters({{save("zero", pair(module), {{"lora_alpha", "0"}})}}, visit_), Error);
  scratch_.write("adapter_config.json", R"({"lora_alpha": 2, "use_dora": true})");
  EXPECT_THROW(LoraAdapters({{save("dora", pair(module))}}, visit_), Error);
  for (const auto& [config, key] :
       {std::pair{R"({"bias": "all"})", "bias"},
        {R"({"modules_to_save": ["norm"]})", "modules_to_save"},
        {R"({"alora_invocation_tokens": [1]})", "alora_invocation_tokens"},
        {R"({"alpha_pattern": {".*q_proj": 2}})", "expression"},
        {R"({"peft_type": "LOHA"})", "LOHA"}}) {
    scratch_.write("adapter_config.json", config);
    expect_error(ErrorKind::unsupported, {key},
                 [&] { LoraAdapters({{save("key", pair(module))}}, visit_); });
  }
}

// Loading with adapters changes what they name and leaves the rest in the mapping.
TEST_F(Lora, LoadsIntoTheNetwork) {
  const auto backend = cpu::make_cpu_backend({});
  const fs::path model = save("model.safetensors",
                              {{"layers.0.self_attn.add_q_proj.weight", {3, 2}, {1, 2, 3, 4, 5, 6}},
                               {"layers.0.self_attn.add_k_proj.weight", {2, 2}, {1, 2, 3, 4}},
                               {"layers.0.self_attn.to_add_out.weight", {2, 3}, {1, 2, 3, 4, 5, 6}},
                               {"norm.weight", {2}, {1, 1}}});
  const LoraAdapters lora({{save("a", pair("layers.0.self_attn.add_q_proj"))}}, visit_);
  LoadOptions options;
  options.adapt = [&](const std::string& name, const View& stored) {
    return lora.merged(name, stored, DType::f32);
  };
  options.adapted_type = [&](const std::string& name, DType stored) {
    return lora.merged_type(name, stored, DType::f32);
  };
  const Safetensors files = Safetensors::open_file(model);
  const WeightStore store = load_weights(*backend, files, visit_, options);
  ASSERT_EQ(network_.q.weights.size(), 2u);
  EXPECT_EQ(network_.q.weights[0].as<float>()[5], 66);
  EXPECT_EQ(network_.q.weights[1].data, files.view("layers.0.self_attn.add_k_proj.weight").data);
  EXPECT_EQ(network_.out.weights[0].as<float>()[5], 6);
}

}  // namespace
}  // namespace orrery
