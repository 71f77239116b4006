// What a request comes to on the shipped checkpoint, and what is refused of it. Nothing is loaded.
#include "engine/settings.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "engine/backends.h"
#include "expect_error.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

const Checkpoint& pico() {
  static const Checkpoint checkpoint =
      read_checkpoint(source_dir().string() + "/models/cosmos3-pico");
  return checkpoint;
}

Frames grey(int64_t count, int64_t height, int64_t width) {
  return {count, height, width, std::vector<uint8_t>(size_t(count * height * width * 3), 90)};
}

Request clip() {
  Request request;
  request.prompt = "A small red circle.";
  request.height = 64;
  request.width = 96;
  request.num_frames = 17;
  return request;
}

Request pushes(ActionMode mode, Frames frames) {
  Request request;
  request.prompt = "Push.";
  request.action = ActionRequest{};
  request.action->mode = mode;
  request.action->domain_name = "pusht";
  request.action->resolution_tier = 256;
  (frames.count == 1 ? request.image : request.video) = std::move(frames);
  return request;
}

void refused(const Request& request, std::initializer_list<std::string_view> parts) {
  expect_error(ErrorKind::invalid_argument, parts, [&] { resolve(request, pico()); });
}

// B39: whole latent pixels are enough; odd numbers of them are padded within the model.
TEST(Sizes, MultiplesOfTheVaesFactor) {
  struct Case {
    int64_t width, height, latent_width, latent_height;
  };
  for (const Case& c : std::vector<Case>{
           {1280, 720, 80, 45}, {1104, 832, 69, 52}, {1280, 704, 80, 44}, {16, 16, 1, 1}}) {
    Request request = clip();
    request.width = c.width;
    request.height = c.height;
    const Settings s = resolve(request, pico());
    EXPECT_EQ(s.latent_width, c.latent_width);
    EXPECT_EQ(s.latent_height, c.latent_height);
  }
  struct Refusal {
    int64_t width, height;
    const char* says;
  };
  for (const Refusal& c : std::vector<Refusal>{{1280, 728, "the nearest is 720"},
                                               {1281, 720, "the nearest is 1280"},
                                               {8, 16, "the nearest is 16"},
                                               {16, 0, "at least 1"},
                                               {16, -16, "at least 1"},
                                               {100000, 16, "the limit is 16384"}}) {
    Request request = clip();
    request.width = c.width;
    request.height = c.height;
    refused(request, {c.says});
  }
}

// B40: 4 n + 1 frames; another number is told.
TEST(FrameCounts, AreWhatTheVaeMakes) {
  struct Case {
    int64_t asked, latent, made;
  };
  for (const Case& c : std::vector<Case>{
           {1, 1, 1}, {2, 1, 1}, {4, 1, 1}, {5, 2, 5}, {6, 2, 5}, {189, 48, 189}, {190, 48, 189}}) {
    Request request = clip();
    request.num_frames = c.asked;
    const Settings s = resolve(request, pico());
    EXPECT_EQ(s.latent_frames, c.latent) << c.asked;
    EXPECT_EQ(s.frames, c.made) << c.asked;
    const std::string told = std::to_string(c.made) + " frames are made";
    const bool says_so = std::any_of(
        s.notices.begin(), s.notices.end(),
        [&](const std::string& notice) { return notice.find(told) != std::string::npos; });
    EXPECT_EQ(says_so, c.asked != c.made) << c.asked;
  }
}

// B42, B45: which latent frames stay as given, and how many frames are encoded for them.
TEST(Conditioning, OnlyWhatCanMatterIsEncoded) {
  Request request = clip();  // 5 latent frames
  request.image = grey(1, 64, 96);
  Settings s = resolve(request, pico());
  EXPECT_EQ(s.conditioning.encoded_frames, 1);
  EXPECT_EQ(s.conditioning.noisy, (std::vector<bool>{false, true, true, true, true}));
  request.image.reset();
  request.video = grey(17, 64, 96);
  struct Case {
    std::vector<int64_t> indexes;
    int64_t encoded;
    std::vector<bool> noisy;
  };
  for (const Case& c : std::vector<Case>{{{0}, 1, {false, true, true, true, true}},
                                         {{0, 1}, 5, {false, false, true, true, true}},
                                         {{1, 0, 1}, 5, {false, false, true, true, true}},
                                         {{0, 1, 2}, 9, {false, false, false, true, true}},
                                         {{4}, 17, {true, true, true, true, false}}}) {
    request.condition_frame_indexes_vision = c.indexes;
    s = resolve(request, pico());
    EXPECT_EQ(s.conditioning.encoded_frames, c.encoded);
    EXPECT_EQ(s.conditioning.noisy, c.noisy);
  }
  request.condition_frame_indexes_vision = {0, 5};
  refused(request, {"holds 5", "5 latent frames (0 to 4)"});
  request.condition_frame_indexes_vision = {-1};
  refused(request, {"at least 0, got -1"});
  request.condition_frame_indexes_vision = {};
  refused(request, {"is empty"});
  request.condition_frame_indexes_vision = {0};
  request.video = grey(0, 64, 96);
  refused(request, {"no frames"});

  // Policy looks at the first frame alone, whatever clip it is given.
  for (ActionMode mode : {ActionMode::policy, ActionMode::inverse_dynamics}) {
    s = resolve(pushes(mode, grey(17, 256, 256)), pico());
    EXPECT_EQ(s.conditioning.encoded_frames, mode == ActionMode::policy ? 1 : 17) << name_of(mode);
  }
}

// B38: a tier is the name of a table of canvases.
TEST(ResolutionTiers, ChooseACanvas) {
  const Settings s = resolve(pushes(ActionMode::policy, grey(1, 720, 1280)), pico());
  EXPECT_EQ(s.canvas_height, 192);
  EXPECT_EQ(s.canvas_width, 320);
  EXPECT_EQ(s.height, 176);  // of the picture within: 180 rows hold 11 latent ones
  EXPECT_EQ(s.width, 320);
  Request request = pushes(ActionMode::policy, grey(1, 720, 1280));
  request.action->resolution_tier = 1080;
  refused(request, {"1080", "256, 480, 704 and 720"});
  request = pushes(ActionMode::policy, grey(1, 720, 1280));
  request.height = 720;
  refused(request, {"resolution_tier", "leave them unset"});
}

// B79: shapes of given actions, told by number.
TEST(Actions, HaveTheEmbodimentsShape) {
  const auto given = [](std::vector<int64_t> shape, float value = 0.5f) {
    Request request = pushes(ActionMode::forward_dynamics, grey(1, 256, 256));
    int64_t count = 1;
    for (const int64_t side : shape) count *= side;
    request.action->raw_actions =
        FloatTensor{std::move(shape), std::vector<float>(size_t(count), value)};
    return request;
  };
  // Fewer rows: the last one is held. More: cut. The rest of the model's width is 0.
  for (const int64_t rows : {1, 15, 16, 17}) {
    const Settings s = resolve(given({rows, 2}), pico());
    ASSERT_EQ(s.action->chunk, 16);
    const int64_t width = pico().transformer.action_dim;
    ASSERT_EQ(std::ssize(s.action->clean), 16 * width);
    for (int64_t i = 0; i < 16 * width; ++i) {
      EXPECT_EQ(s.action->clean[size_t(i)], i % width < 2 ? 0.5f : 0.0f) << rows << " " << i;
    }
  }
  refused(given({16, 3}), {"3 values a row", "\"pusht\" has 2"});
  refused(given({16, 1}), {"1 values a row", "\"pusht\" has 2"});
  refused(given({0, 2}), {"empty", "0 x 2"});
  refused(given({16}), {"a matrix", "1 dimensions"});
  refused(given({16, 2}, NAN), {"row 0, value 0 is not finite"});
  Request request = given({16, 2});
  request.action->domain_name = "av";
  refused(request, {"\"av\" has 9 action values", "action_dim is 8"});
  request.action->domain_name = "nobody";
  refused(request, {"nobody"});
  request.action->domain_name = "libero";
  refused(request, {"libero"});
  request = given({16, 2});
  request.action->chunk_size = 0;
  refused(request, {"chunk_size", "got 0"});
  request = given({16, 2});
  request.action->raw_actions.reset();
  refused(request, {"needs raw actions"});
}

// The public pipeline draws noise in the type of the model.
TEST(NoiseTypes, AutomaticIsTheTypeOfTheRun) {
  EXPECT_EQ(Request().noise_dtype, NoiseType::automatic);
  EXPECT_EQ(noise_type(NoiseType::automatic, DType::f32), NoiseType::fp32);
  EXPECT_EQ(noise_type(NoiseType::automatic, DType::bf16), NoiseType::bf16);
  for (const NoiseType type : {NoiseType::fp32, NoiseType::bf16, NoiseType::bf16_torch_2_11})
    EXPECT_EQ(noise_type(type, DType::bf16), type);
  EXPECT_EQ(value_named<NoiseType>("bf16-torch-2.11"), NoiseType::bf16_torch_2_11);
}

}  // namespace
}  // namespace orrery
