#include "model/layer_stream.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/parallel.h"
#include "model/random_weights.h"

namespace orrery {

namespace {

std::byte* bytes_of(const Buffer& buffer) { return static_cast<std::byte*>(buffer.data()); }

int64_t largest(const std::vector<int64_t>& sizes) {
  return sizes.empty() ? 0 : *std::max_element(sizes.begin(), sizes.end());
}

std::vector<int64_t> layer_sizes(int num_layers, const LayerStream::VisitLayer& visit,
                                 const LayoutRules& rules) {
  std::vector<int64_t> sizes;
  for (int i = 0; i < num_layers; ++i)
    sizes.push_back(weight_bytes([&](WeightVisitor& v) { visit(i, v); }, rules));
  return sizes;
}

LayoutRules rules_of(const Backend& backend, const Safetensors& files, const LoadOptions& options) {
  return {hold_rule(files, options), options.shard, backend.fuses_weights()};
}

class PinnedLayers final : public LayerStream {
 public:
  PinnedLayers(Backend& backend, std::vector<int64_t> sizes)
      : backend_(backend), sizes_(std::move(sizes)) {
    const auto size = static_cast<size_t>(largest(sizes_));
    for (int i = 0; i < num_places(num_layers()); ++i)
      places_.push_back({backend.allocate(size), backend.make_lane(), -1});
    device_bytes_ = static_cast<int64_t>(size * places_.size());
  }

  void acquire(int layer) override {
    Place& place = place_of(layer);
    bring(layer);
    backend_.await_upload(place.lane);
    // The place of the next layer was last read by calls made before this one's.
    const int next = (layer + 1) % num_layers();
    if (&place_of(next) != &place) bring(next);
  }

  // Lays out layer `i` by fill(i, block) for each of the first `count` layers, several at a time.
  void fill(int count, const std::function<void(int i, WeightBlock& block)>& fill) {
    blocks_.resize(static_cast<size_t>(count));
    parallel_for(count, [&](int64_t i) {
      const auto at = static_cast<size_t>(i);
      blocks_[at] = host_block(static_cast<size_t>(sizes_[at]));
      WeightBlock block = block_of(static_cast<int>(i), bytes_of(blocks_[at]));
      fill(static_cast<int>(i), block);
    });
  }

  // Where layer `layer` lies on the device, with host memory to write it to.
  WeightBlock block_of(int layer, std::byte* host) {
    return {host,
            bytes_of(place_of(layer).buffer),
            DeviceKind::cpu,
            backend_.device(),
            static_cast<size_t>(sizes_[static_cast<size_t>(layer)]),
            0};
  }

 private:
  struct Place {
    Buffer buffer;
    int lane = 0;
    int holds = -1;  // layer that is there or on its way
  };

  int num_layers() const { return static_cast<int>(sizes_.size()); }
  Place& place_of(int layer) { return places_[static_cast<size_t>(layer) % places_.size()]; }

  void bring(int layer) {
    Place& place = place_of(layer);
    if (place.holds == layer) return;
    const Buffer& block = blocks_[static_cast<size_t>(layer) % blocks_.size()];
    const Shape shape{sizes_[static_cast<size_t>(layer)]};
    backend_.upload_beside(place.lane,
                           make_mut_view(place.buffer.data(), shape, DType::u8, backend_.device()),
                           make_view(block.data(), shape, DType::u8));
    place.holds = layer;
  }

  Buffer host_block(size_t size) {
    Buffer block;
    std::string problem;
    try {
      block = backend_.allocate_pinned(size);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::out_of_memory) throw;
      problem = error.what();
      block = allocate_host(size);
    }
    const std::lock_guard lock(mutex_);
    host_bytes_ += static_cast<int64_t>(size);
    if (!problem.empty())
      notice_ = "layers are copied from memory that is not pinned, which is slower: " + problem;
    return block;
  }

  Backend& backend_;
  std::vector<int64_t> sizes_;
  std::mutex mutex_;            // of the counters, while blocks are filled
  std::vector<Buffer> blocks_;  // host
  std::vector<Place> places_;   // destroyed first: waits for what still copies
};

class MappedLayers final : public LayerStream {
 public:
  MappedLayers(Backend& backend, const std::vector<int64_t>& sizes, Keep keep, VisitLayer visit,
               Safetensors files, LoadOptions options)
      : backend_(backend),
        visit_(std::move(visit)),
        files_(std::move(files)),
        options_(std::move(options)),
        keep_(keep),
        sizes_(sizes),
        present_(sizes.size(), false) {
    int64_t end = 0;
    for (int64_t size : sizes) {
      begins_.push_back(keep == Keep::all ? end : 0);
      end += size;
    }
    memory_ = backend.allocate(static_cast<size_t>(keep == Keep::all ? end : largest(sizes)));
    device_bytes_ = static_cast<int64_t>(memory_.bytes());
  }

  void acquire(int layer) override {
    const auto i = static_cast<size_t>(layer);
    if (present_[i]) return;
    // In order with the calls that read the layer before.
    std::byte* const at = bytes_of(memory_) + begins_[i];
    const DeviceKind device = backend_.device();
    WeightBlock block{at, at, device, device, static_cast<size_t>(sizes_[i]), 0};
    fill_block(
        backend_, files_, [&](WeightVisitor& v) { visit_(layer, v); }, options_, block);
    if (keep_ == Keep::one) present_.assign(present_.size(), false);
    present_[i] = true;
  }

 private:
  Backend& backend_;
  VisitLayer visit_;
  Safetensors files_;
  LoadOptions options_;
  Keep keep_;
  std::vector<int64_t> sizes_, begins_;  // in memory_, by layer
  std::vector<bool> present_;
  Buffer memory_;
};

}  // namespace

std::unique_ptr<LayerStream> LayerStream::pinned(Backend& backend, int num_layers,
                                                 const VisitLayer& visit, const Safetensors& files,
                                                 const LoadOptions& options) {
  auto stream = std::make_unique<PinnedLayers>(
      backend, layer_sizes(num_layers, visit, rules_of(backend, files, options)));
  stream->fill(num_layers, [&](int i, WeightBlock& block) {
    fill_block(
        backend, files, [&](WeightVisitor& v) { visit(i, v); }, options, block);
  });
  return stream;
}

std::unique_ptr<LayerStream> LayerStream::mapped(Backend& backend, int num_layers,
                                                 const VisitLayer& visit, Safetensors files,
                                                 LoadOptions options, Keep keep) {
  const std::vector<int64_t> sizes =
      layer_sizes(num_layers, visit, rules_of(backend, files, options));
  return std::make_unique<MappedLayers>(backend, sizes, keep, visit, std::move(files),
                                        std::move(options));
}

std::unique_ptr<LayerStream> LayerStream::random(Backend& backend, int num_layers,
                                                 const VisitLayer& visit, const HoldRule& hold,
                                                 uint64_t seed, int distinct, const Shard& shard) {
  auto stream = std::make_unique<PinnedLayers>(
      backend, layer_sizes(num_layers, visit, {hold, shard, backend.fuses_weights()}));
  const int filled = std::min(distinct, num_layers);
  stream->fill(filled, [&](int i, WeightBlock& block) {
    random_block(
        backend, [&](WeightVisitor& v) { visit(i, v); }, hold, seed + static_cast<uint64_t>(i),
        shard, block);
  });
  for (int i = filled; i < num_layers; ++i) {
    WeightBlock views = stream->block_of(i, nullptr);
    random_block(
        backend, [&](WeightVisitor& v) { visit(i, v); }, hold, seed, shard, views);
  }
  return stream;
}

}  // namespace orrery
