#include "bench/bench_rank.h"

#include <algorithm>

#include "backend/dry_run.h"
#include "base/error.h"
#include "base/provenance.h"
#include "base/rng.h"
#include "engine/clock.h"
#include "engine/measure.h"
#include "engine/ranks.h"
#include "model/transformer.h"
#include "published/presets.h"

namespace orrery {

namespace {

// The sizes of one benchmarked request, resolved as a real one would be.
Settings make_settings(const BenchOptions& options, const VaeConfig& vae) {
  Settings s;
  s.mode = options.num_frames == 1 ? Mode::text_to_image : Mode::text_to_video;
  s.height = s.canvas_height = options.height;
  s.width = s.canvas_width = options.width;
  require(options.height > 0 && options.width > 0 && options.num_frames > 0 &&
              options.num_inference_steps > 0,
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
  s.seed = 1;
  s.scheduler.flow_shift = 10;
  s.schedule = make_schedule(s.scheduler, static_cast<int>(options.num_inference_steps));
  return s;
}

}  // namespace

Json json_line(const BenchOptions& options, const Backend& backend, const std::string& size,
               const Measurement& m) {
  const bool has_peer = !m.peer.empty();
  Json line = Json::object();
  line.set("bench", options.what)
      .set("case", m.name + ": " + size)
      .set("device", backend.description())
      .set("driver", backend.driver())
      .set("commit", measured_commit())
      .set("date", today())
      .set("command", options.command)
      .set("value", m.value)
      .set("unit", m.unit)
      .set("floor", m.floor > 0 ? Json(m.floor) : Json())
      .set("peer", has_peer ? Json(m.peer) : Json())
      .set("peer_value", has_peer ? Json(m.peer_value) : Json())
      .set("ratio", has_peer && m.value > 0 ? Json(m.peer_value / m.value) : Json());
  return line;
}

BenchRank::BenchRank(const BenchOptions& what, const EngineOptions& engine, const Lines& sink)
    : options(what),
      line(sink),
      backend(make_backend(engine)),
      dtype(activation_type(engine, *backend)),
      config(TransformerConfig::from_json(model_preset(options.config).transformer)),
      vae_config(VaeConfig::from_json(model_preset(options.config).vae)),
      offload(offload_on(backend->device(), engine.offload)),
      replays(engine.graphs && offload != Offload::layer) {
  require(offload != Offload::model,
          "bench: --offload model moves weights between stages only, which random weights do not "
          "show; use none or layer");
  if (options.num_layers > 0) config.num_hidden_layers = options.num_layers;
  settings = make_settings(options, vae_config);
}

void BenchRank::join(World& world, const MeshCase& mesh, int rank) {
  mesh.mesh.check(
      {config.num_attention_heads, config.num_key_value_heads, {config.intermediate_size}},
      world.size());
  groups = connect(world, mesh.mesh, rank, *backend, mesh.part_rows);
  mesh_name = mesh.name();
}

void BenchRank::leave() const { abort(groups); }

double BenchRank::seconds(const std::function<void()>& body) {
  backend->synchronize();
  const auto start = Clock::now();
  body();
  backend->synchronize();
  return seconds_since(start);
}

double BenchRank::best_seconds(const std::function<void()>& call) {
  double best = seconds(call);
  for (int i = 0; i < 7; ++i) best = std::min(best, seconds(call));
  return best;
}

OpTable BenchRank::profile(const std::function<void()>& body) {
  backend->reset_stats();
  backend->set_profiling(true);
  body();
  backend->set_profiling(false);
  return backend->stats();
}

double BenchRank::gemm_rate() { return gemm_ceiling(*backend, dtype); }

Tensor BenchRank::normals(const Shape& shape, int64_t seed) {
  std::vector<float> values(static_cast<size_t>(shape.numel()));
  NormalGenerator(RngKind::cuda, seed).fill(values);
  Tensor tensor = backend->allocate_tensor(shape, DType::f32);
  backend->upload(tensor.view, make_view(values.data(), shape, DType::f32));
  return tensor;
}

std::vector<std::vector<int64_t>> BenchRank::prompts() const {
  std::vector<std::vector<int64_t>> lists(settings.guided() ? 2 : 1);
  for (size_t b = 0; b < lists.size(); ++b) {
    for (int64_t i = 0; i < options.text_tokens; ++i) {
      lists[b].push_back((i * 7919 + static_cast<int64_t>(b) * 104729) % config.vocab_size);
    }
  }
  return lists;
}

Sequence BenchRank::sequence() const {
  DryRunBackend dry(backend->device(), backend->fuses_weights());
  Transformer model(dry, config, dtype);
  Sequence sequence;
  sequence.grid =
      model.token_grid(settings.latent_frames, settings.latent_height, settings.latent_width);
  return sequence;
}

std::string BenchRank::size() const {
  return concat(options.config, " ", config.num_hidden_layers, " layers, ", settings.width, "x",
                settings.height, ", ", settings.frames, " frames, ", settings.guided() ? 2 : 1,
                " x ", options.text_tokens, " text tokens, ", name_of(dtype));
}

void BenchRank::report(const std::string& size, const Measurement& measurement) {
  if (leads()) line(json_line(options, *backend, size, measurement).dump());
}

void BenchRank::report(const std::string& name, double value, const char* unit, double floor) {
  report(Measurement{name, value, unit, floor, "", 0});
}

void BenchRank::report_memory() {
  const int64_t peak = backend->memory().peak;
  const std::string where = mesh_name.empty() ? "" : ", a rank of " + mesh_name;
  if (peak > 0) report("device memory at once" + where, static_cast<double>(peak) * 1e-9, "GB");
}

void BenchRank::report_operations(const std::string& name, const OpTable& table,
                                  const OpTable& less, double parts) {
  const double flops = gemm_rate(), bytes = copy_ceiling(*backend);
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

}  // namespace orrery
