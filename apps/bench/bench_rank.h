// One rank of a benchmark: its backend, the sizes of the benchmarked request, and its lines.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "bench/mesh_case.h"
#include "dist/world.h"
#include "engine/backends.h"
#include "engine/model_weights.h"
#include "engine/settings.h"
#include "model/transformer_config.h"

namespace orrery {

using Lines = std::function<void(const std::string&)>;

struct Measurement {
  std::string name;  // of the case
  double value = 0;
  const char* unit = "s";
  double floor = 0;  // 0: none is known
  std::string peer;  // what else did the same, in the same process; empty: nothing
  double peer_value = 0;
};

Json json_line(const BenchOptions& options, const Backend& backend, const std::string& size,
               const Measurement& m);

class BenchRank {
 public:
  BenchRank(const BenchOptions& what, const EngineOptions& engine, const Lines& sink);

  // Collective.
  void join(World& world, const MeshCase& mesh, int rank);
  // Releases ranks that wait for this one, from any thread.
  void leave() const;
  bool leads() const { return groups.leads(); }
  Shard shard() const { return {groups.place().tp, groups.mesh.tp, groups.tp.get()}; }

  // Seconds of `body` with everything it asked of the device.
  double seconds(const std::function<void()>& body);
  // The fastest of several calls after one that warms up.
  double best_seconds(const std::function<void()>& call);
  // Seconds, flops and bytes of each operation that `body` asks for.
  OpTable profile(const std::function<void()>& body);
  double gemm_rate();  // flops a second that the backend reaches

  Tensor normals(const Shape& shape, int64_t seed);  // f32
  // Ids of each guidance branch.
  std::vector<std::vector<int64_t>> prompts() const;
  Sequence sequence() const;  // of the request

  // "nano 36 layers, 1280x720, ..."
  std::string size() const;
  // Lines of the leading rank.
  void report(const Measurement& measurement) { report(size(), measurement); }
  void report(const std::string& size, const Measurement& measurement);
  void report(const std::string& name, double value, const char* unit, double floor = 0);
  // What this rank has had on its device at once so far.
  void report_memory();
  // Where the time of a stage goes: one line an operation, each against the larger of what its
  // flops and its bytes need. `less` is taken off (another run's share), then all is divided by
  // `parts`.
  void report_operations(const std::string& name, const OpTable& table, const OpTable& less,
                         double parts);

  const BenchOptions options;
  const Lines& line;
  const std::unique_ptr<Backend> backend;
  const DType dtype;
  TransformerConfig config;
  const VaeConfig vae_config;
  const Offload offload;
  const bool replays;  // graphs
  Settings settings;
  MeshGroups groups;
  std::string mesh_name;
};

}  // namespace orrery
