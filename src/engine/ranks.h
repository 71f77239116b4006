// The ranks that serve one engine: how many, where, and what each is given.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"
#include "dist/world.h"
#include "engine/settings.h"
#include "orrery/engine.h"

namespace orrery {

// The job's processes when mpirun started this one, else threads of it, one for each place of the
// mesh.
std::shared_ptr<World> make_world(const EngineOptions& options);

Mesh mesh_of(const EngineOptions& options);

// Refuses degrees that do not fit the checkpoint or the number of ranks, before any collective.
// With `settings`, also a guidance degree that leaves ranks without a branch.
void check_mesh(const EngineOptions& options, const TransformerConfig& config,
                const Settings* settings = nullptr);

// What one rank of the world is opened with: its share of the CPU's threads, its device, and
// notices from rank 0 only.
EngineOptions options_of_rank(const EngineOptions& options, const World& world, int rank);

// The groups of one rank, for memory of its backend's device. Called by every rank within
// World::run(). `part_rows` as in Communicator; 0: the engine's choice.
MeshGroups connect(World& world, const Mesh& mesh, int rank, const Backend& backend,
                   int64_t part_rows = 0);

// Ends what waits for this rank's peers, from any thread.
void abort(const MeshGroups& groups);
// Makes the groups ready again after abort(). Called by every rank within World::run().
void renew(const MeshGroups& groups);

}  // namespace orrery
