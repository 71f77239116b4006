// Low-rank adapters, merged into the weights they name when a checkpoint is loaded:
// W' = W + scale * s * B A, summed in f64 over all adapters in the order given and rounded once.
// s is alpha / rank, or alpha / sqrt(rank) of a rank-stabilised adapter. Weights that no adapter
// names stay where they are.
//
// lora_names.h lists the spellings that are read. Alpha is, in this order: the module's tensor
// `<module>.alpha`; `lora_alpha` or `alpha` in the file's metadata; alpha_pattern and lora_alpha of
// a PEFT configuration, which lies in the metadata (lora_adapter_metadata) or in an
// adapter_config.json beside the file; the rank. A key of such a configuration that changes the
// result in another way is refused by name.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "io/fault_list.h"
#include "io/safetensors.h"
#include "model/weight_list.h"

namespace orrery {

class LoraAdapters {
 public:
  struct Source {
    std::filesystem::path file;  // or the folder that PEFT or diffusers wrote
    double scale = 1;
  };

  // Reads and checks every file against the network's matrices. Throws one Error a file that lists
  // all keys that name no matrix, have no partner, or whose shapes do not fit.
  LoraAdapters(const std::vector<Source>& sources, const VisitFunction& visit);

  bool empty() const { return changes_.empty(); }
  size_t size() const { return changes_.size(); }  // of the weights that are changed

  // The merged copy of the weight `name`, or an empty Tensor when no adapter touches it: see
  // LoadOptions::adapt. The copy is f32, but bf16 of a bf16 weight in a run that computes in bf16.
  Tensor merged(const std::string& name, const View& stored, DType run) const;
  // The type of that copy; empty without one. See LoadOptions::adapted_type.
  std::optional<DType> merged_type(const std::string& name, DType stored, DType run) const;

 private:
  struct Change {
    View a, b;  // [rank, in], [out, rank]; f32
    double scale = 1;
  };
  struct Module;
  struct AdapterFile;
  using Matrices = std::map<std::string, Shape>;  // of layer names
  void add(const Source& source, const Matrices& matrices);
  void add_module(const AdapterFile& from, const Module& module, const Shape& matrix,
                  FaultList& faults);

  std::map<std::string, std::vector<Change>> changes_;  // by weight name
  std::vector<Tensor> factors_;
};

}  // namespace orrery
