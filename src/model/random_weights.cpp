#include "model/random_weights.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "base/rng.h"
#include "tensor/convert.h"

namespace orrery {

bool RandomCuts::is_ones(std::string_view name) {
  return name.find("norm") != std::string_view::npos || name.ends_with("gamma");
}

std::vector<float> RandomCuts::normals(uint64_t seed) {
  std::vector<float> values(kBlock);
  NormalGenerator(RngKind::cuda, static_cast<int64_t>(seed)).fill(values);
  return values;
}

void RandomCuts::next(int64_t count, const std::function<void(int64_t, int64_t, int64_t)>& piece) {
  for (int64_t at = 0; at < count;) {
    const int64_t size = std::min(kBlock - next_, count - at);
    piece(at, next_, size);
    at += size;
    next_ = (next_ + size + 8 * 1013) % kBlock / 8 * 8;
  }
}

namespace {

class Maker {
 public:
  Maker(Backend& backend, uint64_t seed, const Shard& shard, WeightMemory memory)
      : backend_(backend), seed_(seed), shard_(shard), memory_(memory) {}

  void make(const VisitFunction& visit, const HoldRule& hold) {
    WeightLayout layout({hold, shard_, backend_.fuses_weights()},
                        [this](const WeightRoom& room) { return place(room); });
    visit(layout);
  }

 private:
  Operand place(const WeightRoom& room) {
    require(!room.held.scales, ErrorKind::unsupported, "random weights: ", room.parts.front().name,
            " is held in ", name_of(room.held.dtype), "; they are made in f32 and bf16 only");
    const bool in_host = room.parts.front().kind == WeightPart::Kind::table &&
                         !memory_.is_block() && backend_.device() != DeviceKind::cpu;
    if (in_host) {  // where the one of a file stays
      Tensor table = allocate_host_tensor(room.shape, room.held.dtype);
      draw(table.view, false);
      const View view = table.view;
      memory_.store().keep(std::move(table.buffer));
      return view;
    }
    const WeightMemory::Room made = memory_.make(room);
    for (const WeightPart& part : room.parts) {
      if (made.write) write(WeightRoom::rows_of(made.write, part), part);
    }
    return made.read;
  }

  void write(MutView out, const WeightPart& part) {
    const bool on_backend = memory_.on_backend();
    if (part.kind == WeightPart::Kind::tensor && RandomCuts::is_ones(part.name))
      return fill_ones(out);
    if (part.held == part.shape) return draw(out, on_backend);
    const Tensor whole = on_backend ? backend_.allocate_tensor(part.shape, out.dtype)
                                    : allocate_host_tensor(part.shape, out.dtype);
    draw(whole.view, on_backend);
    copy(out, part.slice(whole.view, shard_), on_backend);
  }

  void draw(MutView out, bool on_backend) {
    const MutView flat = out.reshape({out.numel()});
    const View noise = noise_in(out.dtype, on_backend);
    cuts_.next(out.numel(), [&](int64_t at, int64_t from, int64_t count) {
      copy(flat.slice(0, at, count), noise.slice(0, from, count), on_backend);
    });
  }

  void copy(MutView out, View x, bool on_backend) {
    on_backend ? backend_.copy(out, x) : convert(out, x);
  }

  void fill_ones(MutView out) {
    if (memory_.on_backend()) return backend_.fill(out, 1.0f);
    const std::vector<float> ones(static_cast<size_t>(out.numel()), 1.0f);
    convert(out, make_view(ones.data(), out.shape, DType::f32));
  }

  // The block of normals, in host memory or on the backend.
  View noise_in(DType dtype, bool on_backend) {
    Tensor& noise = noise_[{dtype, on_backend}];
    if (noise) return noise.view;
    const Shape shape{RandomCuts::kBlock};
    if (on_backend) {
      const View host = noise_in(dtype, false);
      noise = backend_.allocate_tensor(shape, dtype);
      backend_.upload(noise.view, host);
    } else {
      std::vector<float> values = RandomCuts::normals(seed_);
      for (float& value : values) value *= RandomCuts::kDeviation;
      noise = allocate_host_tensor(shape, dtype);
      convert(noise.view, make_view(values.data(), shape, DType::f32));
    }
    return noise.view;
  }

  Backend& backend_;
  uint64_t seed_;
  Shard shard_;
  WeightMemory memory_;
  RandomCuts cuts_;
  std::map<std::pair<DType, bool>, Tensor> noise_;
};

}  // namespace

WeightStore random_weights(Backend& backend, const VisitFunction& visit, const HoldRule& hold,
                           uint64_t seed, const Shard& shard) {
  WeightStore store;
  Maker(backend, seed, shard, WeightMemory(backend, store)).make(visit, hold);
  return store;
}

void random_block(Backend& backend, const VisitFunction& visit, const HoldRule& hold, uint64_t seed,
                  const Shard& shard, WeightBlock& block) {
  Maker(backend, seed, shard, WeightMemory(backend, block)).make(visit, hold);
}

}  // namespace orrery
