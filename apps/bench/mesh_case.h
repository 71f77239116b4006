// Meshes that a benchmark measures.
#pragma once

#include <string>
#include <vector>

#include "bench/bench.h"
#include "dist/mesh.h"

namespace orrery {

struct MeshCase {
  Mesh mesh;
  int64_t part_rows = 0;  // 0: the engine's choice

  // "tp 2 x cp 2", "cp 2, parts of 4096 rows".
  std::string name() const;
};

// Of options.meshes ("tp2cp2,cp2@4096"), else the mesh of the engine's degrees; empty: one device.
std::vector<MeshCase> meshes_of(const BenchOptions& options, const EngineOptions& engine);

}  // namespace orrery
