#include "base/error.h"
#include "bench/measurements.h"
#include "engine/clock.h"
#include "engine/measure.h"
#include "engine/model_weights.h"

namespace orrery {

void measure_load(const BenchOptions& options, const EngineOptions& engine, const Lines& line) {
  require(!options.model.empty(),
          "bench load: name a model folder with --model (orrery make-checkpoint makes one)");
  const Checkpoint checkpoint = read_checkpoint(options.model);
  const std::unique_ptr<Backend> backend = make_backend(engine);
  const DType dtype = activation_type(engine, *backend);
  Transformer transformer(*backend, checkpoint.transformer, dtype);
  Vae vae(*backend, checkpoint.vae, vae_options(backend->device(), dtype));
  ModelWeights::Options use;
  use.offload = offload_on(backend->device(), engine.offload);
  use.host_memory = available_host_memory();
  if (backend->device() != DeviceKind::cpu) use.transformer.hold = use.vae.hold = dtype;
  use.transformer.ignored = Transformer::is_unused;
  ModelWeights weights(*backend, {transformer, vae}, checkpoint.folder, use);
  const std::string size =
      concat(options.model.filename().string(), ", ", checkpoint.transformer.num_hidden_layers,
             " layers, ", weights.sizes().all() / 1000000, " MB, offload ", name_of(engine.offload),
             ", ", name_of(dtype));
  const auto report = [&](const char* name, double value, const char* unit) {
    line(json_line(options, *backend, size, {name, value, unit, 0, "", 0}).dump());
  };
  const ModelWeights::LoadTime& time = weights.load_time();
  report("every header and value checked", time.check_seconds, "s");
  report("check", static_cast<double>(weights.sizes().all()) / time.check_seconds * 1e-9, "GB/s");
  if (time.bytes == 0) return;  // nothing is brought anywhere
  report("generation tower and VAE to where they stay", time.seconds, "s");
  report("upload", static_cast<double>(time.bytes) / time.seconds * 1e-9, "GB/s");

  const ModelWeights::Use text(weights, Part::text);
  const auto start = Clock::now();
  for (int i = 0; i < weights.sizes().num_layers; ++i) transformer.bring_layer(Tower::und, i);
  backend->synchronize();
  const double seconds = seconds_since(start);
  report("the text tower's layers in turn, from the mapped files", seconds, "s");
  report("upload of the text tower",
         static_cast<double>(weights.sizes().text - weights.sizes().text_ends) / seconds * 1e-9,
         "GB/s");
}

}  // namespace orrery
