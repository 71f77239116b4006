#include "model/scheduler.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "base/config_reader.h"
#include "base/error.h"

namespace orrery {
namespace {

// --- configuration ------------------------------------------------------------------------------

[[noreturn]] void refuse(const Json& value, std::string_view only) {
  fail(ErrorKind::unsupported, value.where(), " is ", value.dump(),
       ", which this sampler does not support; only ", only, " is");
}

void require_flag(ConfigReader& config, std::string_view key, bool wanted) {
  const Json* value = config.find(key);
  if (value && value->as_bool() != wanted) refuse(*value, wanted ? "true" : "false");
}

void require_null(ConfigReader& config, std::string_view key) {
  if (const Json* value = config.find(key)) refuse(*value, "null");
}

void require_text(ConfigReader& config, std::string_view key, std::string_view wanted) {
  const Json* value = config.find(key);
  if (value && value->as_string() != wanted) refuse(*value, wanted);
}

bool flag_or(ConfigReader& config, std::string_view key, bool otherwise) {
  const Json* value = config.find(key);
  return value ? value->as_bool() : otherwise;
}

double positive_or(ConfigReader& config, std::string_view key, double otherwise) {
  const Json* value = config.find(key);
  if (!value) return otherwise;
  const double number = value->as_double();
  require(number > 0 && std::isfinite(number), ErrorKind::corrupt, value->where(), " is ", number,
          "; it must be greater than 0");
  return number;
}

int64_t integer_or(ConfigReader& config, std::string_view key, int64_t otherwise, int64_t largest) {
  const Json* value = config.find(key);
  if (!value) return otherwise;
  const int64_t number = value->as_int();
  require(number >= 1 && number <= largest, ErrorKind::unsupported, value->where(), " is ", number,
          "; it must be from 1 to ", largest);
  return number;
}

void read_unipc(SchedulerConfig& out, ConfigReader& config) {
  // Of what is refused below or has no part in a grid of flow sigmas.
  config.harmless({"dynamic_thresholding_ratio", "sample_max_value", "time_shift_type",
                   "timestep_spacing", "steps_offset"});
  for (const char* key : {"thresholding", "use_exponential_sigmas", "use_beta_sigmas",
                          "use_dynamic_shifting", "rescale_betas_zero_snr"}) {
    require_flag(config, key, false);
  }
  for (const char* key : {"predict_x0", "lower_order_final"}) require_flag(config, key, true);
  for (const char* key : {"trained_betas", "solver_p", "shift_terminal"}) require_null(config, key);
  require_text(config, "solver_type", "bh2");
  require_text(config, "beta_schedule", "linear");
  if (const Json* steps = config.find("disable_corrector"); steps && !steps->items().empty()) {
    refuse(*steps, "[]");
  }
  // The defaults of these two describe another kind of model, so their absence is refused as well.
  const Json* prediction = config.find("prediction_type");
  require(prediction && prediction->as_string() == "flow_prediction", ErrorKind::unsupported,
          prediction ? prediction->where() : config.where() + ".prediction_type", " is ",
          prediction ? prediction->dump() : "missing (epsilon)",
          ", which this sampler does not support; only flow_prediction is");
  const Json* flow = config.find("use_flow_sigmas");
  require(flow && flow->as_bool(), ErrorKind::unsupported,
          flow ? flow->where() : config.where() + ".use_flow_sigmas", " is ",
          flow ? "false" : "missing (false)",
          ", which this sampler does not support; only true is");
  out.solver_order = static_cast<int>(integer_or(config, "solver_order", 2, kMaxSolverOrder));
  out.use_karras_sigmas = flag_or(config, "use_karras_sigmas", false);
  out.flow_shift = positive_or(config, "flow_shift", 1);
  if (config.find("sigma_max")) out.sigma_max = positive_or(config, "sigma_max", 0);
  if (const Json* low = config.find("sigma_min")) {
    out.sigma_min = low->as_double();
    require(*out.sigma_min >= 0, ErrorKind::corrupt, low->where(), " is ", *out.sigma_min,
            "; it must not be negative");
  }
  out.beta_start = positive_or(config, "beta_start", out.beta_start);
  out.beta_end = positive_or(config, "beta_end", out.beta_end);
  for (const double beta : {out.beta_start, out.beta_end}) {
    require(beta < 1, ErrorKind::corrupt, config.where(),
            ": beta_start and beta_end must be less than 1, not ", beta);
  }
  if (const Json* final_type = config.find("final_sigmas_type")) {
    const std::string& name = final_type->as_string();
    if (name != "zero" && name != "sigma_min") refuse(*final_type, "zero or sigma_min");
    out.final_sigma_zero = name == "zero";
  }
}

void read_flow_match_euler(SchedulerConfig& out, ConfigReader& config) {
  // Of dynamic shifting, which is refused below.
  config.harmless({"base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len",
                   "time_shift_type", "fixed_step_requires_explicit_sigmas"});
  for (const char* key : {"use_dynamic_shifting", "use_karras_sigmas", "use_exponential_sigmas",
                          "use_beta_sigmas", "invert_sigmas"}) {
    require_flag(config, key, false);
  }
  require_null(config, "shift_terminal");
  out.flow_shift = positive_or(config, "shift", 1);
  out.stochastic_sampling = flag_or(config, "stochastic_sampling", false);
  if (const Json* fixed = config.find("fixed_step_sampler_config")) {
    ConfigReader sampler(*fixed);
    require_text(sampler, "sample_type", "sde");
    require(out.stochastic_sampling, ErrorKind::corrupt, fixed->where(),
            " describes a stochastic sampler, but stochastic_sampling is not true");
    if (const Json* list = sampler.find("t_list")) {
      for (const Json& sigma : list->items()) out.fixed_sigmas.push_back(sigma.as_double());
    }
    sampler.refuse_rest("this sampler");
  }
}

// --- grids ---------------------------------------------------------------------------------------

// `count` of the `points` equally spaced numbers from first to last, in numpy's order of
// operations.
std::vector<double> spaced(double first, double last, int points, int count) {
  const double step = points > 1 ? (last - first) / (points - 1) : 0;
  std::vector<double> values(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    values[size_t(i)] = i > 0 && i == points - 1 ? last : i * step + first;
  }
  return values;
}

double shifted(double sigma, double shift) { return shift * sigma / (1 + (shift - 1) * sigma); }

// Ends of the training schedule, as noise-to-signal ratios.
struct KarrasRange {
  double largest, smallest;
};
KarrasRange training_range(const SchedulerConfig& config) {
  const int64_t n = config.num_train_timesteps;
  const float first = static_cast<float>(config.beta_start);
  const float step =
      n > 1 ? (static_cast<float>(config.beta_end) - first) / static_cast<float>(n - 1) : 0;
  const auto ratio = [](double product) {
    const float a = static_cast<float>(product);
    return static_cast<double>(std::sqrt((1 - a) / a));
  };
  double product = 1;
  KarrasRange range{};
  for (int64_t k = 0; k < n; ++k) {
    // The second half counts from the far end, as torch.linspace does.
    const float beta = k < n / 2 || n == 1 ? first + step * static_cast<float>(k)
                                           : static_cast<float>(config.beta_end) -
                                                 step * static_cast<float>(n - 1 - k);
    product *= static_cast<double>(1 - beta);
    if (k == 0) range.smallest = ratio(product);
  }
  range.largest = ratio(product);
  return range;
}

std::vector<double> karras_grid(const SchedulerConfig& config, int num_steps) {
  KarrasRange range{config.sigma_max.value_or(0), config.sigma_min.value_or(0)};
  if (!config.sigma_max || !config.sigma_min) {
    const KarrasRange trained = training_range(config);
    if (!config.sigma_max) range.largest = trained.largest;
    if (!config.sigma_min) range.smallest = trained.smallest;
  }
  constexpr double kRho = 7;
  const double high = std::pow(range.largest, 1 / kRho);
  const double low = std::pow(range.smallest, 1 / kRho);
  std::vector<double> sigmas = spaced(0, 1, num_steps, num_steps);
  for (double& value : sigmas) {
    const double ratio = std::pow(high + value * (low - high), kRho);
    value = ratio / (1 + ratio);
  }
  return sigmas;
}

std::vector<double> flow_grid(const SchedulerConfig& config, int num_steps,
                              const std::vector<double>& custom_sigmas) {
  std::vector<double> sigmas = custom_sigmas;
  if (sigmas.empty()) {
    // The native grid stops short of 1 instead of short of 0; its first point does not depend on
    // num_train_timesteps.
    sigmas = config.native_schedule
                 ? spaced(0.999, 0, num_steps + 1, num_steps)
                 : spaced(1, 1.0 / double(config.num_train_timesteps), num_steps + 1, num_steps);
  }
  for (double& sigma : sigmas) sigma = shifted(sigma, config.flow_shift);
  constexpr double kMargin = 1e-6;  // keeps the logarithm of 1 - sigma finite
  if (std::abs(sigmas[0] - 1) < kMargin) sigmas[0] -= kMargin;
  return sigmas;
}

std::vector<float> euler_grid(const SchedulerConfig& config, int num_steps,
                              const std::vector<double>& custom_sigmas) {
  std::vector<float> out;
  if (!custom_sigmas.empty()) {
    const float shift = static_cast<float>(config.flow_shift);
    for (const double value : custom_sigmas) {
      const float sigma = static_cast<float>(value);
      out.push_back(shift * sigma / (1 + (shift - 1) * sigma));
    }
    return out;
  }
  // The smallest sigma is shifted twice: once as the end of the training schedule, once here.
  const double scale = double(config.num_train_timesteps);
  const double smallest = static_cast<float>(shifted(1 / scale, config.flow_shift));
  for (const double t : spaced(scale, smallest * scale, num_steps, num_steps)) {
    out.push_back(static_cast<float>(shifted(t / scale, config.flow_shift)));
  }
  return out;
}

// --- UniPC coefficients --------------------------------------------------------------------------

// Finite: the grid stays below 1, and intervals that end at 0 have no coefficients.
double log_snr(double sigma) { return std::log(1 - sigma) - std::log(sigma); }

// phi_k(-h) - 1 / k! of the exponential integrators, over E = expm1(-h), times k!; k = 1..order.
std::vector<double> phi_ratios(double h, int order) {
  const double e = std::expm1(-h);
  std::vector<double> ratios;
  double factorial = 1, phi = 0;
  for (int k = 1; k <= order; ++k) {
    factorial *= k;
    if (h < 1) {
      // The recurrence below cancels for short intervals; this is its Taylor series.
      phi = 0;
      double term = 1 / factorial;
      for (int n = 1; n <= 24; ++n) {
        term *= -h / (n + k);
        phi += term;
      }
    } else {
      phi = (k == 1 ? e : phi) / -h - 1 / factorial;
    }
    ratios.push_back(factorial * phi / e);
  }
  return ratios;
}

// Solves sum_k nodes[k]^j weights[k] = right[j] by elimination with partial pivoting.
std::vector<double> solve_moments(const std::vector<double>& nodes, std::vector<double> right) {
  const size_t n = nodes.size();
  std::vector<double> a(n * n, 1.0);
  for (size_t j = 1; j < n; ++j) {
    for (size_t k = 0; k < n; ++k) a[j * n + k] = a[(j - 1) * n + k] * nodes[k];
  }
  for (size_t column = 0; column < n; ++column) {
    size_t pivot = column;
    for (size_t j = column + 1; j < n; ++j) {
      if (std::abs(a[j * n + column]) > std::abs(a[pivot * n + column])) pivot = j;
    }
    std::swap_ranges(&a[column * n], &a[column * n] + n, &a[pivot * n]);
    std::swap(right[column], right[pivot]);
    for (size_t j = column + 1; j < n; ++j) {
      const double factor = a[j * n + column] / a[column * n + column];
      for (size_t k = column; k < n; ++k) a[j * n + k] -= factor * a[column * n + k];
      right[j] -= factor * right[column];
    }
  }
  for (size_t j = n; j-- > 0;) {
    for (size_t k = j + 1; k < n; ++k) right[j] -= a[j * n + k] * right[k];
    right[j] /= a[j * n + j];
  }
  return right;
}

// Interval from `start` to `start + 1` of the sigma grid.
struct Interval {
  Interval(const std::vector<float>& sigmas, int start, int order) {
    const auto lambda = [&](int i) { return log_snr(double(sigmas[size_t(i)])); };
    const double h = lambda(start + 1) - lambda(start);
    ratio = double(sigmas[size_t(start) + 1]) / double(sigmas[size_t(start)]);
    gain = -(1 - double(sigmas[size_t(start) + 1])) * std::expm1(-h);
    moments = phi_ratios(h, order);
    for (int k = 1; k < order; ++k) nodes.push_back((lambda(start - k) - lambda(start)) / h);
  }
  double ratio;                 // factor of the sample
  double gain;                  // factor of the x0 prediction at the start
  std::vector<double> nodes;    // r_k of the points before the start
  std::vector<double> moments;  // b_k
};

// Factors of [sample, m at start, m at start - 1, ...].
std::vector<double> predictor_factors(const Interval& interval, int order) {
  std::vector<double> factors{interval.ratio, interval.gain};
  // Order 2 uses one half in place of the solved weight, as the reference does.
  const std::vector<double> weights =
      order == 2 ? std::vector<double>{0.5}
                 : solve_moments(interval.nodes,
                                 {interval.moments.begin(), interval.moments.begin() + order - 1});
  for (size_t k = 0; k < interval.nodes.size(); ++k) {
    const double factor = interval.gain * weights[k] / interval.nodes[k];
    factors.push_back(factor);
    factors[1] -= factor;
  }
  return factors;
}

// Factors of [sample, m at the end, m at start, m at start - 1, ...].
std::vector<double> corrector_factors(const Interval& interval, int order) {
  std::vector<double> nodes = interval.nodes;
  nodes.push_back(1);
  const std::vector<double> weights =
      order == 1 ? std::vector<double>{0.5} : solve_moments(nodes, interval.moments);
  const double end = interval.gain * weights.back();
  std::vector<double> factors{interval.ratio, end, interval.gain - end};
  for (size_t k = 0; k < interval.nodes.size(); ++k) {
    const double factor = interval.gain * weights[k] / nodes[k];
    factors.push_back(factor);
    factors[2] -= factor;
  }
  return factors;
}

// lincomb of any number of terms; `out` may be among the first terms only.
void combine(Backend& backend, MutView out, std::span<const Term> terms) {
  constexpr size_t kMaxTerms = 8;
  backend.lincomb(out, terms.first(std::min(terms.size(), kMaxTerms)));
  for (size_t done = kMaxTerms; done < terms.size();) {
    const size_t count = std::min(terms.size() - done, kMaxTerms - 1);
    std::vector<Term> part{{1.0f, out}};
    part.insert(part.end(), terms.begin() + std::ptrdiff_t(done),
                terms.begin() + std::ptrdiff_t(done + count));
    backend.lincomb(out, part);
    done += count;
  }
}

}  // namespace

SchedulerConfig SchedulerConfig::from_json(const Json& json) {
  SchedulerConfig out;
  ConfigReader config(json);
  const Json& class_name = config.at("_class_name");
  const std::string& name = class_name.as_string();
  out.num_train_timesteps = integer_or(config, "num_train_timesteps", 1000, 1000000);
  if (name == "FlowMatchEulerDiscreteScheduler") {
    out.kind = Kind::flow_match_euler;
    read_flow_match_euler(out, config);
  } else {
    // Older Edge exports name a class of their own: the same solver on the native grid.
    out.native_schedule = name.starts_with("Cosmos3EdgeUniPC");
    if (name != "UniPCMultistepScheduler" && !out.native_schedule)
      refuse(class_name, "UniPCMultistepScheduler or FlowMatchEulerDiscreteScheduler");
    read_unipc(out, config);
  }
  config.refuse_rest("this sampler");
  return out;
}

Schedule make_schedule(const SchedulerConfig& config, int num_steps,
                       const std::vector<double>& custom_sigmas) {
  require(num_steps >= 1, "number of steps is ", num_steps, "; it must be at least 1");
  require(config.flow_shift > 0 && std::isfinite(config.flow_shift), "flow shift is ",
          config.flow_shift, "; it must be greater than 0");
  require(custom_sigmas.empty() || std::ssize(custom_sigmas) == num_steps, "number of steps is ",
          num_steps, ", but ", custom_sigmas.size(),
          " sigmas are fixed by the checkpoint; leave the number of steps out or give ",
          custom_sigmas.size());
  for (const double sigma : custom_sigmas) {
    require(sigma >= 0 && sigma <= 1, "a sigma of the fixed list is ", sigma,
            "; sigmas lie between 0 and 1");
  }
  Schedule schedule;
  if (config.kind == SchedulerConfig::Kind::flow_match_euler) {
    schedule.sigmas = euler_grid(config, num_steps, custom_sigmas);
    for (const float sigma : schedule.sigmas) {
      schedule.timesteps.push_back(static_cast<float>(config.num_train_timesteps) * sigma);
    }
    schedule.sigmas.push_back(0);
    return schedule;
  }
  require(!config.use_karras_sigmas || custom_sigmas.empty(),
          "a fixed list of sigmas cannot be combined with Karras sigmas; switch Karras off");
  const std::vector<double> sigmas = config.use_karras_sigmas
                                         ? karras_grid(config, num_steps)
                                         : flow_grid(config, num_steps, custom_sigmas);
  for (const double sigma : sigmas) {
    schedule.timesteps.push_back(
        static_cast<float>(std::trunc(double(config.num_train_timesteps) * sigma)));
    schedule.sigmas.push_back(static_cast<float>(sigma));
  }
  // The solver divides by differences of log(1 - sigma) - log(sigma).
  for (size_t i = 0; i < sigmas.size(); ++i) {
    const float sigma = schedule.sigmas[i];
    require(sigma < 1 && (i == 0 || sigma < schedule.sigmas[i - 1]), "sigma ", i, " of ", num_steps,
            " steps is ", sigma, i > 0 ? concat(" after ", schedule.sigmas[i - 1]) : "",
            "; sigmas must fall and stay below 1: use fewer steps or another range or shift");
  }
  schedule.sigmas.push_back(config.final_sigma_zero ? 0 : schedule.sigmas.back());
  return schedule;
}

std::vector<UnipcStep> unipc_steps(const std::vector<float>& sigmas, int solver_order) {
  const int num_steps = static_cast<int>(sigmas.size()) - 1;
  std::vector<UnipcStep> steps(static_cast<size_t>(num_steps));
  for (int i = 0; i < num_steps; ++i) {
    UnipcStep& step = steps[size_t(i)];
    const float sigma = sigmas[size_t(i)], next = sigmas[size_t(i) + 1];
    step.sigma = double(sigma);
    step.order = std::min({solver_order, num_steps - i, i + 1});
    if (next == 0) continue;  // the limit of every formula is the x0 prediction itself
    if (i > 0) {
      const int order = steps[size_t(i) - 1].order;
      step.corrector = corrector_factors(Interval(sigmas, i - 1, order), order);
    }
    // A repeated sigma is an interval of length 0: nothing to predict.
    step.predictor = next == sigma ? std::vector<double>{1, 0}
                                   : predictor_factors(Interval(sigmas, i, step.order), step.order);
  }
  return steps;
}

Solver::Solver(Backend& backend, const SchedulerConfig& config, const Schedule& schedule,
               Shape shape)
    : backend_(backend), sigmas_(schedule.sigmas), shape_(shape) {
  if (config.kind == SchedulerConfig::Kind::flow_match_euler) {
    stochastic_ = config.stochastic_sampling;
    return;
  }
  unipc_ = unipc_steps(sigmas_, config.solver_order);
  const int depth = std::min(config.solver_order, schedule.num_steps());
  for (int k = 0; k < depth; ++k) history_.push_back(backend.allocate_tensor(shape, DType::f32));
  last_sample_ = backend.allocate_tensor(shape, DType::f32);
}

void Solver::step(int i, MutView sample, View velocity, View noise) {
  const int num_steps = static_cast<int>(sigmas_.size()) - 1;
  require(i == steps_done_ && i < num_steps, "sampler: step ", i, " was asked for, but ",
          steps_done_, " of ", num_steps, " steps are done; steps come in order");
  require(sample.shape == shape_ && velocity.shape == shape_ && sample.dtype == DType::f32,
          "sampler: sample is ", sample.shape, " ", name_of(sample.dtype), " and velocity is ",
          velocity.shape, ", but the sampler was made for ", shape_, " f32");
  if (unipc_.empty()) {
    step_euler(i, sample, velocity, noise);
  } else {
    step_unipc(i, sample, velocity);
  }
  ++steps_done_;
}

void Solver::step_unipc(int i, MutView sample, View velocity) {
  const UnipcStep& plan = unipc_[size_t(i)];
  const float minus_sigma = static_cast<float>(-plan.sigma);
  const auto prediction = [&](int step) -> MutView {
    return history_[size_t(step) % history_.size()].view;
  };
  if (plan.predictor.empty()) {
    backend_.lincomb(sample, {{1.0f, sample}, {minus_sigma, velocity}});
    return;
  }
  // The corrector comes before m_i is stored: m_i then takes the place of the oldest prediction,
  // which only the corrector still reads.
  if (plan.corrector.empty()) {
    backend_.copy(last_sample_.view, sample);
  } else {
    const double now = plan.corrector[1];
    std::vector<Term> terms{{static_cast<float>(plan.corrector[0]), last_sample_.view},
                            {static_cast<float>(now), sample},
                            {static_cast<float>(-now * plan.sigma), velocity}};
    for (size_t k = 2; k < plan.corrector.size(); ++k) {
      terms.push_back({static_cast<float>(plan.corrector[k]), prediction(i + 1 - int(k))});
    }
    combine(backend_, last_sample_.view, terms);
  }
  backend_.lincomb(prediction(i), {{1.0f, sample}, {minus_sigma, velocity}});
  std::vector<Term> terms{{static_cast<float>(plan.predictor[0]), last_sample_.view}};
  for (size_t k = 1; k < plan.predictor.size(); ++k) {
    terms.push_back({static_cast<float>(plan.predictor[k]), prediction(i + 1 - int(k))});
  }
  combine(backend_, sample, terms);
}

void Solver::step_euler(int i, MutView sample, View velocity, View noise) {
  const double sigma = double(sigmas_[size_t(i)]), next = double(sigmas_[size_t(i) + 1]);
  if (!stochastic_) {
    backend_.lincomb(sample, {{1.0f, sample}, {static_cast<float>(next - sigma), velocity}});
    return;
  }
  require(noise && noise.shape == shape_, "sampler: step ", i,
          " of a stochastic sampler needs noise of shape ", shape_);
  std::vector<Term> terms{{static_cast<float>(1 - next), sample},
                          {static_cast<float>(-(1 - next) * sigma), velocity}};
  if (next > 0) terms.push_back({static_cast<float>(next), noise});
  backend_.lincomb(sample, terms);
}

}  // namespace orrery
