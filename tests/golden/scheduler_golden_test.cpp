// Sigma grids and trajectories of the reference, and the whole Solver on the CPU backend.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "cpu/cpu_backend.h"
#include "golden/golden.h"
#include "model/scheduler.h"

namespace orrery {
namespace {

// The stored configs lack the class name that a checkpoint's file has.
SchedulerConfig config_of(const Json& stored) {
  Json config = stored;
  config.set("_class_name", stored.has("solver_order") ? "UniPCMultistepScheduler"
                                                       : "FlowMatchEulerDiscreteScheduler");
  return SchedulerConfig::from_json(config);
}

std::vector<double> numbers(const Json& list) {
  std::vector<double> values;
  for (const Json& item : list.items()) values.push_back(item.as_double());
  return values;
}

struct Case {
  std::string name;
  SchedulerConfig config;
  Schedule schedule;
  const Json* json;
};

// Of both golden sets.
class GoldenScheduler : public testing::TestWithParam<std::filesystem::path> {
 protected:
  void SetUp() override {
    json_ = Json::load(GetParam() / "case.json");
    for (const auto& [name, item] : json_.at("cases").members()) {
      const Json& custom = item.at("custom_sigmas");
      const SchedulerConfig config = config_of(item.at("config"));
      cases_.push_back({name, config,
                        make_schedule(config, int(item.at("steps").as_int()),
                                      custom.is_null() ? std::vector<double>{} : numbers(custom)),
                        &item});
    }
  }

  Json json_;
  std::vector<Case> cases_;
};

TEST_P(GoldenScheduler, SigmasAndTimesteps) {
  for (const Case& c : cases_) {
    SCOPED_TRACE(c.name);
    const auto sigmas = numbers(c.json->at("sigmas"));
    const auto timesteps = numbers(c.json->at("timesteps"));
    ASSERT_EQ(c.schedule.sigmas.size(), sigmas.size());
    ASSERT_EQ(c.schedule.timesteps.size(), timesteps.size());
    for (size_t i = 0; i < sigmas.size(); ++i) {
      // fp64 grids rounded once; 1 ulp where powers or fp32 sums of another library differ.
      EXPECT_NEAR(double(c.schedule.sigmas[i]), sigmas[i], std::abs(sigmas[i]) * 0x1p-23) << i;
    }
    for (size_t i = 0; i < timesteps.size(); ++i) {
      if (c.config.kind == SchedulerConfig::Kind::unipc) {
        EXPECT_EQ(double(c.schedule.timesteps[i]), timesteps[i]) << i;
      } else {
        EXPECT_NEAR(double(c.schedule.timesteps[i]), timesteps[i], timesteps[i] * 0x1p-22) << i;
      }
    }
  }
}

// The grid that use_native_flow_schedule asks for is the explicit list the reference was given.
TEST_P(GoldenScheduler, NativeGrid) {
  int found = 0;
  for (const Case& c : cases_) {
    if (c.name.find("native") == std::string::npos) continue;
    SCOPED_TRACE(c.name);
    SchedulerConfig config = c.config;
    config.native_schedule = true;
    const Schedule schedule = make_schedule(config, c.schedule.num_steps());
    EXPECT_EQ(schedule.sigmas, c.schedule.sigmas);
    EXPECT_EQ(schedule.timesteps, c.schedule.timesteps);
    ++found;
  }
  if (found == 0) GTEST_SKIP() << "no case on the native grid";
}

// The velocity field of the cases whose velocities are not stored.
std::vector<float> velocity_at(const std::vector<float>& x, int i, int64_t row) {
  std::vector<float> v(x.size());
  for (size_t k = 0; k < x.size(); ++k) {
    const size_t flipped = k / size_t(row) * size_t(row) + size_t(row) - 1 - k % size_t(row);
    v[k] = float(0.7 * std::tanh(double(x[k])) + 0.3 * std::sin(1.7 * i + 0.3) +
                 0.05 * double(x[flipped]));
  }
  return v;
}

TEST_P(GoldenScheduler, Trajectories) {
  const golden::Tensors tensors(GetParam() / "tensors.safetensors");
  const auto backend = cpu::make_cpu_backend();
  const Shape shape = tensors.shape("x_init");
  const int64_t row = shape[shape.rank() - 1];
  for (const Case& c : cases_) {
    SCOPED_TRACE(c.name);
    ASSERT_FALSE(c.config.stochastic_sampling) << "the area stores no noise";
    std::vector<float> x = tensors.floats("x_init");
    const size_t n = x.size();
    const MutView sample = make_mut_view(x.data(), shape, DType::f32);
    Solver solver(*backend, c.config, c.schedule, shape);
    const bool whole = tensors.has(c.name + ".samples");
    const auto samples = tensors.floats(c.name + (whole ? ".samples" : ".last"));
    const auto velocities = whole ? tensors.floats(c.name + ".velocity") : std::vector<float>{};
    for (int i = 0; i < c.schedule.num_steps(); ++i) {
      const std::vector<float> v =
          whole ? std::vector<float>(velocities.begin() + ptrdiff_t(size_t(i) * n),
                                     velocities.begin() + ptrdiff_t(size_t(i + 1) * n))
                : velocity_at(x, i, row);
      solver.step(i, sample, make_view(v.data(), shape, DType::f32));
      if (whole) {
        // Both sides carry fp32 samples; their scalars agree to 1e-7, and a wrong order, a skipped
        // corrector or an uncorrected base shows as 1e-4 and more.
        EXPECT_LT(golden::relative_error(x, std::span(samples).subspan(size_t(i) * n, n)), 2e-5)
            << "step " << i;
      }
    }
    if (!whole) {
      EXPECT_LT(golden::relative_error(x, samples), 2e-5);
    }
  }
}

std::vector<std::filesystem::path> areas() {
  std::vector<std::filesystem::path> found;
  for (const auto& set : {golden::directory(), golden::modes_directory()}) {
    if (std::filesystem::exists(set / "scheduler/case.json")) found.push_back(set / "scheduler");
  }
  return found;
}

INSTANTIATE_TEST_SUITE_P(Areas, GoldenScheduler, testing::ValuesIn(areas()));
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GoldenScheduler);

// The solver on one number: x_0 = 1 with the velocity x / 2 - 1 / 4 + sigma. The expected values
// were computed by hand from the published update rules.

std::vector<float> solve_example(Backend& backend, const SchedulerConfig& config,
                                 const Schedule& schedule, float noise_value = 0) {
  float x = 1, v = 0;
  const float noise = noise_value;
  const MutView sample = make_mut_view(&x, {1}, DType::f32);
  Solver solver(backend, config, schedule, {1});
  std::vector<float> trace;
  for (int i = 0; i < schedule.num_steps(); ++i) {
    v = 0.5f * x - 0.25f + schedule.sigmas[size_t(i)];
    solver.step(i, sample, make_view(&v, {1}, DType::f32),
                solver.needs_noise() ? make_view(&noise, {1}, DType::f32) : View{});
    trace.push_back(x);
  }
  return trace;
}

void expect_close(const std::vector<float>& got, const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  // A few fp32 roundings of numbers near 1 per step.
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(double(got[i]), want[i], 1e-6) << i;
}

TEST(SolverOnCpu, UnipcExample) {
  const auto backend = cpu::make_cpu_backend();
  SchedulerConfig config;
  config.flow_shift = 10;
  expect_close(solve_example(*backend, config, make_schedule(config, 4)),
               {0.959730762, 0.890563784, 0.745616013, 0.058254672});
  EXPECT_NEAR(solve_example(*backend, config, make_schedule(config, 35)).back(), 0.418415366, 1e-6);
}

// An order whose combinations have more terms than one lincomb takes.
TEST(SolverOnCpu, HighOrderMatchesFp64) {
  const auto backend = cpu::make_cpu_backend();
  SchedulerConfig config;
  config.solver_order = 9;
  const Schedule schedule = make_schedule(config, 24);
  std::vector<double> predictions;
  double x = 1, last = 0;
  std::vector<double> want;
  for (const UnipcStep& step : unipc_steps(schedule.sigmas, config.solver_order)) {
    const size_t i = predictions.size();
    predictions.push_back(x - step.sigma * (0.5 * x - 0.25 + step.sigma));
    const auto apply = [&](const std::vector<double>& factors, double first) {
      double sum = factors[0] * first;
      for (size_t k = 1; k < factors.size(); ++k) sum += factors[k] * predictions[i + 1 - k];
      return sum;
    };
    last = step.corrector.empty() ? x : apply(step.corrector, last);
    x = step.predictor.empty() ? predictions[i] : apply(step.predictor, last);
    want.push_back(x);
  }
  const std::vector<float> got = solve_example(*backend, config, schedule);
  ASSERT_EQ(got.size(), want.size());
  // Factors of order 9 reach a few hundred and alternate in sign, which multiplies fp32 roundings.
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(double(got[i]), want[i], 2e-3) << i;
}

TEST(SolverOnCpu, DistilledExample) {
  const auto backend = cpu::make_cpu_backend();
  SchedulerConfig config;
  config.kind = SchedulerConfig::Kind::flow_match_euler;
  config.stochastic_sampling = true;
  const Schedule schedule = make_schedule(config, 4, {1.0, 0.9375, 0.8333333333333334, 0.625});
  expect_close(solve_example(*backend, config, schedule),
               {-0.015625000, -0.108805339, -0.206092834, -0.376063824});
  // B19: the noise is the caller's, so the same noise gives the same bits and other noise does not;
  // it does not reach the last result directly, where its factor is 0.
  EXPECT_EQ(solve_example(*backend, config, schedule, 0.5f),
            solve_example(*backend, config, schedule, 0.5f));
  EXPECT_NEAR(double(solve_example(*backend, config, schedule, 0.5f)[0]), -0.015625 + 0.9375 * 0.5,
              1e-6);
}

TEST(SolverOnCpu, ResetStartsOver) {
  const auto backend = cpu::make_cpu_backend();
  SchedulerConfig config;
  const Schedule schedule = make_schedule(config, 3);
  Solver solver(*backend, config, schedule, {1});
  std::vector<float> results;
  for (int run = 0; run < 2; ++run) {
    float x = 1;
    for (int i = 0; i < 3; ++i) {
      const float v = x + float(i);
      solver.step(i, make_mut_view(&x, {1}, DType::f32), make_view(&v, {1}, DType::f32));
    }
    results.push_back(x);
    solver.reset();
  }
  EXPECT_EQ(results[0], results[1]);
}

}  // namespace
}  // namespace orrery
