// Measurements of the published model sizes with random weights, nothing to download; and of
// loading a checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "orrery/engine.h"
#include "orrery/fields.h"

namespace orrery {

struct BenchOptions {
  std::string what = "step";    // layer, step, vae, e2e, attention, load or link
  std::filesystem::path model;  // of load: the checkpoint
  std::string config = "nano";  // nano, super or edge
  int64_t num_layers = 0;       // 0: the config's
  int64_t height = 720, width = 1280, num_frames = 189;
  int64_t num_inference_steps = 35;
  double guidance_scale = 6;
  int64_t text_tokens = 512;  // of each guidance branch
  // Of attention; 0: those of the config at the request's size.
  int64_t query_tokens = 0, key_tokens = 0, heads = 0, kv_heads = 0, head_dim = 0;
  double sparsity = 0.75;  // share of the key blocks that the sparse calls of attention leave out
  std::string attention;   // strategy, as in EngineOptions
  std::string command;     // recorded in each line
  // step, vae and link: meshes of ranks, "cp2,cfg2,tp2cp2", each beside one device measured in the
  // same run. "cp2@N" lets at least N rows travel at once while others are computed, instead of the
  // engine's choice. Empty: the mesh of the engine's degrees, if they are more than one rank.
  std::string meshes;
  bool timeline = false;  // step: a line with the times of every operation of one layer too (CUDA)
};

// The rows of these options, and the options that a draft holds.
const std::vector<FieldInfo>& bench_fields();
BenchOptions bench_options_of(const Draft& draft);

// Calls `line` with one JSON object a measurement: bench, case, device, driver, commit, date,
// command, value, unit, floor, peer, peer_value, ratio. Of many ranks the first calls.
void run_bench(const BenchOptions& options, const EngineOptions& engine,
               const std::function<void(const std::string&)>& line);

}  // namespace orrery
