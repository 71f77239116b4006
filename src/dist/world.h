// The ranks of one run, and the groups that a mesh makes of them.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "dist/communicator.h"
#include "dist/mesh.h"

namespace orrery {

class World {
 public:
  virtual ~World() = default;
  virtual int size() const = 0;
  // Ranks that live in this process: all of them as threads, or the one it is. Ascending.
  virtual std::vector<int> local() const = 0;
  // The group of `ranks` (distinct, `rank` among them) as local rank `rank` sees it. Every member
  // must ask for the same list, within run(). The communicator must not outlive the world.
  virtual std::unique_ptr<Communicator> group(int rank, const std::vector<int>& ranks) = 0;
  // Runs body(rank) once for every local rank, at the same time, and returns when all have ended.
  // The first failure is thrown again here as it was; once it is on record, on_failure() is called
  // on its thread while other ranks may still run. May be called again.
  virtual void run(const std::function<void(int rank)>& body,
                   const std::function<void()>& on_failure = {}) = 0;
};

// One rank's place in a mesh, and its groups. A group of one is null: there is nothing to exchange.
struct MeshGroups {
  Mesh mesh;
  int rank = 0;
  std::unique_ptr<Communicator> tp, cp, cfg;
  std::unique_ptr<Communicator> world;  // only where no axis alone holds all ranks
  // All ranks, for what they decide together: always host memory, whatever the device.
  std::unique_ptr<Communicator> agreement;

  // The group of all ranks, in their order; null for one rank.
  Communicator* everyone() const;
  std::vector<Communicator*> list() const;  // those that there are

  Mesh::Place place() const { return mesh.place(rank); }
  bool leads() const { return rank == 0; }
};

// Called by every rank of the world within run().
MeshGroups make_groups(World& world, const Mesh& mesh, int rank);
// The place of a rank whose peers are not there, for dry runs: any collective is an error.
MeshGroups make_absent_groups(const Mesh& mesh, int rank);

}  // namespace orrery
