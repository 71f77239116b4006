// Measurements of the published model sizes with random weights, nothing to download; and of loading a checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "orrery/engine.h"

namespace orrery {

struct BenchOptions {
  std::string what = "step";     // layer, step, vae, e2e, attention or load
  std::filesystem::path model;   // of load: the checkpoint
  std::string config = "nano";   // nano, super or edge
  int64_t num_layers = 0;        // 0: the config's
  int64_t height = 720, width = 1280, num_frames = 189;
  int64_t num_inference_steps = 35;
  double guidance_scale = 6;
  int64_t text_tokens = 512;     // of each guidance branch
  // Of attention; 0: those of the config at the request's size.
  int64_t query_tokens = 0, key_tokens = 0, heads = 0, kv_heads = 0, head_dim = 0;
  double sparsity = 0.75;        // share of the key blocks that the sparse calls of attention leave out
  std::string attention;         // strategy, as in EngineOptions
  std::string command;           // recorded in each line
};

// Calls `line` with one JSON object a measurement: bench, case, device, driver, commit, date, command,
// value, unit, floor, peer, peer_value, ratio.
void run_bench(const BenchOptions& options, const EngineOptions& engine,
               const std::function<void(const std::string&)>& line);

}  // namespace orrery
