// Stored transformers on meshes of CPU ranks.
#pragma once

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cpu/cpu_backend.h"
#include "dist/mesh_run.h"
#include "dist/thread_comm.h"
#include "golden/golden.h"

namespace orrery::dist {

// With linear in its implementation of that name.
inline MeshOutputs evaluate(const Safetensors& files, const TransformerConfig& config,
                            const MeshInputs& inputs, const AttentionStrategy& strategy, int steps,
                            const std::string& linear, const MeshGroups& groups,
                            const StoredOptions& how = {}) {
  const std::unique_ptr<Backend> backend =
      cpu::make_cpu_backend({.num_threads = 1, .linear = linear});
  const MakeWeights stored = [&](Transformer& model, const Shard& shard) {
    return stored_weights(files, model, shard, how);
  };
  return evaluate(*backend, DType::f32, stored, config, inputs, strategy, steps, groups);
}

inline MeshOutputs one_rank(const Safetensors& files, const TransformerConfig& config,
                            const MeshInputs& inputs, const AttentionStrategy& strategy, int steps,
                            const std::string& linear, const StoredOptions& how = {}) {
  return evaluate(files, config, inputs, strategy, steps, linear, make_absent_groups({}, 0), how);
}

// What every rank got; rows travel in parts of `part_rows` or more.
inline std::vector<MeshOutputs> many_ranks(
    const Safetensors& files, const TransformerConfig& config, const MeshInputs& inputs,
    const AttentionStrategy& strategy, int steps, const std::string& linear, const Mesh& mesh,
    int64_t part_rows = std::numeric_limits<int64_t>::max(), const StoredOptions& how = {}) {
  std::vector<MeshOutputs> outputs(static_cast<size_t>(mesh.world()));
  ThreadWorld world(mesh.world(), part_rows);
  world.run([&](int rank) {
    const MeshGroups groups = make_groups(world, mesh, rank);
    outputs[static_cast<size_t>(rank)] =
        evaluate(files, config, inputs, strategy, steps, linear, groups, how);
  });
  return outputs;
}

}  // namespace orrery::dist
