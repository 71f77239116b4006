// The shipped checkpoint end to end on the CPU, each stage held against the rate that oneDNN's
// large matrix product reaches in the same process. JSON lines; append them to
// bench/results/cpu-e2e.jsonl.
//   pico_bench MODEL [threads]
#include <dnnl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/provenance.h"
#include "orrery/engine.h"

namespace {

using namespace orrery;

double onednn_rate() {
  constexpr dnnl_dim_t kSize = 2048;
  std::vector<float> a(kSize * kSize, 0.5f), b(kSize * kSize, 0.25f), c(kSize * kSize);
  double best = 0;
  for (int i = 0; i < 4; ++i) {
    const auto start = std::chrono::steady_clock::now();
    dnnl_sgemm('N', 'N', kSize, kSize, kSize, 1.0f, a.data(), kSize, b.data(), kSize, 0.0f,
               c.data(), kSize);
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, 2.0 * kSize * kSize * kSize / seconds);
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: pico_bench MODEL [threads]\n");
    return 2;
  }
  EngineOptions options;
  if (argc > 2) options.num_threads = std::atoi(argv[2]);
  const double ceiling = onednn_rate();
  Engine engine = Engine::open(argv[1], options);
  Request request;
  request.prompt = "A small red circle moves left on a black background.";
  request.height = 256;
  request.width = 256;
  request.num_frames = 33;
  request.num_inference_steps = 20;
  request.guidance_scale = 4;
  const Result result = engine.generate(request);

  const auto line = [&](const std::string& name, double value, const char* unit,
                        bool against_ceiling) {
    Json out = Json::object();
    out.set("bench", "pico")
        .set("case", name + ": 256x256, 33 frames, 20 steps, guidance 4, fp32")
        .set("device", engine.device_description())
        .set("driver", "")
        .set("commit", measured_commit())
        .set("date", today())
        .set("command", "pico_bench")
        .set("value", value)
        .set("unit", unit)
        .set("floor", Json())
        .set("peer", against_ceiling ? Json("oneDNN sgemm 2048^3, same process") : Json())
        .set("peer_value", against_ceiling ? Json(ceiling * 1e-9) : Json())
        .set("ratio", against_ceiling ? Json(value / (ceiling * 1e-9)) : Json());
    std::printf("%s\n", out.dump().c_str());
  };
  for (const StageTime& stage : result.times.stages) {
    if (stage.seconds > 0) line(stage.name, stage.flops / stage.seconds * 1e-9, "GFLOP/s", true);
  }
  line("open", result.times.open_seconds, "s", false);
  line("total", result.times.total_seconds(), "s", false);
  line("peak resident memory", static_cast<double>(result.memory.peak_resident) * 1e-6, "MB",
       false);
  return 0;
}
