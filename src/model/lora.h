// Low-rank adapters (docs/modes.md), merged into the weights they name when
// a checkpoint is loaded: W' = W + scale * (alpha / rank) * B A, summed in f32 over all adapters in
// the order given and rounded once to the type W is stored in. Weights that no adapter names stay
// where they are.
//
// Keys: `<module>.lora_A[.<adapter>].weight` [rank, in], `<module>.lora_B[.<adapter>].weight`
// [out, rank], and perhaps `<module>.alpha` (a scalar). A module is named as the checkpoint names
// it or as the original framework does, with or without a leading "transformer.",
// "base_model.model." or "model.". Alpha is, in this order: the tensor; `lora_alpha` or `alpha` in
// the file's metadata; `lora_alpha` of an adapter_config.json beside the file; the rank.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"
#include "model/weight_list.h"

namespace orrery {

class LoraAdapters {
 public:
  struct Source {
    std::filesystem::path file;
    double scale = 1;
  };

  // Reads and checks every file against the network's matrices. Throws one Error a file that lists
  // all keys that name no matrix, have no partner, or whose shapes do not fit.
  LoraAdapters(const std::vector<Source>& sources, const VisitFunction& visit);

  bool empty() const { return changes_.empty(); }
  size_t size() const { return changes_.size(); }  // of the weights that are changed

  // The merged copy of the weight `name`, or an empty Tensor when no adapter touches it: see
  // LoadOptions::adapt.
  Tensor merged(const std::string& name, const View& stored) const;

 private:
  struct Change {
    View a, b;  // [rank, in], [out, rank]; f32
    float scale = 1;
  };
  void add(const Source& source, const std::map<std::string, Shape>& matrices);

  std::map<std::string, std::vector<Change>> changes_;  // by weight name
  std::vector<Tensor> factors_;
};

// "layers.3.self_attn.add_q_proj" of "transformer.layers.3.self_attn.q_proj_moe_gen".
std::string lora_module(std::string_view key);

}  // namespace orrery
