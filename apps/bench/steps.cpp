#include <algorithm>

#include "base/error.h"
#include "bench/measurements.h"
#include "bench/random_model.h"
#include "engine/fidelity.h"
#include "engine/measure.h"

namespace orrery {

namespace {

using With = RandomModel::With;

std::string in_turns(const BenchRank& rank) {
  return rank.offload == Offload::layer ? ", layers in turns" : "";
}

Stage step(int64_t i) { return {StageKind::denoise, 0, i, 1}; }

// Everything ahead of the first step.
void begin(const BenchRank& rank, Run& run) {
  for (const Stage& stage : stages_of(rank.settings)) {
    if (stage.kind == StageKind::denoise) return;
    run.perform(stage);
  }
}

// Median over steps after one that warms up.
double step_seconds(BenchRank& rank, Run& run, int steps) {
  std::vector<double> times;
  for (int i = 0; i < steps; ++i) times.push_back(rank.seconds([&] { run.perform(step(i)); }));
  times.erase(times.begin());
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// A line with the operations of one layer in the middle of an evaluation, on both streams: from
// the end of one attention call to the end of the next.
void trace(BenchRank& rank, Run& run, int at) {
  const auto observe = [&](WorkObserver* observer) {
    rank.backend->set_observer(observer);
    for (Communicator* group : rank.groups.list()) group->set_observer(observer);
  };
  const std::unique_ptr<Timeline> timeline = make_timeline(*rank.backend);
  observe(timeline.get());
  run.perform(step(at));
  observe(nullptr);
  const std::vector<Timeline::Span> spans = timeline->spans();
  std::vector<double> ends;
  for (const auto& span : spans) {
    if (span.name.starts_with("attention")) ends.push_back(span.end_ms);
  }
  const auto layers = static_cast<size_t>(rank.config.num_hidden_layers);
  require(layers > 1 && ends.size() >= layers, "bench step: a timeline needs 2 layers or more");
  const double from = ends[layers / 2 - 1], until = ends[layers / 2];
  Json kept = Json::array();
  for (const auto& span : spans) {
    if (span.end_ms <= from || span.begin_ms >= until) continue;
    kept.push(Json::object()
                  .set("lane", span.lane)
                  .set("name", span.name)
                  .set("begin", span.begin_ms - from)
                  .set("end", span.end_ms - from));
  }
  if (!rank.leads()) return;
  const Measurement whole{"timeline of one layer, " + rank.mesh_name, until - from, "ms", 0, "", 0};
  rank.line(json_line(rank.options, *rank.backend, rank.size(), whole)
                .set("spans", std::move(kept))
                .dump());
}

struct StepTime {
  double seconds = 0;  // the median
  double flops = 0;
};

// One step with all layers, in turns or in place. `latents`: where the steps led.
StepTime time_step(BenchRank& rank, const TransformerConfig& config, Offload offload,
                   std::vector<float>* latents = nullptr) {
  RandomModel model(rank, config, With::transformer, offload);
  const std::unique_ptr<Run> made = model.run();
  Run& run = *made;
  begin(rank, run);
  // The first two steps of a recording are slower; a strategy may change its layout later. The
  // step after is the timeline's.
  const bool traced = rank.options.timeline && rank.groups.mesh.world() > 1;
  const int steps = std::min(rank.settings.schedule.num_steps() - (traced ? 1 : 0), 6);
  require(steps > 3, "bench step: needs at least ", traced ? 5 : 4, " steps");
  const double value = step_seconds(rank, run, steps);
  if (latents != nullptr) *latents = run.latents();
  if (traced) trace(rank, run, steps);
  return {value, model.step_flops()};
}

}  // namespace

void measure_layer(BenchRank& rank) {
  rank.settings.guidance_scale = 1;
  TransformerConfig few = rank.config, more = rank.config;
  few.num_hidden_layers = 1;
  more.num_hidden_layers = 4;
  double times[2];
  double flops[2];
  OpTable operations[2];
  for (int i = 0; i < 2; ++i) {
    RandomModel model(rank, i == 0 ? few : more, With::transformer, Offload::none);
    const std::unique_ptr<Run> run = model.run();
    begin(rank, *run);
    times[i] = step_seconds(rank, *run, 6);
    flops[i] = model.step_flops();
    operations[i] = rank.profile([&] { run->perform(step(6)); });
  }
  rank.config.num_hidden_layers = 1;
  rank.report("one generation layer", (times[1] - times[0]) / 3 * 1e3, "ms",
              (flops[1] - flops[0]) / 3 / rank.gemm_rate() * 1e3);
  rank.report_operations("one generation layer", operations[1], operations[0], 3);
}

void measure_step(BenchRank& rank) {
  const auto [value, flops] = time_step(rank, rank.config, rank.offload);
  const double floor = flops / rank.gemm_rate();
  rank.report("one step" + in_turns(rank), value, "s", floor);
  rank.report_memory();
  const int64_t layers = rank.config.num_hidden_layers;
  if (rank.offload == Offload::none || layers < 4) return;
  // The same arithmetic without copies: the slope over resident layers.
  TransformerConfig few = rank.config, more = rank.config;
  few.num_hidden_layers = 2;
  more.num_hidden_layers = 4;
  const double two = time_step(rank, few, Offload::none).seconds;
  const double four = time_step(rank, more, Offload::none).seconds;
  const double resident = two + (four - two) / 2 * static_cast<double>(layers - 2);
  rank.report({"one step, layers in turns, against the same layers in place", value, "s", floor,
               "4 resident layers less 2, times the layers", resident});
}

Alone measure_step_alone(BenchRank& rank) {
  Alone one;
  const StepTime step = time_step(rank, rank.config, rank.offload, &one.latents);
  one.seconds = step.seconds;
  rank.report("one step, one device" + in_turns(rank), one.seconds, "s",
              step.flops / rank.gemm_rate());
  rank.report_memory();
  return one;
}

void measure_step_beside(BenchRank& rank, const Alone& one) {
  std::vector<float> latents;
  const StepTime step = time_step(rank, rank.config, rank.offload, &latents);
  const double rate = rank.gemm_rate();
  if (!rank.leads()) return;
  rank.report({"one step, " + rank.mesh_name + in_turns(rank), step.seconds, "s", step.flops / rate,
               "one device in the same run", one.seconds});
  rank.report_memory();
  rank.report("latents against one device after the steps, " + rank.mesh_name,
              relative_error(latents, one.latents), "relative");
}

void measure_end_to_end(BenchRank& rank) {
  RandomModel model(rank, rank.config, With::transformer_and_vae, rank.offload);
  const bool text_beside = text_runs_with_first_step(rank.backend->device());
  const std::vector<Stage> stages = stages_of(rank.settings);
  const RunHooks to_host{{}, [](const uint8_t*, int64_t) {}, {}};
  // Warm-up at the real shapes: one step and the decoder, then everything again from the prompt
  // on.
  {
    const std::unique_ptr<Run> run = model.run(text_beside);
    for (const Stage& stage : stages) {
      run->perform(stage.kind == StageKind::denoise ? stage.unit(0) : stage, to_host);
    }
  }
  double first = 0, steps = 0, decode = 0;
  const double made_before = model.making_seconds();
  double total = rank.seconds([&] {
    const std::unique_ptr<Run> run = model.run(text_beside);
    for (const Stage& stage : stages) {
      const double seconds = rank.seconds([&] {
        if (stage.kind != StageKind::denoise) return run->perform(stage, to_host);
        first = rank.seconds([&] { run->perform(stage.unit(0)); });
        run->perform({stage.kind, 0, 1, stage.count - 1});
      });
      if (stage.kind == StageKind::denoise) steps = seconds - first;
      if (stage.kind == StageKind::decode) decode = seconds;
    }
  });
  const double making = model.making_seconds() - made_before;
  // The prompts' text tower is brought with the first step.
  if (text_beside) first -= making;
  total -= making;
  rank.report_memory();  // of the run: measuring the rate takes memory, too
  const double floor = model.step_flops() / rank.gemm_rate();
  const int others = rank.settings.schedule.num_steps() - 1;
  rank.report(text_beside ? "prompts and first denoising step" : "first denoising step", first, "s",
              floor);
  if (others > 0) {
    rank.report(concat(others, " more denoising steps"), steps, "s", floor * others);
  }
  rank.report("VAE decode in the run", decode, "s");
  rank.report("prompt to frames", total, "s");
}

}  // namespace orrery
