#include "bench/bench.h"

#include <optional>

#include "base/error.h"
#include "bench/measurements.h"
#include "engine/ranks.h"

namespace orrery {

namespace {

void measure_on_one_device(const BenchOptions& options, const EngineOptions& engine,
                           const Lines& line) {
  if (options.what == "load") return measure_load(options, engine, line);
  BenchRank rank(options, engine, line);
  if (options.what == "layer")
    measure_layer(rank);
  else if (options.what == "vae")
    measure_vae(rank);
  else if (options.what == "step")
    measure_step(rank);
  else if (options.what == "e2e")
    measure_end_to_end(rank);
  else if (options.what == "attention")
    measure_attention(rank);
  else
    fail(ErrorKind::invalid_argument, "bench \"", options.what,
         "\" is not known; it is layer, step, vae, e2e, attention, load or link");
}

Alone measure_alone(BenchRank& rank) {
  return rank.options.what == "vae" ? measure_vae_alone(rank) : measure_step_alone(rank);
}

void measure_beside(BenchRank& rank, const Alone& one) {
  if (rank.options.what == "link")
    measure_links(rank);
  else if (rank.options.what == "vae")
    measure_vae_beside(rank, one);
  else
    measure_step_beside(rank, one);
}

}  // namespace

void run_bench(const BenchOptions& options, const EngineOptions& engine, const Lines& line) {
  const std::vector<MeshCase> meshes = meshes_of(options, engine);
  if (options.what == "link") {
    require(!meshes.empty(), "bench link: needs ranks; give --meshes, or a degree above 1");
  } else if (meshes.empty()) {
    return measure_on_one_device(options, engine, line);
  }
  require(options.what == "step" || options.what == "link" || options.what == "vae", "bench ",
          options.what, " runs on one device; step, vae and link take meshes");
  std::optional<Alone> one;  // of rank 0
  for (const MeshCase& mesh : meshes) {
    EngineOptions of_mesh = engine;
    of_mesh.tp_degree = mesh.mesh.tp;
    of_mesh.cp_degree = mesh.mesh.cp;
    of_mesh.cfg_degree = mesh.mesh.cfg;
    const std::shared_ptr<World> world = make_world(of_mesh);
    const std::vector<int> local = world->local();
    std::vector<std::unique_ptr<BenchRank>> ranks(local.size());
    const auto place = [&](int rank) { return static_cast<size_t>(rank - local.front()); };
    world->run([&](int rank) {
      const EngineOptions mine = options_of_rank(of_mesh, *world, rank);
      if (rank == 0 && !one && options.what != "link") {
        BenchRank alone(options, mine, line);
        one = measure_alone(alone);
      }
      auto bench = std::make_unique<BenchRank>(options, mine, line);
      bench->join(*world, mesh, rank);
      ranks[place(rank)] = std::move(bench);
    });
    world->run(
        [&](int rank) { measure_beside(*ranks[place(rank)], rank == 0 && one ? *one : Alone{}); },
        [&] {
          for (const auto& bench : ranks) bench->leave();
        });
    // Each on its own thread: ranks on devices part in good order only together.
    world->run([&](int rank) { ranks[place(rank)].reset(); });
  }
}

}  // namespace orrery
