// Whole runs: golden/pipeline (a tiny random model) and golden/pico (the shipped trained one), and
// the inputs that must be refused.
#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/rng.h"
#include "engine/request_fields.h"
#include "golden.h"
#include "orrery/engine.h"

namespace orrery {
namespace {

namespace fs = std::filesystem;

// fp32 against fp32 over a whole run: an independent implementation agrees to 3e-6; summation order
// alone explains no more than 2e-5.
constexpr double kLatentTolerance = 2e-5;
// Most samples are clamped and the decoder amplifies errors of the latents several hundred times.
constexpr double kSoundTolerance = 5e-3;
// A value that lies on a rounding tie may fall to either side.
constexpr int kFrameLevels = 1;
constexpr double kFramesOff = 2e-3;

Frames frames_of(const golden::Tensors& tensors, const std::string& name) {
  const Shape shape = tensors.shape(name);
  const bool clip = shape.rank() == 4;
  return {clip ? shape[0] : 1, shape[clip ? 1 : 0], shape[clip ? 2 : 1], tensors.bytes(name)};
}

FloatTensor floats_of(const golden::Tensors& tensors, const std::string& name) {
  FloatTensor out;
  const Shape shape = tensors.shape(name);
  for (int i = 0; i < shape.rank(); ++i) out.shape.push_back(shape[i]);
  out.values = tensors.floats(name);
  return out;
}

void set_field(Request& request, const std::string& name, const Json& value) {
  for (const Field<Request>& row : request_table()) {
    if (row.name != name) continue;
    check_value(row, value, name);
    return row.read(request, value);
  }
  ADD_FAILURE() << "case.json: the argument " << name << " is not known to this test";
}

Request request_of(const Json& call, int64_t seed) {
  Request request;
  request.seed = seed;
  request.noise_dtype = NoiseType::fp32;  // of the cases, whatever type runs them
  for (const auto& [key, value] : call.members()) {
    if (key == "action") {
      for (const auto& [name, part] : value.members()) {
        const bool is_short = name == "mode" || name == "chunk_size";
        set_field(request, is_short ? "action_" + name : name, part);
      }
    } else if (key == "image") {
      request.image = Frames{1, 8, 8, std::vector<uint8_t>(192)};
    } else if (key == "video") {
      request.video = Frames{1, 8, 8, std::vector<uint8_t>(192)};
    } else {
      set_field(request, key, value);
    }
  }
  return request;
}

void add_conditions(Request& request, const golden::Tensors& tensors) {
  if (tensors.has("image")) request.image = frames_of(tensors, "image");
  if (tensors.has("video")) request.video = frames_of(tensors, "video");
  if (tensors.has("raw_actions") && request.action)
    request.action->raw_actions = floats_of(tensors, "raw_actions");
}

void expect_frames(const std::vector<uint8_t>& got, const std::vector<uint8_t>& want) {
  ASSERT_EQ(got.size(), want.size());
  int worst = 0;
  size_t off = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const int difference = std::abs(int(got[i]) - int(want[i]));
    worst = std::max(worst, difference);
    off += difference > 0;
  }
  EXPECT_LE(worst, kFrameLevels);
  EXPECT_LE(double(off), std::max(2.0, kFramesOff * double(got.size())));
}

std::vector<uint8_t> every_fourth(const Frames& frames) {
  std::vector<uint8_t> out;
  for (int64_t f = 0; f < frames.count; ++f) {
    for (int64_t y = 0; y < frames.height; y += 4) {
      for (int64_t x = 0; x < frames.width; x += 4) {
        const uint8_t* pixel = frames.frame(f) + (y * frames.width + x) * 3;
        out.insert(out.end(), pixel, pixel + 3);
      }
    }
  }
  return out;
}

// bf16 keeps eight bits of each activation: the same clip to the eye, not the same numbers.
constexpr double kPsnrBf16 = 35;

double psnr(const std::vector<uint8_t>& got, const std::vector<uint8_t>& want) {
  if (got.size() != want.size()) return 0;
  double squares = 0;
  for (size_t i = 0; i < got.size(); ++i) squares += std::pow(double(got[i]) - double(want[i]), 2);
  return squares == 0 ? INFINITY : 10 * std::log10(255.0 * 255.0 * double(got.size()) / squares);
}

void expect_result(const Result& result, const golden::Tensors& want) {
  if (golden::engine_options().dtype == ComputeType::bf16) {
    if (want.has("frames_sub")) {
      EXPECT_GE(psnr(every_fourth(result.frames), want.bytes("frames_sub")), kPsnrBf16);
    }
    return;
  }
  if (want.has("latents")) {
    EXPECT_LT(golden::relative_error(result.latents.values, want.floats("latents")),
              kLatentTolerance);
  }
  if (want.has("action")) {
    ASSERT_TRUE(result.action.has_value());
    EXPECT_LT(golden::relative_error(result.action->values, want.floats("action")),
              kLatentTolerance);
  } else {
    EXPECT_FALSE(result.action.has_value());
  }
  if (want.has("sound")) {
    std::vector<float> planar;
    for (const auto& channel : result.sound)
      planar.insert(planar.end(), channel.begin(), channel.end());
    EXPECT_LT(golden::relative_error(planar, want.floats("sound")), kSoundTolerance);
  }
  if (want.has("frames")) expect_frames(result.frames.rgb, want.bytes("frames"));
  if (want.has("frames_sub")) expect_frames(every_fourth(result.frames), want.bytes("frames_sub"));
  if (want.has("frame_last")) {
    const Frames& f = result.frames;
    const uint8_t* last = f.frame(f.count - 1);
    expect_frames({last, last + f.height * f.width * 3}, want.bytes("frame_last"));
  }
}

class PipelineGolden : public testing::TestWithParam<std::string> {};

TEST_P(PipelineGolden, WholeRun) {
  const fs::path folder = golden::directory() / "pipeline" / GetParam();
  const Json info = Json::load(folder / "case.json");
  const golden::Tensors want(folder / "tensors.safetensors");
  Request request = request_of(info.at("call"), info.at("seed").as_int());
  add_conditions(request, want);

  // The generator's draws, in order, are the ones that the run used.
  NormalGenerator generator(RngKind::cpu, request.seed);
  for (int i = 0; want.has(concat("noise", i)); ++i) {
    const std::vector<float> noise = want.floats(concat("noise", i));
    std::vector<float> drawn(noise.size());
    generator.fill(drawn);
    EXPECT_EQ(drawn, noise) << "draw " << i;
  }
  Engine engine = Engine::open(golden::directory() / "pipeline/model", golden::engine_options());
  expect_result(engine.generate(request), want);
}

std::vector<std::string> runs() {
  std::vector<std::string> names = golden::cases("pipeline");
  std::erase(names, "errors");
  return names;
}

INSTANTIATE_TEST_SUITE_P(Cases, PipelineGolden, testing::ValuesIn(runs()),
                         [](const auto& test) { return test.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(PipelineGolden);

TEST(PipelineErrors, AreRefusedWithTheCauseNamed) {
  ORRERY_SKIP_WITHOUT("pipeline/errors");
  const Json info = Json::load(golden::directory() / "pipeline/errors/case.json");
  const fs::path model = golden::directory() / "pipeline/model";
  // What the sentence must name, by case; a case this list lacks must be refused all the same.
  const std::vector<std::pair<std::string, std::string>> causes{
      {"height_not_16", "height"},
      {"zero_frames", "num_frames"},
      {"both_image_video", "either"},
      {"video_one_frame", "num_frames > 1"},
      {"bad_condition_index", "condition_frame_indexes_vision"},
  };
  for (const auto& [name, call] : info.at("calls").members()) {
    try {
      check_request(model, request_of(call, 0));
      ADD_FAILURE() << name << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::invalid_argument) << name;
      for (const auto& [known, cause] : causes) {
        if (known == name) {
          EXPECT_NE(std::string(error.what()).find(cause), std::string::npos)
              << name << ": " << error.what();
        }
      }
    }
  }
}

class PicoGolden : public testing::TestWithParam<std::string> {};

TEST_P(PicoGolden, WholeRun) {
  const fs::path folder = golden::directory() / "pico";
  const Json info = Json::load(folder / "case.json").at("cases").at(GetParam());
  const golden::Tensors want(folder / (GetParam() + ".safetensors"));
  Request request = request_of(info.at("call"), info.at("seed").as_int());
  add_conditions(request, want);
  Engine engine = Engine::open(golden::model_directory(), golden::engine_options());
  expect_result(engine.generate(request), want);
}

std::vector<std::string> pico_cases() {
  std::vector<std::string> names;
  const fs::path file = golden::directory() / "pico/case.json";
  if (!fs::exists(file)) return names;
  const Json info = Json::load(file);
  for (const auto& [name, run] : info.at("cases").members()) {
    if (fs::exists(golden::directory() / "pico" / (name + ".safetensors"))) names.push_back(name);
  }
  return names;
}

INSTANTIATE_TEST_SUITE_P(Cases, PicoGolden, testing::ValuesIn(pico_cases()),
                         [](const auto& test) { return test.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(PicoGolden);

}  // namespace
}  // namespace orrery
