// What `orrery bench` measures: one function for each of its words, on one rank.
#pragma once

#include "bench/bench_rank.h"
#include "orrery/request.h"

namespace orrery {

// One generation layer: the slope over the number of layers, one guidance branch.
void measure_layer(BenchRank& rank);
// One denoising step, and with layers in turns the same step with resident layers.
void measure_step(BenchRank& rank);
// From the prompts to the last frame.
void measure_end_to_end(BenchRank& rank);
void measure_vae(BenchRank& rank);
// Every implementation of one attention call, dense and block-sparse.
void measure_attention(BenchRank& rank);
// From the files of a checkpoint to the device, both towers.
void measure_load(const BenchOptions& options, const EngineOptions& engine, const Lines& line);
// What the links between the ranks' groups carry, at the sizes of the request.
void measure_links(BenchRank& rank);

// What one device makes of a step or a decode, for meshes to be held against.
struct Alone {
  double seconds = 0;
  std::vector<float> latents;  // where the steps led
  Frames frames;               // what was decoded
};
Alone measure_step_alone(BenchRank& rank);
Alone measure_vae_alone(BenchRank& rank);
// The same on the rank's mesh, and how far what it makes is from what one device made.
void measure_step_beside(BenchRank& rank, const Alone& one);
void measure_vae_beside(BenchRank& rank, const Alone& one);

}  // namespace orrery
