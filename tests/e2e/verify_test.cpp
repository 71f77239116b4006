// orrery inspect --verify: every byte of a model folder.
#include <gtest/gtest.h>

#include "base/json.h"
#include "model_variant.h"
#include "process.h"

namespace orrery {
namespace {

// Puts a copy of the shard into the variant that holds a tensor, its first value replaced.
void set_first_value(const e2e::ModelVariant& model, const std::string& tensor,
                     uint16_t bf16_bits) {
  const std::string folder = e2e::pico() + "/transformer/";
  const Json index = Json::load(folder + "diffusion_pytorch_model.safetensors.index.json");
  const std::string shard = index.at("weight_map").at(tensor).as_string();
  std::string file = ScratchFolder::read(folder + shard);
  uint64_t length = 0;
  for (int i = 0; i < 8; ++i) length |= uint64_t{static_cast<uint8_t>(file[size_t(i)])} << 8 * i;
  const Json header = Json::parse(file.substr(8, length), "header");
  const auto begin = header.at(tensor).at("data_offsets").at(size_t{0}).as_int();
  const size_t at = 8 + length + static_cast<size_t>(begin);
  file[at] = static_cast<char>(bf16_bits & 0xff);
  file[at + 1] = static_cast<char>(bf16_bits >> 8);
  model.write("transformer/" + shard, file);
}

TEST(Verify, SaysWhatWasRead) {
  const e2e::Outcome outcome = e2e::run({"inspect", e2e::pico(), "--verify"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("finite and likely"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("checksums: none"), std::string::npos) << outcome.out;
}

// B16 of the second list: one flipped exponent bit is named, and a run says so.
TEST(Verify, ADamagedValueIsNamed) {
  const std::string tensor = "layers.3.self_attn.to_q.weight";
  const e2e::ModelVariant model;
  set_first_value(model, tensor, 0x7c80);  // 5.3e36
  const e2e::Outcome verified = e2e::run({"inspect", model.path().string(), "--verify"});
  EXPECT_EQ(verified.status, 1) << verified.err;
  EXPECT_NE(verified.err.find(tensor), std::string::npos) << verified.err;
  EXPECT_NE(verified.err.find("at [0, 0]"), std::string::npos) << verified.err;
}

TEST(Verify, AChecksumThatDiffersIsNamed) {
  const e2e::ModelVariant model;
  model.write("vae/config.json.sha256", std::string(64, '0'));
  const e2e::Outcome outcome = e2e::run({"inspect", model.path().string(), "--verify"});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_NE(outcome.err.find("vae/config.json has "), std::string::npos) << outcome.err;
}

}  // namespace
}  // namespace orrery
