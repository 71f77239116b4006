#include "model/scheduler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "backend/dry_run.h"
#include "base/error.h"

namespace orrery {
namespace {

SchedulerConfig plain(double shift) {
  SchedulerConfig config;
  config.flow_shift = shift;
  return config;
}

SchedulerConfig native(double shift) {
  SchedulerConfig config = plain(shift);
  config.native_schedule = true;
  return config;
}

SchedulerConfig karras(double largest = 200, double smallest = 0.147) {
  SchedulerConfig config;
  config.use_karras_sigmas = true;
  config.sigma_max = largest;
  config.sigma_min = smallest;
  return config;
}

// --- grids ---------------------------------------------------------------------------------------

struct Table {
  SchedulerConfig config;
  std::vector<float> sigmas;
  std::vector<float> timesteps;
};

// Sigmas of the reference, rounded to fp32 and printed with nine digits: each names one float.
const std::vector<Table> kTables = {
    {plain(10), {0.999998987f, 0.96778357f, 0.909256041f, 0.769939363f, 0}, {999, 967, 909, 769}},
    {plain(1), {0.999998987f, 0.750249982f, 0.500500023f, 0.250750005f, 0}, {999, 750, 500, 250}},
    {plain(5), {0.999998987f, 0.937578082f, 0.833610952f, 0.625936091f, 0}, {999, 937, 833, 625}},
    {karras(), {0.99502486f, 0.973633111f, 0.798596919f, 0.128160417f, 0}, {995, 973, 798, 128}},
    {native(10), {0.999899924f, 0.967616975f, 0.908925474f, 0.768993914f, 0}, {999, 967, 908, 768}},
    {native(3), {0.999666452f, 0.899639785f, 0.749624789f, 0.499666542f, 0}, {999, 899, 749, 499}},
    {plain(10),
     {0.999998987f, 0.997070432f, 0.993982255f, 0.99072212f,  0.987275362f, 0.983625352f,
      0.979753673f, 0.975639522f, 0.971259236f, 0.966586292f, 0.96159023f,  0.956236362f,
      0.950484931f, 0.944289804f, 0.937597573f, 0.930346072f, 0.922461987f, 0.913858771f,
      0.904433429f, 0.894062102f, 0.882594883f, 0.86984843f,  0.855596006f, 0.839553952f,
      0.821362555f, 0.800558984f, 0.776537001f, 0.748487055f, 0.715303481f, 0.675434947f,
      0.626635134f, 0.56552422f,  0.486771137f, 0.381447375f, 0.233376965f, 0},
     {999, 997, 993, 990, 987, 983, 979, 975, 971, 966, 961, 956, 950, 944, 937, 930, 922, 913,
      904, 894, 882, 869, 855, 839, 821, 800, 776, 748, 715, 675, 626, 565, 486, 381, 233}},
    {plain(1),
     {0.999998987f, 0.971457124f, 0.942914307f,  0.914371431f,  0.885828555f,  0.857285738f,
      0.828742862f, 0.800199986f, 0.771657169f,  0.743114293f,  0.714571416f,  0.6860286f,
      0.657485723f, 0.628942847f, 0.600399971f,  0.571857154f,  0.543314278f,  0.514771402f,
      0.486228585f, 0.457685709f, 0.429142863f,  0.400599986f,  0.37205714f,   0.343514293f,
      0.314971417f, 0.286428571f, 0.257885724f,  0.229342863f,  0.200800002f,  0.17225714f,
      0.143714279f, 0.115171425f, 0.0866285712f, 0.0580857135f, 0.0295428578f, 0},
     {999, 971, 942, 914, 885, 857, 828, 800, 771, 743, 714, 686, 657, 628, 600, 571, 543, 514,
      486, 457, 429, 400, 372, 343, 314, 286, 257, 229, 200, 172, 143, 115, 86,  58,  29}},
    {karras(),
     {0.99502486f,  0.994317174f, 0.993492663f, 0.992529333f, 0.991400719f, 0.990074456f,
      0.988511324f, 0.986663461f, 0.984472215f, 0.981865644f, 0.978755414f, 0.975032568f,
      0.970562875f, 0.965180814f, 0.95868212f,  0.950815618f, 0.941273212f, 0.929679334f,
      0.915580809f, 0.898438096f, 0.877622306f, 0.852422774f, 0.822072983f, 0.785805225f,
      0.742945075f, 0.693052411f, 0.636104643f, 0.572694063f, 0.504181385f, 0.432725251f,
      0.361116797f, 0.292408645f, 0.229421496f, 0.174284503f, 0.128160417f, 0},
     {995, 994, 993, 992, 991, 990, 988, 986, 984, 981, 978, 975, 970, 965, 958, 950, 941, 929,
      915, 898, 877, 852, 822, 785, 742, 693, 636, 572, 504, 432, 361, 292, 229, 174, 128}},
    {plain(5),
     {0.999998987f, 0.99415803f,  0.988036513f, 0.981614828f, 0.974870443f, 0.967778325f,
      0.960310936f, 0.952437639f, 0.944124401f, 0.935333312f, 0.926021934f, 0.916142642f,
      0.905641973f, 0.894459248f, 0.882525861f, 0.869763613f, 0.856082976f, 0.841381192f,
      0.82553941f,  0.808419824f, 0.789861143f, 0.769674122f, 0.74763459f,  0.723475158f,
      0.696874678f, 0.667443395f, 0.634704113f, 0.598065794f, 0.556787908f, 0.509929657f,
      0.456277221f, 0.394237548f, 0.321677148f, 0.235671893f, 0.132103428f, 0},
     {999, 994, 988, 981, 974, 967, 960, 952, 944, 935, 926, 916, 905, 894, 882, 869, 856, 841,
      825, 808, 789, 769, 747, 723, 696, 667, 634, 598, 556, 509, 456, 394, 321, 235, 132}},
    {plain(3),
     {0.999998987f, 0.990301132f, 0.980218589f, 0.969729125f, 0.958807528f,  0.947426558f,
      0.93555671f,  0.923165679f, 0.910218358f, 0.89667654f,  0.882498264f,  0.867637515f,
      0.852043867f, 0.835661709f, 0.818429649f, 0.800279915f, 0.781137049f,  0.760917306f,
      0.739527225f, 0.716862082f, 0.692804456f, 0.667221844f, 0.63996464f,   0.610862732f,
      0.579722345f, 0.546321511f, 0.510404885f, 0.471677035f, 0.42979452f,   0.384355485f,
      0.334886819f, 0.280827641f, 0.221507892f, 0.156120405f, 0.0836840421f, 0},
     {999, 990, 980, 969, 958, 947, 935, 923, 910, 896, 882, 867, 852, 835, 818, 800, 781, 760,
      739, 716, 692, 667, 639, 610, 579, 546, 510, 471, 429, 384, 334, 280, 221, 156, 83}},
    {native(10),
     {0.999899924f, 0.996964991f, 0.993871033f, 0.990604639f, 0.987151027f, 0.983493567f,
      0.979613781f, 0.975490689f, 0.971100628f, 0.966416895f, 0.961408913f, 0.956041873f,
      0.95027566f,  0.944064081f, 0.937353373f, 0.93008101f,  0.922173262f, 0.913543105f,
      0.904086828f, 0.893679857f, 0.882171154f, 0.869376004f, 0.855066061f, 0.838955283f,
      0.820680976f, 0.799775839f, 0.775627792f, 0.747418821f, 0.714030445f, 0.673892021f,
      0.624726415f, 0.563102424f, 0.483597696f, 0.3771092f,   0.227091908f, 0},
     {999, 996, 993, 990, 987, 983, 979, 975, 971, 966, 961, 956, 950, 944, 937, 930, 922, 913,
      904, 893, 882, 869, 855, 838, 820, 799, 775, 747, 714, 673, 624, 563, 483, 377, 227}},
    {native(3),
     {0.999666452f, 0.989954531f, 0.9798581f,   0.969353914f, 0.9584167f,    0.94701916f,
      0.935131609f, 0.922721684f, 0.909754217f, 0.896190822f, 0.881989419f,  0.867103875f,
      0.851483583f, 0.835072696f, 0.817809701f, 0.79962647f,  0.780447364f,  0.760188282f,
      0.738755345f, 0.716043472f, 0.691934764f, 0.666296124f, 0.638977289f,  0.609807372f,
      0.578591764f, 0.545107305f, 0.509097457f, 0.47026518f,  0.428265214f,  0.38269344f,
      0.333074003f, 0.278842568f, 0.219324782f, 0.153708071f, 0.0810043812f, 0},
     {999, 989, 979, 969, 958, 947, 935, 922, 909, 896, 881, 867, 851, 835, 817, 799, 780, 760,
      738, 716, 691, 666, 638, 609, 578, 545, 509, 470, 428, 382, 333, 278, 219, 153, 81}},
    {plain(3),
     {0.999998987f, 0.993250072f,  0.986315429f,
      0.979188383f, 0.971860766f,  0.964323997f,
      0.956569016f, 0.948586166f,  0.940365314f,
      0.931895673f, 0.923165679f,  0.914163172f,
      0.904875278f, 0.89528811f,   0.885386944f,
      0.875156224f, 0.864579082f,  0.853637755f,
      0.842312932f, 0.830584288f,  0.818429649f,
      0.805825531f, 0.792746425f,  0.77916497f,
      0.765051723f, 0.750374794f,  0.735099733f,
      0.719189227f, 0.702602684f,  0.685296237f,
      0.667221844f, 0.648327291f,  0.628555477f,
      0.607843816f, 0.586123705f,  0.563319623f,
      0.539348304f, 0.514117837f,  0.487526327f,
      0.459460586f, 0.42979452f,   0.398387253f,
      0.365080804f, 0.329697579f,  0.2920371f,
      0.251872182f, 0.20894444f,   0.162958607f,
      0.113575868f, 0.0604053885f, 0},
     {999, 993, 986, 979, 971, 964, 956, 948, 940, 931, 923, 914, 904, 895, 885, 875, 864,
      853, 842, 830, 818, 805, 792, 779, 765, 750, 735, 719, 702, 685, 667, 648, 628, 607,
      586, 563, 539, 514, 487, 459, 429, 398, 365, 329, 292, 251, 208, 162, 113, 60}},
    {plain(12),
     {0.999998987f, 0.995637774f, 0.990835786f,
      0.985524058f, 0.979616821f, 0.973008037f,
      0.965564787f, 0.957118392f, 0.947451472f,
      0.93627876f,  0.923218787f, 0.907749236f,
      0.88913548f,  0.866310477f, 0.837662816f,
      0.800638616f, 0.750934958f, 0.680692673f,
      0.573866069f, 0.39181006f,  0},
     {999, 995, 990, 985, 979, 973, 965, 957, 947, 936,
      923, 907, 889, 866, 837, 800, 750, 680, 573, 391}},
    {karras(),
     {0.99502486f,  0.994545341f, 0.994012475f,
      0.993419528f, 0.992758989f, 0.992021978f,
      0.991198599f, 0.99027741f,  0.989245296f,
      0.988087177f, 0.986785829f, 0.985321283f,
      0.983670712f, 0.98180753f,  0.97970134f,
      0.977316856f, 0.97461319f,  0.971543252f,
      0.968052447f, 0.964077592f, 0.959545851f,
      0.954372823f, 0.948461413f, 0.941700041f,
      0.933960676f, 0.925097346f, 0.914944708f,
      0.903316736f, 0.890006542f, 0.874787211f,
      0.857414246f, 0.837630808f, 0.815176129f,
      0.789798021f, 0.761270761f, 0.729418159f,
      0.694141984f, 0.655453801f, 0.613507569f,
      0.568627894f, 0.521327615f, 0.472307712f,
      0.42243427f,  0.372690618f, 0.324107587f,
      0.27768141f,  0.234291986f, 0.194635347f,
      0.159181297f, 0.128160417f, 0},
     {995, 994, 994, 993, 992, 992, 991, 990, 989, 988, 986, 985, 983, 981, 979, 977, 974,
      971, 968, 964, 959, 954, 948, 941, 933, 925, 914, 903, 890, 874, 857, 837, 815, 789,
      761, 729, 694, 655, 613, 568, 521, 472, 422, 372, 324, 277, 234, 194, 159, 128}},
};

TEST(Schedule, EqualsTheReferenceTables) {
  for (const Table& table : kTables) {
    const Schedule schedule = make_schedule(table.config, static_cast<int>(table.timesteps.size()));
    SCOPED_TRACE(testing::Message() << "shift " << table.config.flow_shift << ", "
                                    << schedule.num_steps() << " steps");
    EXPECT_EQ(schedule.sigmas, table.sigmas);
    EXPECT_EQ(schedule.timesteps, table.timesteps);
  }
}

// B17: the network is fed the whole-number timestep, neither sigma nor 1000 sigma.
TEST(Schedule, TimestepsAreTruncated) {
  const Schedule schedule = make_schedule(native(10), 35);
  EXPECT_EQ(schedule.timesteps[2], 993);                      // 993.871
  EXPECT_EQ(make_schedule(native(10), 4).timesteps[2], 908);  // 908.925
}

TEST(Schedule, KarrasRangeComesFromTheTrainingScheduleWhenUnset) {
  SchedulerConfig config;
  config.use_karras_sigmas = true;
  const Schedule schedule = make_schedule(config, 10);
  EXPECT_EQ(schedule.sigmas.front(), 0.993687153f);
  EXPECT_EQ(schedule.sigmas[9], 0.00990229379f);
  config.sigma_max = 200;
  EXPECT_EQ(make_schedule(config, 10).sigmas[0], 0.99502486f);
  EXPECT_EQ(make_schedule(config, 10).sigmas[9], 0.00990229379f);
  config.flow_shift = 10;
  EXPECT_EQ(make_schedule(config, 10).sigmas[0], 0.99502486f);
}

TEST(Schedule, OneKarrasStepStartsAtTheLargestSigma) {
  EXPECT_EQ(make_schedule(karras(), 1).sigmas, (std::vector<float>{0.99502486f, 0}));
}

TEST(Schedule, LastSigmaIsRepeatedOnRequest) {
  SchedulerConfig config = plain(3);
  config.final_sigma_zero = false;
  const Schedule schedule = make_schedule(config, 4);
  EXPECT_EQ(schedule.sigmas[4], schedule.sigmas[3]);
}

TEST(Schedule, FlowMatchEulerWithFixedSigmas) {
  SchedulerConfig config;
  config.kind = SchedulerConfig::Kind::flow_match_euler;
  const Schedule schedule = make_schedule(config, 4, {1.0, 0.9375, 0.8333333333333334, 0.625});
  EXPECT_EQ(schedule.sigmas, (std::vector<float>{1, 0.9375f, 0.833333333f, 0.625f, 0}));
  // Not truncated.
  EXPECT_EQ(schedule.timesteps, (std::vector<float>{1000, 937.5f, 833.333333f, 625}));
  // The released list is the uniform grid shifted by 5.
  config.flow_shift = 5;
  EXPECT_NEAR(make_schedule(config, 4, {1, 0.75, 0.5, 0.25}).sigmas[1], 0.9375f, 1e-7f);
}

TEST(Schedule, FlowMatchEulerShiftsItsLowEndTwice) {
  SchedulerConfig config;
  config.kind = SchedulerConfig::Kind::flow_match_euler;
  config.flow_shift = 3;
  EXPECT_EQ(make_schedule(config, 8).sigmas[7], 0.00892857183f);
  EXPECT_EQ(make_schedule(config, 1).sigmas, (std::vector<float>{1, 0}));
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void expect_refusal(const std::function<void()>& call, const std::vector<std::string>& words) {
  const std::string message = message_of(call);
  for (const std::string& word : words) {
    EXPECT_NE(message.find(word), std::string::npos) << word << " in: " << message;
  }
}

TEST(Schedule, RefusesWhatHasNoGrid) {
  expect_refusal([] { make_schedule(plain(3), 0); }, {"number of steps is 0"});
  expect_refusal([] { make_schedule(plain(NAN), 4); }, {"flow shift is nan"});
  expect_refusal([] { make_schedule(plain(-1), 4); }, {"flow shift is -1"});
  expect_refusal(
      [] {
        make_schedule(plain(1), 3, {0.9, 0.5});
      },
      {"number of steps is 3", "2 sigmas"});
  expect_refusal(
      [] {
        make_schedule(plain(1), 2, {0.5, 0.9});
      },
      {"sigma 1 of 2 steps", "must fall"});
  expect_refusal([] { make_schedule(plain(1), 1, {1.5}); }, {"1.5", "between 0 and 1"});
  expect_refusal([] { make_schedule(karras(), 2, {0.9, 0.5}); }, {"Karras"});
  // So large that sigma rounds to 1, where log(1 - sigma) is infinite.
  expect_refusal([] { make_schedule(karras(1e12, 0.1), 4); }, {"sigma 0 of 4 steps", "below 1"});
  // More steps than fp32 has sigmas between the first two.
  expect_refusal([] { make_schedule(plain(100), 1000000); }, {"must fall"});
}

// --- UniPC ---------------------------------------------------------------------------------------

// v(x, sigma) = x / 2 - 1 / 4 + sigma from x_0 = 1: a problem in one number.
double velocity_at(double x, double sigma) { return 0.5 * x - 0.25 + sigma; }

struct Trace {
  std::vector<double> prediction, corrected, sample;
  std::vector<int> orders;
};

Trace solve_in_fp64(const Schedule& schedule, int order) {
  Trace trace;
  double x = 1, last = 0;
  for (const UnipcStep& step : unipc_steps(schedule.sigmas, order)) {
    const size_t i = trace.prediction.size();
    trace.prediction.push_back(x - step.sigma * velocity_at(x, step.sigma));
    double corrected = x;
    if (!step.corrector.empty()) {
      corrected = step.corrector[0] * last;
      for (size_t k = 1; k < step.corrector.size(); ++k) {
        corrected += step.corrector[k] * trace.prediction[i + 1 - k];
      }
    }
    double next = trace.prediction[i];
    if (!step.predictor.empty()) {
      next = step.predictor[0] * corrected;
      for (size_t k = 1; k < step.predictor.size(); ++k) {
        next += step.predictor[k] * trace.prediction[i + 1 - k];
      }
    }
    trace.corrected.push_back(corrected);
    trace.sample.push_back(next);
    trace.orders.push_back(step.order);
    last = corrected;
    x = next;
  }
  return trace;
}

struct Example {
  SchedulerConfig config;
  std::vector<double> prediction, corrected, sample;
};

// fp64 arithmetic on fp32 sigmas, printed with nine decimals: half a unit of the last one.
constexpr double kPrinted = 0.6e-9;

TEST(Unipc, WorkedExamples) {
  const std::vector<Example> examples = {
      {plain(10),
       {-0.249997720, -0.199334216, -0.113744004, 0.058254672},
       {1.000000000, 0.960546836, 0.893378739},
       {0.959730762, 0.890563784, 0.745616013, 0.058254672}},
      {plain(1),
       {-0.249997720, 0.054485238, 0.254546594, 0.391513200},
       {1.000000000, 0.725836193, 0.540872450},
       {0.687813997, 0.506731401, 0.447850524, 0.391513200}},
      {karras(),
       {-0.238830687, -0.205037460, 0.021926034, 0.282614912},
       {1.000000000, 0.973729996, 0.786362462},
       {0.973366740, 0.765827639, 0.285280750, 0.282614912}},
  };
  for (const Example& example : examples) {
    const Trace trace = solve_in_fp64(make_schedule(example.config, 4), 2);
    EXPECT_EQ(trace.orders, (std::vector<int>{1, 2, 2, 1}));
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_NEAR(trace.prediction[i], example.prediction[i], kPrinted) << i;
      EXPECT_NEAR(trace.sample[i], example.sample[i], kPrinted) << i;
      // The last corrected sample has no effect and is not computed.
      if (i < 3) {
        EXPECT_NEAR(trace.corrected[i], example.corrected[i], kPrinted) << i;
      }
    }
    // The last step returns the x0 prediction exactly.
    EXPECT_EQ(trace.sample[3], trace.prediction[3]);
  }
}

TEST(Unipc, OtherStepCounts) {
  const auto final_value = [](int steps) {
    return solve_in_fp64(make_schedule(plain(10), steps), 2).sample.back();
  };
  EXPECT_NEAR(final_value(35), 0.418415366, kPrinted);
  EXPECT_NEAR(final_value(2), -0.115921333, kPrinted);
  EXPECT_NEAR(final_value(1), -0.249997720, kPrinted);
}

TEST(Unipc, OrdersRiseAndFall) {
  const auto orders = [](int steps, int order) {
    return solve_in_fp64(make_schedule(plain(5), steps), order).orders;
  };
  EXPECT_EQ(orders(1, 2), (std::vector<int>{1}));
  EXPECT_EQ(orders(2, 2), (std::vector<int>{1, 1}));
  EXPECT_EQ(orders(7, 3), (std::vector<int>{1, 2, 3, 3, 3, 2, 1}));
  EXPECT_EQ(orders(4, 1), (std::vector<int>{1, 1, 1, 1}));
}

// The general corrector at order 2 against its closed form.
TEST(Unipc, SecondOrderCorrectorHasItsClosedForm) {
  const Schedule schedule = make_schedule(plain(3), 6);
  const auto lambda = [&](size_t i) {
    const double sigma = double(schedule.sigmas[i]);
    return std::log(1 - sigma) - std::log(sigma);
  };
  const UnipcStep step = unipc_steps(schedule.sigmas, 2)[3];
  const double h = lambda(3) - lambda(2), r = (lambda(1) - lambda(2)) / h;
  const double e = std::expm1(-h), alpha = 1 - double(schedule.sigmas[3]);
  const double p1 = e / -h - 1, p2 = p1 / -h - 0.5;
  const double b1 = p1 / e, b2 = 2 * p2 / e;
  const double rho0 = (b1 - b2) / (1 - r), rho1 = b1 - rho0;
  ASSERT_EQ(step.corrector.size(), 4u);
  EXPECT_NEAR(step.corrector[0], double(schedule.sigmas[3]) / double(schedule.sigmas[2]), 1e-15);
  EXPECT_NEAR(step.corrector[1], -alpha * e * rho1, 1e-12);
  EXPECT_NEAR(step.corrector[2], -alpha * e * (1 - rho0 / r - rho1), 1e-12);
  EXPECT_NEAR(step.corrector[3], -alpha * e * rho0 / r, 1e-12);
}

// A constant x0 prediction is followed exactly by every order: x_sigma = (1 - sigma) m + sigma eps.
TEST(Unipc, EveryOrderKeepsAConstantPrediction) {
  const std::vector<float> sigmas = make_schedule(plain(5), 20).sigmas;
  const auto expect_exact = [&](const std::vector<double>& factors, size_t from) {
    const double sigma = double(sigmas[from]), next = double(sigmas[from + 1]);
    EXPECT_NEAR(factors[0], next / sigma, 1e-15);
    double sum = 0;
    for (size_t k = 1; k < factors.size(); ++k) sum += factors[k];
    EXPECT_NEAR(sum, (1 - next) - (1 - sigma) * next / sigma, 1e-9) << "from " << from;
  };
  for (const int order : {1, 2, 3, 4, 6}) {
    const std::vector<UnipcStep> steps = unipc_steps(sigmas, order);
    for (size_t i = 0; i + 1 < steps.size(); ++i) {
      EXPECT_EQ(steps[i].predictor.size(), size_t(steps[i].order) + 1);
      expect_exact(steps[i].predictor, i);
      if (i == 0) continue;
      EXPECT_EQ(steps[i].corrector.size(), size_t(steps[i - 1].order) + 2);
      expect_exact(steps[i].corrector, i - 1);
    }
  }
}

// B22: no logarithm of 0 or division by an empty interval, whatever the order and the last sigma.
TEST(Unipc, FiniteWhereTheLastSigmaIsTiny) {
  for (const int order : {1, 2, 3, 5}) {
    for (const int steps : {1, 2, 3, 5, 12}) {
      std::vector<SchedulerConfig> configs = {plain(10), native(3), karras(), karras(200, 0),
                                              karras(200, 1e-8)};
      for (SchedulerConfig& config : configs) {
        for (const bool zero : {true, false}) {
          if (!zero && config.sigma_min == 0.0) continue;
          config.final_sigma_zero = zero;
          const Trace trace = solve_in_fp64(make_schedule(config, steps), order);
          for (const double value : trace.sample) {
            EXPECT_TRUE(std::isfinite(value)) << order << ' ' << steps;
          }
          if (zero) {
            EXPECT_EQ(trace.sample.back(), trace.prediction.back());
          }
          // Low orders stay near the solution; higher ones overshoot on so few, so long intervals.
          if (order <= 2) {
            EXPECT_LT(std::abs(trace.sample.back()), 1.5) << order << ' ' << steps;
          }
        }
      }
    }
  }
}

// --- configuration -------------------------------------------------------------------------------

Json config_json(const std::vector<std::pair<std::string, Json>>& changes = {}) {
  Json json = Json::parse(R"({"_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction", "use_flow_sigmas": true, "flow_shift": 3.0,
    "use_karras_sigmas": true, "sigma_max": 200, "sigma_min": 0.147, "solver_order": 2,
    "disable_corrector": [], "solver_p": null, "shift_terminal": null, "unheard_of": 7})",
                          "scheduler_config.json");
  for (const auto& [key, value] : changes) json.set(key, value);
  return json;
}

TEST(SchedulerConfig, ReadsUnipc) {
  const SchedulerConfig config = SchedulerConfig::from_json(config_json());
  EXPECT_EQ(config.kind, SchedulerConfig::Kind::unipc);
  EXPECT_TRUE(config.use_karras_sigmas);
  EXPECT_EQ(config.flow_shift, 3);
  EXPECT_EQ(config.sigma_max, 200);
  EXPECT_EQ(config.sigma_min, 0.147);
  EXPECT_TRUE(config.final_sigma_zero);
  EXPECT_FALSE(config.native_schedule);
}

TEST(SchedulerConfig, AbsentAndNullKeysTakeDefaults) {
  const SchedulerConfig config = SchedulerConfig::from_json(
      config_json({{"use_karras_sigmas", Json()}, {"sigma_max", Json()}, {"flow_shift", Json()}}));
  EXPECT_FALSE(config.use_karras_sigmas);
  EXPECT_FALSE(config.sigma_max.has_value());
  EXPECT_EQ(config.flow_shift, 1);
  EXPECT_EQ(config.num_train_timesteps, 1000);
}

TEST(SchedulerConfig, EdgeClassNamesMeanTheNativeGrid) {
  const auto config =
      SchedulerConfig::from_json(config_json({{"_class_name", "Cosmos3EdgeUniPCScheduler"}}));
  EXPECT_EQ(config.kind, SchedulerConfig::Kind::unipc);
  EXPECT_TRUE(config.native_schedule);
}

TEST(SchedulerConfig, ReadsTheDistilledSampler) {
  const Json json = Json::parse(R"({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 1.0,
    "stochastic_sampling": true, "fixed_step_requires_explicit_sigmas": true,
    "fixed_step_sampler_config": {"t_list": [1.0, 0.9375, 0.8333333333333334, 0.625],
                                  "sample_type": "sde"}})",
                                "scheduler_config.json");
  const SchedulerConfig config = SchedulerConfig::from_json(json);
  EXPECT_EQ(config.kind, SchedulerConfig::Kind::flow_match_euler);
  EXPECT_TRUE(config.stochastic_sampling);
  EXPECT_EQ(config.fixed_sigmas, (std::vector<double>{1.0, 0.9375, 0.8333333333333334, 0.625}));
}

TEST(SchedulerConfig, RefusesByName) {
  const std::vector<std::pair<std::string, Json>> faults = {
      {"thresholding", true},
      {"predict_x0", false},
      {"use_beta_sigmas", true},
      {"use_exponential_sigmas", true},
      {"use_dynamic_shifting", true},
      {"lower_order_final", false},
      {"solver_type", "bh1"},
      {"prediction_type", "epsilon"},
      {"prediction_type", Json()},
      {"use_flow_sigmas", false},
      {"use_flow_sigmas", Json()},
      {"shift_terminal", 0.1},
      {"solver_p", "other"},
      {"disable_corrector", Json::array({Json(0)})},
      {"beta_schedule", "scaled_linear"},
      {"final_sigmas_type", "one"},
      {"solver_order", 0},
      {"solver_order", 17},
      {"solver_order", 2.5},
      {"flow_shift", 0},
      {"flow_shift", "3"},
      {"sigma_min", -1},
      {"num_train_timesteps", 0},
      {"beta_end", 1.5},
      {"trained_betas", Json::array({Json(0.1)})},
      {"rescale_betas_zero_snr", true},
      {"use_karras_sigmas", 1},
      {"_class_name", "DDIMScheduler"},
  };
  for (const auto& [key, value] : faults) {
    // Through text, so that messages can name the file and the place.
    const Json json =
        Json::parse(config_json({{key, value}}).dump(), "scheduler/scheduler_config.json");
    expect_refusal([&] { SchedulerConfig::from_json(json); },
                   {"scheduler/scheduler_config.json", key});
  }
}

// --- solver --------------------------------------------------------------------------------------

TEST(Solver, RefusesStepsOutOfOrderAndWrongShapes) {
  DryRunBackend backend(DeviceKind::cpu);
  const Schedule schedule = make_schedule(plain(3), 3);
  Solver solver(backend, plain(3), schedule, {2, 3});
  const Tensor x = backend.allocate_tensor({2, 3}, DType::f32);
  const Tensor other = backend.allocate_tensor({3, 2}, DType::f32);
  expect_refusal([&] { solver.step(1, x.view, x.view); }, {"step 1", "0 of 3"});
  expect_refusal([&] { solver.step(0, x.view, other.view); }, {"[3, 2]", "[2, 3]"});
}

TEST(Solver, StochasticStepsNeedTheCallersNoise) {  // B19
  DryRunBackend backend(DeviceKind::cpu);
  SchedulerConfig config;
  config.kind = SchedulerConfig::Kind::flow_match_euler;
  config.stochastic_sampling = true;
  const Schedule schedule = make_schedule(config, 1, {0.5});
  Solver solver(backend, config, schedule, {4});
  EXPECT_TRUE(solver.needs_noise());
  const Tensor x = backend.allocate_tensor({4}, DType::f32);
  const Tensor v = backend.allocate_tensor({4}, DType::f32);
  // Also at the last step, whose noise has factor 0: the generator must have advanced.
  expect_refusal([&] { solver.step(0, x.view, v.view); }, {"needs noise", "[4]"});
}

// Memory: order + 1 tensors.
TEST(Solver, KeepsOneTensorPerOrderAndTheLastSample) {
  DryRunBackend backend(DeviceKind::cpu);
  const Schedule schedule = make_schedule(plain(3), 10);
  Solver solver(backend, plain(3), schedule, {1024});
  EXPECT_EQ(backend.allocated(), 3u * 4096);
}

}  // namespace
}  // namespace orrery
