#include "model/quantisation.h"

#include <gtest/gtest.h>

#include "expect_error.h"

namespace orrery {
namespace {

constexpr const char* kPolicy = R"({"schema_version": 1, "type": "first_last_n",
  "index_space": "denoising_loop_iteration", "scope": ["transformer"], "default_mode": "native",
  "first_steps": {"count": 3, "mode": "a16"}, "last_steps": {"count": 2, "mode": "a16"},
  "overlap": "a16", "reasoner": "a16"})";

StepPolicy policy_of(const std::string& text) {
  return StepPolicy::from_json(Json::parse(text, "config.json"));
}

Quantisation read(const std::string& quantization_config) {
  return Quantisation::from_json(
      Json::parse("{\"quantization_config\": " + quantization_config + "}", "config.json"));
}

std::string steps_of(const StepPolicy& policy, int64_t num_steps) {
  std::string out;
  for (int64_t i = 0; i < num_steps; ++i)
    out += policy.at(i, num_steps) == Precision::native ? 'n' : 'a';
  return out;
}

TEST(StepPolicy, EndsInSixteenBits) {
  const StepPolicy policy = policy_of(kPolicy);
  EXPECT_EQ(steps_of(policy, 8), "aaannnaa");
  EXPECT_EQ(steps_of(policy, 6), "aaanaa");
  EXPECT_EQ(steps_of(policy, 4), "aaaa");
  EXPECT_EQ(steps_of(policy, 1), "n");
  EXPECT_EQ(policy.text, Precision::a16);
  EXPECT_EQ(steps_of({}, 3), "nnn");
}

TEST(StepPolicy, OfAnotherNetworkIsNone) {
  std::string other = kPolicy;
  other.replace(other.find("[\"transformer\"]"), 15, "[\"transformer_2\"]");
  EXPECT_EQ(steps_of(policy_of(other), 4), "nnnn");
  EXPECT_EQ(policy_of(other).text, Precision::native);
}

// Whatever is not understood is named, a key that is missing or left over too.
TEST(StepPolicy, FailsClosed) {
  const auto refuse = [](const std::string& from, const std::string& to,
                         std::vector<std::string> named) {
    std::string text = kPolicy;
    ASSERT_NE(text.find(from), std::string::npos) << from;
    text.replace(text.find(from), from.size(), to);
    expect_error(ErrorKind::unsupported, named, [&] { policy_of(text); });
  };
  refuse("\"schema_version\": 1", "\"schema_version\": 2", {"schema_version", "2"});
  refuse("first_last_n", "every_n", {"type", "every_n"});
  refuse("\"count\": 3", "\"count\": -1", {"first_steps", "-1"});
  refuse("\"reasoner\": \"a16\"", "\"reasoner\": \"fp8\"", {"reasoner", "fp8"});
  refuse(", \"reasoner\": \"a16\"", "", {"reasoner"});
  refuse("\"overlap\"", "\"future_knob\": 1, \"overlap\"", {"future_knob"});
  refuse("\"count\": 2, ", "", {"last_steps", "count"});
}

TEST(Quantisation, ReadsTheMethodsItKnows) {
  EXPECT_EQ(read("null").method, "");
  const Quantisation modelopt = read(R"({"quant_method": "modelopt", "quant_algo": "FP8"})");
  EXPECT_EQ(modelopt.method, "modelopt FP8");
  EXPECT_TRUE(modelopt.has_input_scales);
  const Quantisation rows = read(R"({"quant_method": "compressed-tensors",
      "format": "float-quantized", "config_groups": {"group_0": {
      "weights": {"num_bits": 8, "type": "float"},
      "input_activations": {"num_bits": 8, "type": "float", "dynamic": true}}}})");
  EXPECT_FALSE(rows.has_input_scales);

  expect_error(ErrorKind::unsupported, {"NVFP4"},
               [] { read(R"({"quant_method": "modelopt", "quant_algo": "NVFP4"})"); });
  expect_error(ErrorKind::unsupported, {"bitsandbytes"},
               [] { read(R"({"quant_method": "bitsandbytes"})"); });
  expect_error(ErrorKind::unsupported, {"an unnamed method"}, [] { read(R"({"bits": 4})"); });
  expect_error(ErrorKind::unsupported, {"format", "pack-quantized"}, [] {
    read(R"({"quant_method": "compressed-tensors", "format": "pack-quantized"})");
  });
  expect_error(ErrorKind::unsupported, {"num_bits", "4"}, [] {
    read(R"({"quant_method": "modelopt", "quant_algo": "FP8",
             "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float"}}}})");
  });
}

// The dry run holds what the configuration quantises, and only matrices.
TEST(Quantisation, HoldsMatricesThatAreNotIgnored) {
  const Quantisation q =
      read(R"({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["proj_in", "time*"]})");
  const HoldRule hold = q.hold_rule(DType::bf16);
  const auto of = [&](const char* name, WeightPart::Kind kind) {
    WeightPart part;
    part.name = name;
    part.kind = kind;
    return hold(part).dtype;
  };
  using enum WeightPart::Kind;
  EXPECT_EQ(of("layers.0.self_attn.to_q.weight", matrix), DType::f8e4m3);
  EXPECT_EQ(of("layers.0.self_attn.to_q.bias", bias), DType::bf16);
  EXPECT_EQ(of("embed_tokens.weight", table), DType::bf16);
  EXPECT_EQ(of("proj_in.weight", matrix), DType::bf16);
  EXPECT_EQ(of("time_embedder.linear_1.weight", matrix), DType::bf16);
}

}  // namespace
}  // namespace orrery
