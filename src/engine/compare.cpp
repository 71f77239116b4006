#include "orrery/compare.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>

#include "base/error.h"
#include "base/json.h"
#include "engine/fidelity.h"

namespace orrery {

std::string strategy_name(const std::string& attention, size_t index) {
  if (attention == "dense") return attention;
  if (attention.find('{') != std::string::npos) return concat("strategy ", index + 1);
  return std::filesystem::path(attention).stem().string();
}

namespace {

// Passes progress on under the strategy's name.
ProgressCallback named(const ProgressCallback& progress, const std::string& name) {
  if (!progress) return {};
  return [progress, name](Progress p) {
    p.stage = name + ": " + p.stage;
    progress(p);
  };
}

void check(const CompareOptions& options) {
  require(options.strategies.size() >= 2, "compare: ", options.strategies.size(),
          " strategies; give two or more with --attention");
  require(options.repeats >= 1, "compare: repeats is ", options.repeats, "; it must be at least 1");
}

// The engine has again what it had, however the comparison ends.
class StrategyOf {
 public:
  explicit StrategyOf(Engine& engine) : engine_(engine), before_(engine.attention()) {}
  ~StrategyOf() {
    try {
      engine_.use_attention(before_);
    } catch (const std::exception&) {
      // It was in use before: only a device that is gone refuses it now.
    }
  }
  StrategyOf(const StrategyOf&) = delete;
  StrategyOf& operator=(const StrategyOf&) = delete;

 private:
  Engine& engine_;
  std::string before_;
};

// Every strategy is known to run here.
std::vector<StrategyOutcome> compare_on(Engine& engine, const Request& request,
                                        const CompareOptions& options,
                                        const ProgressCallback& progress, std::stop_token stop) {
  const auto& strategies = options.strategies;
  std::vector<StrategyOutcome> outcomes(strategies.size());
  std::vector<std::vector<double>> fastest(strategies.size());
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    for (size_t i = 0; i < strategies.size(); ++i) {
      engine.use_attention(strategies[i].attention);
      Result result = engine.generate(request, {named(progress, strategies[i].name), {}}, stop);
      const std::vector<double> seconds = result.times.step_seconds;
      const double processor = result.times.stage("denoise").processor_seconds;
      if (repeat == 0) outcomes[i].processor_seconds = processor;
      outcomes[i].processor_seconds = std::min(outcomes[i].processor_seconds, processor);
      if (repeat == 0) {
        fastest[i] = seconds;
        outcomes[i].result = std::move(result);
      }
      for (size_t step = 0; step < seconds.size(); ++step)
        fastest[i][step] = std::min(fastest[i][step], seconds[step]);
    }
  }
  const StrategyOutcome& first = outcomes.front();
  for (size_t i = 0; i < outcomes.size(); ++i) {
    StrategyOutcome& outcome = outcomes[i];
    outcome.name = strategies[i].name;
    outcome.attention = strategies[i].attention;
    for (double seconds : fastest[i]) outcome.denoise_seconds += seconds;
    outcome.speed_up = first.denoise_seconds / outcome.denoise_seconds;
    outcome.kept_share = kept_share(outcome.result.attention);
    outcome.latent_error =
        relative_error(outcome.result.latents.values, first.result.latents.values);
    outcome.psnr = psnr(outcome.result.frames, first.result.frames);
    outcome.ssim = ssim(outcome.result.frames, first.result.frames);
  }
  return outcomes;
}

}  // namespace

std::vector<StrategyOutcome> compare(const std::filesystem::path& model, const Request& request,
                                     const CompareOptions& options, EngineOptions engine_options,
                                     const ProgressCallback& progress, std::stop_token stop) {
  check(options);
  const auto& strategies = options.strategies;
  engine_options.attention = strategies.front().attention;
  Engine engine = Engine::open(model, engine_options);
  for (size_t i = 1; i < strategies.size(); ++i) engine.use_attention(strategies[i].attention);
  return compare_on(engine, request, options, progress, std::move(stop));
}

std::vector<StrategyOutcome> compare(Engine& engine, const Request& request,
                                     const CompareOptions& options,
                                     const ProgressCallback& progress, std::stop_token stop) {
  check(options);
  const StrategyOf kept(engine);
  for (const ComparedStrategy& strategy : options.strategies)
    engine.use_attention(strategy.attention);
  return compare_on(engine, request, options, progress, std::move(stop));
}

std::string to_text(const std::vector<StrategyOutcome>& outcomes) {
  size_t width = std::string("strategy").size();
  for (const StrategyOutcome& o : outcomes) width = std::max(width, o.name.size());
  std::ostringstream out;
  out << std::left << std::setw(static_cast<int>(width)) << "strategy" << std::right
      << std::setw(10) << "seconds" << std::setw(10) << "speed-up" << std::setw(8) << "kept"
      << std::setw(14) << "latent error" << std::setw(10) << "PSNR dB" << std::setw(8) << "SSIM"
      << '\n'
      << std::fixed;
  for (const StrategyOutcome& o : outcomes) {
    out << std::left << std::setw(static_cast<int>(width)) << o.name << std::right
        << std::setprecision(2) << std::setw(10) << o.denoise_seconds << std::setw(9) << o.speed_up
        << 'x' << std::setprecision(1) << std::setw(7) << 100 * o.kept_share << '%'
        << std::setprecision(4) << std::setw(14) << o.latent_error << std::setprecision(2)
        << std::setw(10);
    if (std::isinf(o.psnr))
      out << "equal";
    else
      out << o.psnr;
    out << std::setprecision(4) << std::setw(8) << o.ssim << '\n';
  }
  return out.str();
}

std::string to_json(const std::vector<StrategyOutcome>& outcomes) {
  Json rows = Json::array();
  for (const StrategyOutcome& o : outcomes) {
    Json row = Json::object();
    row.set("strategy", o.name)
        .set("attention", o.attention)
        .set("denoise_seconds", o.denoise_seconds)
        .set("processor_seconds", o.processor_seconds)
        .set("speed_up", o.speed_up)
        .set("kept_share", o.kept_share)
        .set("latent_error", o.latent_error)
        .set("psnr", std::isinf(o.psnr) ? Json() : Json(o.psnr))  // JSON has no infinity
        .set("ssim", o.ssim);
    Json presets = Json::array();
    for (const AttentionUse& use : o.result.attention) {
      presets.push(Json::object()
                       .set("preset", use.preset)
                       .set("implementation", use.implementation)
                       .set("calls", use.calls)
                       .set("kept_blocks", use.kept_blocks)
                       .set("all_blocks", use.all_blocks)
                       .set("seconds", use.seconds));
    }
    rows.push(row.set("presets", std::move(presets)));
  }
  return rows.dump(1) + "\n";
}

}  // namespace orrery
