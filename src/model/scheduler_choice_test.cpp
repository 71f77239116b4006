// B15: the grid follows from checkpoint, mode, size and request by one rule.
#include "model/scheduler_choice.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/error.h"

namespace orrery {
namespace {

// The released base checkpoints.
SchedulerConfig base_checkpoint() {
  SchedulerConfig config;
  config.use_karras_sigmas = true;
  config.sigma_max = 200;
  config.sigma_min = 0.147;
  return config;
}

SchedulerConfig flow_checkpoint(double shift) {
  SchedulerConfig config;
  config.flow_shift = shift;
  return config;
}

SchedulerConfig edge_checkpoint() {
  SchedulerConfig config = flow_checkpoint(3);
  config.native_schedule = true;
  return config;
}

SchedulerConfig distilled_checkpoint() {
  SchedulerConfig config;
  config.kind = SchedulerConfig::Kind::flow_match_euler;
  config.stochastic_sampling = true;
  return config;
}

SchedulerOverrides shift(double value) { return {.flow_shift = value, .karras = {}}; }
SchedulerOverrides karras(bool on) { return {.flow_shift = {}, .karras = on}; }
SchedulerOverrides own() { return {.flow_shift = {}, .karras = {}, .checkpoint = true}; }

// First and last three sigmas of 35 steps, the final 0 left out.
struct Ends {
  std::vector<float> first, last;
};
const Ends kPlain10{{0.999998987f, 0.997070432f, 0.993982255f},
                    {0.486771137f, 0.381447375f, 0.233376965f}};
const Ends kPlain5{{0.999998987f, 0.99415803f, 0.988036513f},
                   {0.321677148f, 0.235671893f, 0.132103428f}};
const Ends kPlain3{{0.999998987f, 0.990301132f, 0.980218589f},
                   {0.221507892f, 0.156120405f, 0.0836840421f}};
const Ends kPlain1{{0.999998987f, 0.971457124f, 0.942914307f},
                   {0.0866285712f, 0.0580857135f, 0.0295428578f}};
const Ends kKarras{{0.99502486f, 0.994317174f, 0.993492663f},
                   {0.229421496f, 0.174284503f, 0.128160417f}};
const Ends kNative3{{0.999666452f, 0.989954531f, 0.9798581f},
                    {0.219324782f, 0.153708071f, 0.0810043812f}};
const Ends kNative10{{0.999899924f, 0.996964991f, 0.993871033f},
                     {0.483597696f, 0.3771092f, 0.227091908f}};

struct Row {
  SchedulerConfig checkpoint;
  SamplingMode mode;
  int64_t height, width;
  SchedulerOverrides overrides;
  Ends want;
  std::string reason;  // part of the sentence
};

TEST(SchedulerChoice, EveryCombination) {
  using enum SamplingMode;
  const std::vector<Row> rows = {
      // Karras in the file and nothing asked: the recommended shift of mode and size.
      {base_checkpoint(),
       video,
       720,
       1280,
       {},
       kPlain10,
       "shift 10: recommended for video at 1280x720"},
      {base_checkpoint(), video, 704, 1280, {}, kPlain10, "shift 10"},
      {base_checkpoint(), video, 960, 960, {}, kPlain10, "shift 10"},
      {base_checkpoint(), video, 480, 832, {}, kPlain5, "shift 5"},
      {base_checkpoint(), video, 640, 640, {}, kPlain5, "shift 5"},
      {base_checkpoint(), video, 192, 320, {}, kPlain3, "shift 3"},
      {base_checkpoint(), video, 256, 256, {}, kPlain3, "shift 3"},
      {base_checkpoint(), image, 720, 1280, {}, kPlain3, "recommended for an image"},
      {base_checkpoint(), image, 256, 256, {}, kPlain3, "shift 3"},
      {base_checkpoint(), action, 480, 832, {}, kPlain10, "recommended for actions"},
      {base_checkpoint(), action, 256, 256, {}, kPlain10, "shift 10"},
      {base_checkpoint(), transfer, 720, 1280, {}, kPlain10, "recommended for transfer"},
      {base_checkpoint(), transfer, 192, 320, {}, kPlain10, "shift 10"},
      // Karras in the file, overridden.
      {base_checkpoint(), video, 720, 1280, own(), kKarras, "--scheduler checkpoint asks"},
      {base_checkpoint(), image, 720, 1280, own(), kKarras, "Karras sigmas from 200 to 0.147"},
      {base_checkpoint(), video, 720, 1280, karras(true), kKarras, "--karras on asks"},
      {base_checkpoint(), video, 720, 1280, karras(false), kPlain10, "--karras off leaves"},
      {base_checkpoint(), image, 720, 1280, karras(false), kPlain3, "--karras off leaves"},
      {base_checkpoint(), video, 720, 1280, shift(1), kPlain1, "--flow-shift asks"},
      {base_checkpoint(), video, 720, 1280, shift(3), kPlain3, "--flow-shift asks"},
      {base_checkpoint(), video, 256, 256, shift(5), kPlain5, "--flow-shift asks"},
      {base_checkpoint(), image, 256, 256, shift(10), kPlain10, "--flow-shift asks"},
      {base_checkpoint(),
       action,
       256,
       256,
       {.flow_shift = 5, .karras = false},
       kPlain5,
       "--flow-shift"},
      // A file without Karras is obeyed whatever the mode and size.
      {flow_checkpoint(3), video, 720, 1280, {}, kPlain3, "shift 3: the checkpoint's own"},
      {flow_checkpoint(1), video, 720, 1280, {}, kPlain1, "the checkpoint's own"},
      {flow_checkpoint(5), image, 256, 256, {}, kPlain5, "the checkpoint's own"},
      {flow_checkpoint(10), action, 256, 256, {}, kPlain10, "the checkpoint's own"},
      {flow_checkpoint(3), transfer, 720, 1280, {}, kPlain3, "the checkpoint's own"},
      {flow_checkpoint(3), video, 720, 1280, karras(false), kPlain3, "the checkpoint's own"},
      {flow_checkpoint(3), video, 720, 1280, own(), kPlain3, "--scheduler checkpoint"},
      {flow_checkpoint(3), video, 720, 1280, shift(10), kPlain10, "--flow-shift asks"},
      // The native grid stays with every shift, but not in transfer.
      {edge_checkpoint(), video, 480, 832, {}, kNative3, "native flow grid, shift 3"},
      {edge_checkpoint(), image, 640, 640, {}, kNative3, "the checkpoint's own"},
      {edge_checkpoint(), video, 480, 832, shift(10), kNative10, "native flow grid, shift 10"},
      {edge_checkpoint(), transfer, 480, 832, {}, kPlain3, "transfer runs on the plain grid"},
  };
  for (const Row& row : rows) {
    const SchedulerChoice choice =
        choose_scheduler(row.checkpoint, row.mode, row.height, row.width, row.overrides);
    SCOPED_TRACE(choice.reason);
    const std::vector<float> sigmas = make_schedule(choice.config, 35).sigmas;
    EXPECT_EQ(std::vector<float>(sigmas.begin(), sigmas.begin() + 3), row.want.first);
    EXPECT_EQ(std::vector<float>(sigmas.end() - 4, sigmas.end() - 1), row.want.last);
    EXPECT_NE(choice.reason.find(row.reason), std::string::npos);
  }
}

TEST(SchedulerChoice, KarrasOnWithoutARangeSaysWhereItComesFrom) {
  const auto choice =
      choose_scheduler(flow_checkpoint(3), SamplingMode::video, 720, 1280, karras(true));
  EXPECT_TRUE(choice.config.use_karras_sigmas);
  EXPECT_NE(choice.reason.find("the training schedule's"), std::string::npos) << choice.reason;
}

TEST(SchedulerChoice, DistilledCheckpointsAreObeyed) {
  for (const SchedulerOverrides& overrides : {SchedulerOverrides{}, own()}) {
    const auto choice =
        choose_scheduler(distilled_checkpoint(), SamplingMode::video, 720, 1280, overrides);
    EXPECT_EQ(choice.config.kind, SchedulerConfig::Kind::flow_match_euler);
    EXPECT_EQ(choice.config.flow_shift, 1);
    EXPECT_NE(choice.reason.find("flow-match Euler, shift 1, stochastic"), std::string::npos);
  }
}

TEST(SchedulerChoice, RefusesContradictions) {
  const auto message = [](const SchedulerConfig& checkpoint, const SchedulerOverrides& overrides) {
    try {
      choose_scheduler(checkpoint, SamplingMode::video, 720, 1280, overrides);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
      return std::string(error.what());
    }
    return std::string("no error");
  };
  const auto has = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  has(message(base_checkpoint(), {.flow_shift = 5, .karras = true}), "--flow-shift 5");
  has(message(base_checkpoint(), {.flow_shift = 5, .karras = {}, .checkpoint = true}),
      "--scheduler checkpoint");
  has(message(base_checkpoint(), {.flow_shift = {}, .karras = false, .checkpoint = true}),
      "--scheduler checkpoint");
  has(message(base_checkpoint(), shift(0)), "--flow-shift is 0");
  has(message(base_checkpoint(), shift(std::nan(""))), "--flow-shift is nan");
  // B24: the sigmas of a distilled checkpoint are part of it.
  has(message(distilled_checkpoint(), shift(10)), "--flow-shift cannot be used");
  has(message(distilled_checkpoint(), karras(true)), "--karras cannot be used");
}

}  // namespace
}  // namespace orrery
