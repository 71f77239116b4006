#include "orrery/bench.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <optional>

#include "backend/dry_run.h"
#include "base/error.h"
#include "engine/backends.h"
#include "engine/measure.h"
#include "engine/run.h"
#include "model/presets.h"

namespace orrery {

namespace {

using Clock = std::chrono::steady_clock;

// The sizes of one benchmarked request, resolved as a real one would be.
Settings make_settings(const BenchOptions& options, const VaeConfig& vae) {
  Settings s;
  s.mode = options.num_frames == 1 ? Mode::text_to_image : Mode::text_to_video;
  s.height = s.canvas_height = options.height;
  s.width = s.canvas_width = options.width;
  require(options.height > 0 && options.width > 0 && options.num_frames > 0 && options.num_inference_steps > 0,
          "bench: height, width, num_frames and num_inference_steps must be positive");
  require(s.height % vae.scale_factor_spatial == 0 && s.width % vae.scale_factor_spatial == 0,
          "bench: height and width must be multiples of ", vae.scale_factor_spatial);
  s.latent_frames = vae.latent_frames(options.num_frames);
  s.requested_frames = options.num_frames;
  s.frames = vae.decoded_frames(s.latent_frames);
  s.latent_height = s.height / vae.scale_factor_spatial;
  s.latent_width = s.width / vae.scale_factor_spatial;
  s.conditioning.noisy.assign(static_cast<size_t>(s.latent_frames), true);
  s.guidance_scale = options.guidance_scale;
  s.scheduler.flow_shift = 10;
  s.schedule = make_schedule(s.scheduler, static_cast<int>(options.num_inference_steps));
  return s;
}

class Bench {
 public:
  Bench(const BenchOptions& options, const EngineOptions& engine, const std::function<void(const std::string&)>& line)
      : options_(options),
        line_(line),
        preset_(model_preset(options.config)),
        backend_(make_backend(engine)),
        dtype_(activation_type(engine, *backend_)),
        config_(TransformerConfig::from_json(preset_.transformer)),
        vae_config_(VaeConfig::from_json(preset_.vae)) {
    if (options.num_layers > 0) config_.num_hidden_layers = options.num_layers;
    settings_ = make_settings(options, vae_config_);
  }

  void run() {
    if (options_.what == "layer") layer();
    else if (options_.what == "vae") vae();
    else if (options_.what == "step" || options_.what == "e2e") whole(options_.what == "e2e");
    else fail(ErrorKind::invalid_argument, "bench \"", options_.what, "\" is not known; it is layer, step, vae or e2e");
  }

 private:
  double seconds(const std::function<void()>& body) {
    backend_->synchronize();
    const auto start = Clock::now();
    body();
    backend_->synchronize();
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  // Everything a run needs, sized by a dry run of the same request.
  struct Setup {
    std::unique_ptr<Transformer> transformer;
    std::unique_ptr<Vae> vae;
    WeightStore und, gen, vae_weights;
    std::optional<AttentionStrategy> strategy;
    std::optional<Arena> arena;
    std::optional<Run> run;
  };

  std::vector<std::vector<int64_t>> prompts() const {
    std::vector<std::vector<int64_t>> lists(settings_.guided() ? 2 : 1);
    for (size_t b = 0; b < lists.size(); ++b) {
      for (int64_t i = 0; i < options_.text_tokens; ++i) {
        lists[b].push_back((i * 7919 + static_cast<int64_t>(b) * 104729) % config_.vocab_size);
      }
    }
    return lists;
  }

  Setup make(TransformerConfig config, bool with_vae) {
    Setup out;
    const AttentionInventory inventory = inventory_of(config);
    out.strategy = strategy_from(inventory, options_.attention, nullptr);
    out.transformer = std::make_unique<Transformer>(*backend_, config, dtype_);
    out.vae = std::make_unique<Vae>(*backend_, vae_config_, vae_options(backend_->device(), dtype_));
    Transformer& model = *out.transformer;
    out.und = random_weights(*backend_, [&](WeightVisitor& v) { model.visit_und(v); }, dtype_, 1);
    out.gen = random_weights(*backend_, [&](WeightVisitor& v) { model.visit_gen(v); }, dtype_, 2);
    if (with_vae) {
      out.vae_weights = random_weights(*backend_, [&](WeightVisitor& v) { out.vae->visit(v); }, dtype_, 3);
    }
    const auto peak = arena_bytes(config, *out.strategy, with_vae);
    out.arena.emplace(backend_->allocate(peak));
    out.run.emplace(Networks{*out.transformer, *out.vae, nullptr}, *out.arena, settings_, *out.strategy, prompts(),
                    VaeTiling{});
    return out;
  }

  size_t arena_bytes(const TransformerConfig& config, const AttentionStrategy& strategy, bool with_vae) {
    DryRunBackend dry(backend_->device(), backend_->fuses_weights());
    Transformer model(dry, config, dtype_);
    Vae autoencoder(dry, vae_config_, vae_options(dry.device(), dtype_));
    place_weights(dry, [&](WeightVisitor& v) { model.visit_und(v), model.visit_gen(v), autoencoder.visit(v); }, dtype_);
    Arena arena = Arena::measuring(dry.device());
    Run run({model, autoencoder, nullptr}, arena, settings_, strategy, prompts(), {});
    run.prefill();
    run.start(nullptr, false, {});
    dry.reset_stats();
    run.step(0, nullptr);
    step_flops_ = 0;
    for (const auto& [op, stats] : dry.stats()) step_flops_ += stats.flops;
    if (with_vae) run.decode([](View, View) {});
    return arena.peak();
  }

  std::string size() const {
    return concat(options_.config, " ", config_.num_hidden_layers, " layers, ", settings_.width, "x", settings_.height,
                  ", ", settings_.frames, " frames, ", settings_.guided() ? 2 : 1, " x ", options_.text_tokens,
                  " text tokens, ", name_of(dtype_));
  }

  void report(const std::string& name, double value, const char* unit, double floor = 0) {
    const char* commit = std::getenv("ORRERY_COMMIT");
    const time_t now = std::time(nullptr);
    char date[16];
    std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
    Json out = Json::object();
    out.set("bench", options_.what)
        .set("case", name + ": " + size())
        .set("device", backend_->description())
        .set("driver", "")
        .set("commit", commit != nullptr ? commit : "unknown")
        .set("date", date)
        .set("command", options_.command)
        .set("value", value)
        .set("unit", unit)
        .set("floor", floor > 0 ? Json(floor) : Json())
        .set("peer", Json())
        .set("peer_value", Json())
        .set("ratio", Json());
    line_(out.dump());
  }

  // Where the time of a stage goes: one line an operation, each against the larger of what its
  // flops and its bytes need. `less` is taken off (another run's share), then all is divided by
  // `parts`.
  void report_operations(const std::string& name, const OpTable& table, const OpTable& less,
                         double parts) {
    const double flops = gemm_ceiling(*backend_, dtype_), bytes = copy_ceiling(*backend_);
    for (const auto& [op, total] : table) {
      OpStats stats = total;
      if (const auto it = less.find(op); it != less.end()) {
        stats.seconds -= it->second.seconds;
        stats.flops -= it->second.flops;
        stats.bytes -= it->second.bytes;
      }
      if (stats.seconds <= 0) continue;
      report(concat(name, ", ", op), stats.seconds / parts * 1e3, "ms",
             std::max(stats.flops / flops, stats.bytes / bytes) / parts * 1e3);
    }
  }

  OpTable profile(const std::function<void()>& body) {
    backend_->reset_stats();
    backend_->set_profiling(true);
    body();
    backend_->set_profiling(false);
    return backend_->stats();
  }

  // Median over steps after one that warms up.
  double step_seconds(Run& run, int steps) {
    std::vector<double> times;
    for (int i = 0; i < steps; ++i) times.push_back(seconds([&] { run.step(i, nullptr); }));
    times.erase(times.begin());
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  // One generation layer: the slope over the number of layers, one branch.
  void layer() {
    settings_.guidance_scale = 1;
    TransformerConfig few = config_, more = config_;
    few.num_hidden_layers = 1;
    more.num_hidden_layers = 4;
    double times[2];
    double flops[2];
    OpTable operations[2];
    for (int i = 0; i < 2; ++i) {
      Setup setup = make(i == 0 ? few : more, false);
      NormalGenerator noise(RngKind::cuda, 1);
      setup.run->prefill();
      setup.run->start(&noise, false, {});
      times[i] = step_seconds(*setup.run, 6);
      flops[i] = step_flops_;
      operations[i] = profile([&] { setup.run->step(6, nullptr); });
    }
    const double rate = gemm_ceiling(*backend_, dtype_);
    config_.num_hidden_layers = 1;
    report("one generation layer", (times[1] - times[0]) / 3 * 1e3, "ms",
           (flops[1] - flops[0]) / 3 / rate * 1e3);
    report_operations("one generation layer", operations[1], operations[0], 3);
  }

  void vae() {
    Vae autoencoder(*backend_, vae_config_, vae_options(backend_->device(), dtype_));
    const WeightStore weights =
        random_weights(*backend_, [&](WeightVisitor& v) { autoencoder.visit(v); }, dtype_, 3);
    DryRunBackend dry(backend_->device(), backend_->fuses_weights());
    Vae model(dry, vae_config_, vae_options(dry.device(), dtype_));
    place_weights(dry, [&](WeightVisitor& v) { model.visit(v); }, dtype_);
    const Shape shape{vae_config_.z_dim, settings_.latent_frames, settings_.latent_height, settings_.latent_width};
    Arena measuring = Arena::measuring(dry.device());
    model.decode(measuring, dry.allocate_tensor(shape, DType::f32).view, {}, [](View, View) {});
    double flops = 0;
    for (const auto& [op, stats] : dry.stats()) flops += stats.flops;

    Arena arena(backend_->allocate(measuring.peak()));
    Tensor latents = backend_->allocate_tensor(shape, DType::f32);
    std::vector<float> values(static_cast<size_t>(shape.numel()));
    NormalGenerator(RngKind::cuda, 1).fill(values);
    backend_->upload(latents.view, make_view(values.data(), shape, DType::f32));
    const auto decode = [&] { autoencoder.decode(arena, latents.view, {}, [](View, View) {}); };
    decode();
    report("VAE decode", seconds(decode), "s", flops / gemm_ceiling(*backend_, dtype_));
    report_operations("VAE decode", profile(decode), {}, 1);
  }

  void whole(bool e2e) {
    Setup setup = make(config_, e2e);
    NormalGenerator noise(RngKind::cuda, 1);
    Run& run = *setup.run;
    if (!e2e) {
      run.prefill();
      run.start(&noise, false, {});
      const int steps = std::min(settings_.schedule.num_steps(), 4);
      require(steps > 1, "bench step: needs at least 2 steps");
      const double value = step_seconds(run, steps);
      report("one step", value, "s", step_flops_ / gemm_ceiling(*backend_, dtype_));
      return;
    }
    // Warm-up at the real shapes: one step and the decoder, then everything again from the prompt on.
    run.prefill();
    run.start(&noise, false, {});
    run.step(0, nullptr);
    run.decode([](View, View) {});
    double steps = 0, decode = 0;
    const double total = seconds([&] {
      run.prefill();
      run.start(&noise, false, {});
      steps = seconds([&] {
        for (int i = 0; i < settings_.schedule.num_steps(); ++i) run.step(i, nullptr);
      });
      decode = seconds([&] { run.decode([](View, View) {}); });
    });
    const double rate = gemm_ceiling(*backend_, dtype_);
    report(concat(settings_.schedule.num_steps(), " denoising steps"), steps, "s",
           step_flops_ * settings_.schedule.num_steps() / rate);
    report("VAE decode in the run", decode, "s");
    report("prompt to frames", total, "s");
  }

  BenchOptions options_;
  const std::function<void(const std::string&)>& line_;
  ModelPreset preset_;
  std::unique_ptr<Backend> backend_;
  DType dtype_;
  TransformerConfig config_;
  VaeConfig vae_config_;
  Settings settings_;
  double step_flops_ = 0;
};

}  // namespace

void run_bench(const BenchOptions& options, const EngineOptions& engine,
               const std::function<void(const std::string&)>& line) {
  Bench(options, engine, line).run();
}

}  // namespace orrery
