// Equal layers of which only a few fit on the device: their weights take turns there.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "model/weights.h"

namespace orrery {

class LayerStream {
 public:
  using VisitLayer = std::function<void(int layer, WeightVisitor&)>;

  // Every layer is laid out in pinned host memory, once. Two places on the device: while one layer
  // is used the next one is copied, after the last the first. When memory cannot be pinned, plain
  // memory takes its place and notice() says so.
  static std::unique_ptr<LayerStream> pinned(Backend& backend, int num_layers,
                                             const VisitLayer& visit, const Safetensors& files,
                                             const LoadOptions& options);
  // No copy in host memory: each layer is read from the mapped files when its turn comes. On the
  // device there is a place for one layer, or each keeps its own and is read once.
  enum class Keep : uint8_t { one, all };
  static std::unique_ptr<LayerStream> mapped(Backend& backend, int num_layers,
                                             const VisitLayer& visit, Safetensors files,
                                             LoadOptions options, Keep keep = Keep::one);
  // Random weights as pinned() holds them, of this rank's slices, with `distinct` different layers:
  // the others borrow those in turn.
  static std::unique_ptr<LayerStream> random(Backend& backend, int num_layers,
                                             const VisitLayer& visit, const HoldRule& hold,
                                             uint64_t seed, int distinct, const Shard& shard = {});
  virtual ~LayerStream() = default;

  // From here until the next acquire() the views that `visit` lists for this layer hold its
  // weights, for calls on the backend. Any order is right; ascending and around is the fast one.
  virtual void acquire(int layer) = 0;

  int64_t device_bytes() const { return device_bytes_; }
  int64_t host_bytes() const { return host_bytes_; }
  // A sentence about what is slower than it should be; empty when nothing is.
  const std::string& notice() const { return notice_; }

  // Places on the device that pinned() takes for this many layers.
  static int num_places(int num_layers) { return num_layers < 2 ? num_layers : 2; }

 protected:
  int64_t device_bytes_ = 0;
  int64_t host_bytes_ = 0;
  std::string notice_;
};

}  // namespace orrery
