#include "dist/world.h"

#include <numeric>

#include "base/error.h"

namespace orrery {

namespace {

class Absent final : public Communicator {
 public:
  Absent(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void all_reduce(MutView) override { refuse("all_reduce"); }
  void exchange(std::span<const Trade>) override { refuse("exchange"); }
  void exchange_halos(const Halos&) override { refuse("exchange_halos"); }
  void all_gather(MutView, View) override { refuse("all_gather"); }
  void broadcast(MutView, int) override { refuse("broadcast"); }
  void barrier() override { refuse("barrier"); }

 private:
  [[noreturn]] void refuse(const char* op) const {
    fail(ErrorKind::device, op, ": the other ", size_ - 1, " ranks of this group are not running");
  }
  int rank_, size_;
};

std::vector<int> all_ranks(const Mesh& mesh) {
  std::vector<int> all(static_cast<size_t>(mesh.world()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// make(ranks of the group, place of `rank` in it) for every axis longer than 1.
template <typename Make>
MeshGroups groups_of(const Mesh& mesh, int rank, const Make& make) {
  MeshGroups groups;
  groups.mesh = mesh;
  groups.rank = rank;
  const Mesh::Place at = mesh.place(rank);
  if (mesh.tp > 1) groups.tp = make(mesh.tp_group(rank), at.tp);
  if (mesh.cp > 1) groups.cp = make(mesh.cp_group(rank), at.cp);
  if (mesh.cfg > 1) groups.cfg = make(mesh.cfg_group(rank), at.cfg);
  if (mesh.world() > 1 && groups.everyone() == nullptr) {
    groups.world = make(all_ranks(mesh), rank);
  }
  return groups;
}

}  // namespace

Communicator* MeshGroups::everyone() const {
  for (Communicator* group : list()) {
    if (group->size() == mesh.world()) return group;
  }
  return nullptr;
}

std::vector<Communicator*> MeshGroups::list() const {
  std::vector<Communicator*> groups;
  for (Communicator* group : {tp.get(), cp.get(), cfg.get(), world.get(), agreement.get()}) {
    if (group != nullptr) groups.push_back(group);
  }
  return groups;
}

MeshGroups make_groups(World& world, const Mesh& mesh, int rank) {
  MeshGroups groups = groups_of(
      mesh, rank, [&](const std::vector<int>& ranks, int) { return world.group(rank, ranks); });
  if (mesh.world() > 1) groups.agreement = world.group(rank, all_ranks(mesh));
  return groups;
}

MeshGroups make_absent_groups(const Mesh& mesh, int rank) {
  return groups_of(mesh, rank, [](const std::vector<int>& ranks, int index) {
    return std::make_unique<Absent>(index, static_cast<int>(ranks.size()));
  });
}

}  // namespace orrery
