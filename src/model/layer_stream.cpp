#include "model/layer_stream.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/parallel.h"

namespace orrery {

namespace {

std::byte* bytes_of(const Buffer& buffer) { return static_cast<std::byte*>(buffer.data()); }

int64_t largest(const std::vector<int64_t>& sizes) {
  return sizes.empty() ? 0 : *std::max_element(sizes.begin(), sizes.end());
}

std::vector<int64_t> layer_sizes(int num_layers, const LayerStream::VisitLayer& visit,
                                 const std::function<DType(const std::string&)>& dtype_of,
                                 const Shard& shard) {
  std::vector<int64_t> sizes;
  for (int i = 0; i < num_layers; ++i) {
    sizes.push_back(block_bytes([&](WeightVisitor& v) { visit(i, v); }, dtype_of, shard));
  }
  return sizes;
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
  MappedLayers(Backend& backend, std::vector<int64_t> sizes, VisitLayer visit, Safetensors files,
               LoadOptions options)
      : backend_(backend),
        visit_(std::move(visit)),
        files_(std::move(files)),
        options_(std::move(options)),
        place_(backend.allocate(static_cast<size_t>(largest(sizes)))) {
    device_bytes_ = static_cast<int64_t>(place_.bytes());
  }

  void acquire(int layer) override {
    if (layer == holds_) return;
    // In order with the calls that read the layer before.
    WeightBlock block{bytes_of(place_),  bytes_of(place_), backend_.device(),
                      backend_.device(), place_.bytes(),   0};
    fill_block(
        backend_, files_, [&](WeightVisitor& v) { visit_(layer, v); }, options_, block);
    holds_ = layer;
  }

 private:
  Backend& backend_;
  VisitLayer visit_;
  Safetensors files_;
  LoadOptions options_;
  Buffer place_;
  int holds_ = -1;
};

}  // namespace

std::unique_ptr<LayerStream> LayerStream::pinned(Backend& backend, int num_layers,
                                                 const VisitLayer& visit, const Safetensors& files,
                                                 const LoadOptions& options) {
  const auto dtype_of = [&](const std::string& name) { return held_type(files, options, name); };
  auto stream = std::make_unique<PinnedLayers>(
      backend, layer_sizes(num_layers, visit, dtype_of, options.shard));
  stream->fill(num_layers, [&](int i, WeightBlock& block) {
    fill_block(
        backend, files, [&](WeightVisitor& v) { visit(i, v); }, options, block);
  });
  return stream;
}

std::unique_ptr<LayerStream> LayerStream::mapped(Backend& backend, int num_layers,
                                                 const VisitLayer& visit, Safetensors files,
                                                 LoadOptions options) {
  const auto dtype_of = [&](const std::string& name) { return held_type(files, options, name); };
  std::vector<int64_t> sizes = layer_sizes(num_layers, visit, dtype_of, options.shard);
  return std::make_unique<MappedLayers>(backend, std::move(sizes), visit, std::move(files),
                                        std::move(options));
}

std::unique_ptr<LayerStream> LayerStream::random(Backend& backend, int num_layers,
                                                 const VisitLayer& visit, DType dtype,
                                                 uint64_t seed, int distinct, const Shard& shard) {
  const auto dtype_of = [&](const std::string&) { return dtype; };
  auto stream =
      std::make_unique<PinnedLayers>(backend, layer_sizes(num_layers, visit, dtype_of, shard));
  const int filled = std::min(distinct, num_layers);
  stream->fill(filled, [&](int i, WeightBlock& block) {
    random_block(
        backend, [&](WeightVisitor& v) { visit(i, v); }, dtype, seed + static_cast<uint64_t>(i),
        shard, block);
  });
  for (int i = filled; i < num_layers; ++i) {
    WeightBlock views = stream->block_of(i, nullptr);
    random_block(
        backend, [&](WeightVisitor& v) { visit(i, v); }, dtype, seed, shard, views);
  }
  return stream;
}

}  // namespace orrery
