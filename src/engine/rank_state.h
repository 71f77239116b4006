// An open model on one rank, and a request on it.
#pragma once

#include <filesystem>
#include <memory>
#include <stop_token>
#include <string>

#include "attention/strategy.h"
#include "dist/world.h"
#include "engine/forecast.h"
#include "engine/measure.h"
#include "engine/model_weights.h"
#include "engine/settings.h"
#include "model/sound.h"
#include "model/transformer.h"
#include "model/vae.h"
#include "orrery/engine.h"
#include "text/tokenizer.h"

namespace orrery {

// The configs and the tokenizer of a model folder, read once for all ranks of a process.
struct ModelFiles {
  std::filesystem::path path;
  Checkpoint checkpoint;
  Tokenizer tokenizer;

  explicit ModelFiles(const std::filesystem::path& model);
};

struct RankState {
  std::shared_ptr<const ModelFiles> files;
  EngineOptions options;
  std::unique_ptr<Backend> backend;
  DType dtype;
  AttentionStrategy strategy;
  std::unique_ptr<Transformer> transformer;
  std::unique_ptr<Vae> vae;
  std::unique_ptr<SoundDecoder> sound;
  MeshGroups groups;
  std::unique_ptr<ModelWeights> weights;
  double open_seconds = 0;
  StageRates rates;  // of earlier requests, for what is told of the time that is left

  // Loads what stays in place. `host_memory`: bytes that layers may be pinned in.
  RankState(std::shared_ptr<const ModelFiles> model, const EngineOptions& given, World& world,
            int rank, int64_t host_memory);

  const Checkpoint& checkpoint() const { return files->checkpoint; }
  // The strategy of later requests, once its presets have been tried.
  void use(AttentionStrategy chosen);
  bool warms_up() const;
  Offload offload() const { return offload_on(backend->device(), options.offload); }
  Placement placement(const Request& request) const;
  void notice(const std::string& sentence) const {
    if (options.log) options.log(sentence);
  }

 private:
  void load(int64_t host_memory);
};

// The request on one rank; the result is empty where another one leads. `available`: bytes that the
// rank may allocate. Collective.
Result generate(RankState& state, const Request& request, int64_t available, const Events& events,
                std::stop_token stop);

}  // namespace orrery
