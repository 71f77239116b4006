// The conditioned modes on the shipped checkpoint, over clips made here: what is asked for is what
// is seen.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

#include "made_clips.h"
#include "orrery/engine.h"
#include "process.h"

namespace orrery {
namespace {

using e2e::find_shape;
using e2e::Scene;

constexpr int64_t kChunk = 16;
constexpr double kUnit = 0.10;  // half-heights that an action of 1 moves the shape

// A clip in which somebody pushes a shape: 16 actions and the path they make.
struct Push {
  const char* words;
  Scene scene;
  std::vector<std::array<double, 2>> actions;
};

Push make_push(const char* words, Scene scene, std::array<double, 2> start,
               std::vector<std::array<double, 2>> actions) {
  scene.path.push_back(start);
  for (const auto& [x, y] : actions) {
    start = {start[0] + kUnit * x, start[1] + kUnit * y};
    scene.path.push_back(start);
  }
  return {words, std::move(scene), std::move(actions)};
}

// Steadily in one direction for some steps, then not at all.
std::vector<std::array<double, 2>> steady(double x, double y, int64_t steps) {
  std::vector<std::array<double, 2>> actions(static_cast<size_t>(kChunk));
  std::fill_n(actions.begin(), steps, std::array<double, 2>{x, y});
  return actions;
}

// Here and there: slow turns and a trembling hand.
std::vector<std::array<double, 2>> wander(unsigned seed, double x, double y) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<double> noise(-0.25, 0.25);
  std::vector<std::array<double, 2>> actions;
  for (int64_t i = 0; i < kChunk; ++i) {
    const double turn = 0.9 * std::sin(2 * M_PI * double(i) / double(kChunk) + seed);
    actions.push_back({std::clamp(x + turn * y + noise(engine), -1.0, 1.0),
                       std::clamp(y - turn * x + noise(engine), -1.0, 1.0)});
  }
  return actions;
}

const Scene kSquare{Scene::Shape::square, {249, 249, 249}, 0.2, {}};
const Scene kCircle{Scene::Shape::circle, {242, 216, 25}, 0.22, {}};
const Scene kTriangle{Scene::Shape::triangle, {230, 25, 25}, 0.25, {}};

// As far as the border lets the shape go.
std::vector<Push> steady_pushes() {
  return {make_push("Push the white square right.", kSquare, {-0.1, 0.1}, steady(0.8, 0, 10)),
          make_push("Push the yellow circle up.", kCircle, {0.2, 0.1}, steady(0, -0.8, 10)),
          make_push("Push the red triangle left.", kTriangle, {0.1, -0.2}, steady(-0.8, 0, 10))};
}

std::vector<Push> wandering_pushes() {
  return {make_push("Push the white square around.", kSquare, {-0.4, -0.1}, wander(1, 0.5, 0.1)),
          make_push("Push the yellow circle around.", kCircle, {0.0, 0.4}, wander(2, 0.1, -0.5))};
}

Request action_request(const Push& push, ActionMode mode) {
  Request request;
  request.prompt = push.words;
  request.fps = 10;
  request.num_inference_steps = 10;
  request.guidance_scale = 1;
  request.use_system_prompt = false;
  request.seed = 11;
  request.action = ActionRequest{};
  request.action->mode = mode;
  request.action->chunk_size = kChunk;
  request.action->domain_name = "pusht";
  request.action->view_point = ViewPoint::third_person_view;
  request.action->resolution_tier = 256;
  return request;
}

class Modes : public testing::Test {
 protected:
  static Engine& engine() {
    static Engine shared = Engine::open(e2e::pico());
    return shared;
  }
};

TEST_F(Modes, ForwardDynamicsMovesTheShapeAlongTheActions) {
  double average = 0;
  const std::vector<Push> pushes = steady_pushes();
  for (const Push& push : pushes) {
    Request request = action_request(push, ActionMode::forward_dynamics);
    request.image = e2e::draw(
        {push.scene.shape, push.scene.colour, push.scene.radius, {push.scene.path.front()}});
    FloatTensor actions{{kChunk, 2}, {}};
    for (const auto& [x, y] : push.actions) {
      actions.values.push_back(static_cast<float>(x));
      actions.values.push_back(static_cast<float>(y));
    }
    request.action->raw_actions = actions;
    const Result result = engine().generate(request);
    ASSERT_EQ(result.frames.count, kChunk + 1);
    EXPECT_FALSE(result.action.has_value());
    // Where the drawn shape would be: a triangle's centroid is not the point it is drawn at.
    const Frames truth = e2e::draw(push.scene);
    double error = 0, travelled = 0;
    for (int64_t t = 0; t <= kChunk; ++t) {
      const e2e::Blob made = find_shape(result.frames, t), want = find_shape(truth, t);
      error += std::hypot(made.x - want.x, made.y - want.y) / double(kChunk + 1);
      travelled = std::max(
          travelled, std::hypot(want.x - find_shape(truth, 0).x, want.y - find_shape(truth, 0).y));
    }
    RecordProperty(push.words, std::to_string(error));
    average += error / double(pushes.size());
    EXPECT_GT(travelled, 0.3);  // a shape that stayed would not pass
  }
  EXPECT_LT(average, 0.12);
}

TEST_F(Modes, InverseDynamicsFindsTheActions) {
  std::vector<Push> pushes = wandering_pushes();
  pushes.push_back(steady_pushes().back());
  std::vector<double> correlations;
  for (const Push& push : pushes) {
    Request request = action_request(push, ActionMode::inverse_dynamics);
    request.video = e2e::draw(push.scene);
    const Result result = engine().generate(request);
    ASSERT_TRUE(result.action.has_value());
    ASSERT_EQ(result.action->shape, (std::vector<int64_t>{kChunk, 2}));
    std::vector<double> found(result.action->values.begin(), result.action->values.end()), wanted;
    for (const auto& [x, y] : push.actions) wanted.insert(wanted.end(), {x, y});
    correlations.push_back(e2e::correlation(found, wanted));
    RecordProperty(push.words, std::to_string(correlations.back()));
  }
  std::sort(correlations.begin(), correlations.end());
  EXPECT_GT(correlations[correlations.size() / 2], 0.8);
}

TEST_F(Modes, PolicyActsTowardsWhatIsSaid) {
  const Push push = steady_pushes().front();
  Request request = action_request(push, ActionMode::policy);
  request.image = e2e::draw({push.scene.shape, push.scene.colour, push.scene.radius, {{-0.3, 0}}});
  const Result result = engine().generate(request);
  ASSERT_TRUE(result.action.has_value());
  // What it does in the clip is what it says it does.
  double x = 0;
  for (size_t i = 0; i < size_t{kChunk}; ++i) x += kUnit * double(result.action->values[i * 2]);
  const double seen = find_shape(result.frames, kChunk).x - find_shape(result.frames, 0).x;
  EXPECT_GT(x, 0.2);
  EXPECT_NEAR(seen, x, 0.2);
}

struct Still {
  const char* caption;
  Scene scene;
  int dx, dy;
};

TEST_F(Modes, ImageToVideoKeepsTheFirstFrameAndMovesAsAsked) {
  const std::vector<Still> stills{
      {"A small white square moves right on a black background.",
       {Scene::Shape::square, {249, 249, 249}, 0.2, {{-0.2, 0.1}}},
       1,
       0},
      {"A large yellow circle moves up on a black background.",
       {Scene::Shape::circle, {242, 216, 25}, 0.35, {{0.1, 0.2}}},
       0,
       -1},
      {"A small red triangle moves down on a black background.",
       {Scene::Shape::triangle, {230, 25, 25}, 0.22, {{0, -0.3}}},
       0,
       1},
  };
  for (const Still& still : stills) {
    Request request;
    request.prompt = still.caption;
    request.image = e2e::draw(still.scene);
    request.height = 256;
    request.width = 256;
    request.num_frames = 17;
    request.num_inference_steps = 10;
    request.guidance_scale = 4;
    request.seed = 2;
    const Result result = engine().generate(request);
    const double kept =
        e2e::psnr(result.frames.rgb.data(), request.image->rgb.data(), 256 * 256 * 3);
    RecordProperty(still.caption, std::to_string(kept));
    EXPECT_GE(kept, 28) << still.caption;
    const e2e::Blob first = find_shape(result.frames, 0), last = find_shape(result.frames, 16);
    // 0.75 half-heights a second: 0.5 in 17 frames at 24 a second.
    for (const auto& [moved, asked] :
         {std::pair{last.x - first.x, still.dx}, {last.y - first.y, still.dy}}) {
      if (asked == 0)
        EXPECT_LT(std::abs(moved), 0.15) << still.caption;
      else
        EXPECT_GT(moved * asked, 0.25) << still.caption;
    }
  }
}

}  // namespace
}  // namespace orrery
