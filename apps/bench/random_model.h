// The networks of a benchmark with random weights, and a run over them.
#pragma once

#include <optional>

#include "bench/bench_rank.h"
#include "engine/run.h"
#include "model/layer_stream.h"

namespace orrery {

// Everything a run needs, sized by a dry run of the same request.
class RandomModel {
 public:
  enum class With : uint8_t { transformer, transformer_and_vae };
  RandomModel(BenchRank& rank, TransformerConfig config, With with, Offload offload);
  RandomModel(const RandomModel&) = delete;
  RandomModel& operator=(const RandomModel&) = delete;

  // One run of the benchmarked request over these networks.
  std::unique_ptr<Run> run(bool text_with_first_step = false);
  double step_flops() const { return step_flops_; }
  // Seconds spent so far on making random weights within a run, which is not part of a run.
  double making_seconds() const { return making_; }

 private:
  std::unique_ptr<LayerStream> layers_in_turn(Tower tower);
  void with_random_text(const std::function<void()>& body);
  size_t arena_bytes(With with);

  BenchRank& rank_;
  Transformer transformer_;
  Vae vae_;
  WeightStore und_, gen_, vae_weights_;
  std::unique_ptr<LayerStream> gen_layers_;
  AttentionStrategy strategy_;
  double step_flops_ = 0, making_ = 0;
  std::optional<Arena> arena_;
  std::optional<Networks> networks_;
  Request request_;  // whose noise the run draws
};

// The VAE alone, with random weights and latents.
class RandomDecoder {
 public:
  explicit RandomDecoder(BenchRank& rank);
  // Hands frames to the sink of the leader; collective on a mesh.
  void decode(const Vae::FrameSink& sink);
  double flops() const { return flops_; }

 private:
  BenchRank& rank_;
  Vae vae_;
  WeightStore weights_;
  Arena arena_;
  Tensor latents_;
  double flops_ = 0;
};

}  // namespace orrery
