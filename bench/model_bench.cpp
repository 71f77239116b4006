// `orrery bench` without the command line's media libraries, for machines that lack them:
//   model_bench what config [key=value ...]   keys as the flags of `orrery bench`
#include <cstdio>
#include <string>

#include "bench/bench.h"

int main(int argc, char** argv) {
  orrery::BenchOptions options;
  orrery::EngineOptions engine;
  engine.device = "cuda";
  for (int i = 0; i < argc; ++i) options.command += (i ? " " : "") + std::string(argv[i]);
  if (argc > 1) options.what = argv[1];
  if (argc > 2) options.config = argv[2];
  for (int i = 3; i < argc; ++i) {
    const std::string flag = argv[i];
    const size_t at = flag.find('=');
    const std::string key = flag.substr(0, at),
                      value = at == std::string::npos ? "" : flag.substr(at + 1);
    if (key == "num-layers")
      options.num_layers = std::stoll(value);
    else if (key == "height")
      options.height = std::stoll(value);
    else if (key == "width")
      options.width = std::stoll(value);
    else if (key == "num-frames")
      options.num_frames = std::stoll(value);
    else if (key == "num-inference-steps")
      options.num_inference_steps = std::stoll(value);
    else if (key == "guidance-scale")
      options.guidance_scale = std::stod(value);
    else if (key == "text-tokens")
      options.text_tokens = std::stoll(value);
    else if (key == "attention")
      options.attention = value;
    else if (key == "meshes")
      options.meshes = value;
    else if (key == "timeline")
      options.timeline = true;
    else if (key == "model")
      options.model = value;
    else if (key == "query-tokens")
      options.query_tokens = std::stoll(value);
    else if (key == "key-tokens")
      options.key_tokens = std::stoll(value);
    else if (key == "heads")
      options.heads = std::stoll(value);
    else if (key == "kv-heads")
      options.kv_heads = std::stoll(value);
    else if (key == "head-dim")
      options.head_dim = std::stoll(value);
    else if (key == "sparsity")
      options.sparsity = std::stod(value);
    else if (key == "offload")
      engine.offload = orrery::value_named<orrery::Offload>(value).value();
    else if (key == "no-graphs")
      engine.graphs = false;
    else if (key == "device")
      engine.device = value;
    else if (key == "dtype")
      engine.dtype = orrery::value_named<orrery::ComputeType>(value).value();
    else {
      std::fprintf(stderr, "model_bench: %s is not known\n", key.c_str());
      return 2;
    }
  }
  try {
    orrery::run_bench(options, engine, [](const std::string& line) {
      std::puts(line.c_str()), std::fflush(stdout);
    });
  } catch (const orrery::Error& error) {
    std::fprintf(stderr, "model_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
