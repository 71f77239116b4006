#include "engine/ranks.h"

#include <algorithm>

#include "base/error.h"
#include "dist/thread_comm.h"
#include "engine/backends.h"
#include "engine/job_state.h"

namespace orrery {

namespace {

const MpiWorld* job_world(const EngineOptions& options) {
  return options.job != nullptr ? options.job->state().world.get() : nullptr;
}

}  // namespace

Mesh mesh_of(const EngineOptions& options) {
  return {options.tp_degree, options.cp_degree, options.cfg_degree};
}

std::shared_ptr<World> make_world(const EngineOptions& options) {
  if (job_world(options) != nullptr) return options.job->state().world;
  return std::make_shared<ThreadWorld>(mesh_of(options).world());
}

void check_mesh(const EngineOptions& options, const TransformerConfig& config,
                const Settings* settings) {
  const Mesh mesh = mesh_of(options);
  const MpiWorld* job = job_world(options);
  mesh.check({config.num_attention_heads, config.num_key_value_heads, {config.intermediate_size}},
             job != nullptr ? job->size() : mesh.world());
  if (settings == nullptr || mesh.cfg == 1) return;
  const bool has_branches =
      settings->guided() || (settings->transfer && settings->transfer->amplifies());
  require(has_branches, "cfg degree ", mesh.cfg,
          " shares out the branches of the guidance, but guidance_scale ", settings->guidance_scale,
          " leaves one; use cfg degree 1, or another guidance scale");
}

EngineOptions options_of_rank(const EngineOptions& options, const World& world, int rank) {
  EngineOptions mine = options;
  if (rank != 0) mine.log = {};
  const std::vector<int> local = world.local();
  const auto here = static_cast<int>(local.size());
  mine.num_threads = std::max(1, cpu_threads(mine) / here);
  const MpiWorld* job = job_world(options);
  const auto place = static_cast<int>(std::find(local.begin(), local.end(), rank) - local.begin());
  const int index = job != nullptr ? job->local_index() : place;
  if (index > 0) mine.device = device_after(options.device, index);
  return mine;
}

MeshGroups connect(World& world, const Mesh& mesh, int rank, const Backend& backend,
                   int64_t part_rows) {
  MeshGroups groups = make_groups(world, mesh, rank);
  for (std::unique_ptr<Communicator>* group :
       {&groups.tp, &groups.cp, &groups.cfg, &groups.world}) {
    if (*group) *group = make_communicator(std::move(*group), backend, part_rows);
  }
  return groups;
}

void abort(const MeshGroups& groups) {
  for (Communicator* group : groups.list()) group->abort();
}

void renew(const MeshGroups& groups) {
  for (Communicator* group : groups.list()) group->renew();
}

}  // namespace orrery
