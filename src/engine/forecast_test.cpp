#include "engine/forecast.h"

#include <gtest/gtest.h>

namespace orrery {
namespace {

// Two dense steps, then two sparse ones.
int layout_of(int64_t step) { return step < 2 ? 0 : 1; }

std::vector<Stage> one_chunk() {
  return {{StageKind::prompt, 0, 0, 1},  {StageKind::noise, 0, 0, 1},
          {StageKind::denoise, 0, 0, 4}, {StageKind::decode, 0, 0, 8},
          {StageKind::sound, 0, 0, 1},   {StageKind::check_frames, 0, 0, 1}};
}

StageCosts costs() {
  return {{{StageKind::prompt, 50}, {StageKind::decode, 10}, {StageKind::sound, 20}}, {100, 40}};
}

// Flops a second of every unit of the fake clock below.
constexpr double kRate = 10;

// Runs all units at kRate and collects what was forecast after each.
std::vector<std::optional<double>> drive(Forecast& forecast, const std::vector<Stage>& stages,
                                         double first_step_extra = 0) {
  const StageCosts cost = costs();
  std::vector<std::optional<double>> left;
  for (const Stage& stage : stages) {
    for (int64_t i = 0; i < stage.count; ++i) {
      double flops = 0;
      if (stage.kind == StageKind::denoise)
        flops = cost.step_flops[size_t(layout_of(i))];
      else if (cost.unit_flops.count(stage.kind) > 0)
        flops = cost.unit_flops.at(stage.kind);
      const bool first = stage.kind == StageKind::denoise && i == 0;
      forecast.finished(stage.kind, i, flops / kRate + (first ? first_step_extra : 0));
      left.push_back(forecast.seconds_left());
    }
    forecast.finished_stage();
  }
  left.push_back(forecast.seconds_left());
  return left;
}

TEST(Forecast, CountsWhatEachRemainingUnitCosts) {
  Forecast forecast(one_chunk(), {}, layout_of);
  EXPECT_FALSE(forecast.seconds_left().has_value());
  forecast.set_costs(costs());
  EXPECT_FALSE(forecast.seconds_left().has_value());  // no unit has run
  const auto left = drive(forecast, one_chunk());
  // prompt and noise say nothing of a step; then 10 s + 2 x 4 s + 8 x 1 s + 2 s and so on.
  const std::vector<double> want{28, 18, 14, 10, 9, 8, 7, 6, 5, 4, 3, 2, 0, 0, 0};
  ASSERT_EQ(left.size(), want.size() + 2);
  EXPECT_FALSE(left[0].has_value());
  EXPECT_FALSE(left[1].has_value());
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_TRUE(left[i + 2].has_value()) << i;
    EXPECT_DOUBLE_EQ(*left[i + 2], want[i]) << i;
  }
}

// It reads the text and records graphs: the others take less.
TEST(Forecast, ForgetsTheFirstStepOnceThereIsAnother) {
  Forecast forecast(one_chunk(), {}, layout_of);
  forecast.set_costs(costs());
  const auto left = drive(forecast, one_chunk(), 90);
  EXPECT_DOUBLE_EQ(left[2].value(), 28 * 10);  // all that is known: a tenth of the rate
  EXPECT_DOUBLE_EQ(left[3].value(), 18);
}

TEST(Forecast, EarlierRequestsTellTheRates) {
  Forecast first(one_chunk(), {}, layout_of);
  first.set_costs(costs());
  drive(first, one_chunk());
  Forecast second(one_chunk(), first.rates(), layout_of);
  second.set_costs(costs());
  EXPECT_DOUBLE_EQ(second.seconds_left().value(), 5 + 20 + 8 + 8 + 2);
}

// A stage without flops counts what it took before, and nothing before that.
TEST(Forecast, LaterChunksLoadAsLongAsTheFirst) {
  const std::vector<Stage> stages{{StageKind::load, 0, 0, 1},
                                  {StageKind::denoise, 0, 0, 2},
                                  {StageKind::load, 1, 0, 1},
                                  {StageKind::denoise, 1, 0, 2}};
  Forecast forecast(stages, {{StageKind::denoise, kRate}}, layout_of);
  forecast.set_costs(costs());
  EXPECT_DOUBLE_EQ(forecast.seconds_left().value(), 40);
  forecast.finished(StageKind::load, 0, 3);
  forecast.finished_stage();
  EXPECT_DOUBLE_EQ(forecast.seconds_left().value(), 43);
}

// A stage may end early, as when a rank takes no frames.
TEST(Forecast, AStageThatIsOverCountsNoMore) {
  Forecast forecast({{StageKind::decode, 0, 0, 8}}, {{StageKind::decode, kRate}}, layout_of);
  forecast.set_costs(costs());
  forecast.finished(StageKind::decode, 0, 1);
  EXPECT_DOUBLE_EQ(forecast.seconds_left().value(), 7);
  forecast.finished_stage();
  EXPECT_DOUBLE_EQ(forecast.seconds_left().value(), 0);
}

}  // namespace
}  // namespace orrery
