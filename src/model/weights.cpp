#include "model/weights.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/rng.h"
#include "dist/communicator.h"
#include "io/checkpoint.h"
#include "io/fault_list.h"

namespace orrery {

int64_t Linear::out_features() const {
  int64_t total = 0;
  for (const View& weight : weights) total += weight.dim(0);
  return total;
}

int64_t Linear::in_features() const { return weights.empty() ? 0 : weights.front().dim(1); }

void apply(Backend& backend, MutView out, View x, const Linear& linear, View residual,
           Activation activation) {
  const bool reduces = linear.reduce != nullptr && linear.reduce->size() > 1;
  require(!reduces || activation == Activation::none, "linear: an activation cannot follow a partial sum");
  const bool adds = !reduces || linear.reduce->rank() == 0;
  int64_t column = 0;
  for (size_t i = 0; i < linear.weights.size(); ++i) {
    const int64_t width = linear.weights[i].dim(0);
    LinearOptions options;
    if (adds) {
      if (!linear.biases.empty()) options.bias = linear.biases[i];
      if (residual) options.residual = residual.slice(1, column, width);
      options.activation = activation;
    }
    backend.linear(out.slice(1, column, width), x, linear.weights[i], options);
    column += width;
  }
  if (reduces) linear.reduce->all_reduce(out);
}

namespace {

Shape cut(Shape shape, Split split, const Shard& shard, const std::string& name) {
  if (split == Split::none || shard.count == 1) return shape;
  const int dim = split == Split::rows ? 0 : 1;
  require(shape[dim] % shard.count == 0, "tensor parallelism: dimension ", dim, " of ", name, " ", shape,
          " does not divide by ", shard.count);
  shape[dim] /= shard.count;
  return shape;
}

View slice_of(const View& whole, Split split, const Shard& shard) {
  if (split == Split::none || shard.count == 1) return whole;
  const int dim = split == Split::rows ? 0 : 1;
  const int64_t size = whole.dim(dim) / shard.count;
  return whole.slice(dim, shard.index * size, size);
}

// Calls fn(name, shape, split) for every tensor in the order of the list.
template <typename Fn>
class Lister final : public WeightVisitor {
 public:
  explicit Lister(Fn fn) : fn_(std::move(fn)) {}
  void tensor(View&, const std::string& name, Shape shape, Split split) override {
    fn_(name, shape, split);
  }
  void linear(Linear&, const std::vector<std::string>& prefixes, const std::vector<int64_t>& out,
              int64_t in, Split split, bool has_bias) override {
    for (size_t i = 0; i < prefixes.size(); ++i) {
      fn_(prefixes[i] + ".weight", Shape{out[i], in}, split);
      if (has_bias) {
        fn_(prefixes[i] + ".bias", Shape{out[i]}, split == Split::rows ? Split::rows : Split::none);
      }
    }
  }

 private:
  Fn fn_;
};

}  // namespace

std::vector<ListedTensor> list_tensors(const VisitFunction& visit) {
  std::vector<ListedTensor> tensors;
  Lister lister([&](const std::string& name, Shape shape, Split) { tensors.push_back({name, shape}); });
  visit(lister);
  return tensors;
}

class WeightLoader final : public WeightVisitor {
 public:
  WeightLoader(Backend& backend, Safetensors files, WeightStore& store, const LoadOptions& options)
      : backend_(backend), store_(store), options_(options) {
    store_.files_ = std::move(files);
  }

  void tensor(View& slot, const std::string& name, Shape, Split split) override {
    slot = place({slice_of(stored(name), split, options_.shard)}).front();
  }

  void linear(Linear& slot, const std::vector<std::string>& prefixes, const std::vector<int64_t>&, int64_t,
              Split split, bool has_bias) override {
    std::vector<View> weights, biases;
    const Split bias_split = split == Split::rows ? Split::rows : Split::none;
    for (const std::string& prefix : prefixes) {
      weights.push_back(slice_of(stored(prefix + ".weight"), split, options_.shard));
      if (has_bias) biases.push_back(slice_of(stored(prefix + ".bias"), bias_split, options_.shard));
    }
    slot.weights = place(weights);
    slot.biases = biases.empty() ? biases : place(biases);
    slot.reduce = split == Split::columns && options_.shard.count > 1 ? options_.shard.group : nullptr;
  }

  static std::string stored_name(const Safetensors& files, const std::string& name) {
    return files.find(name) == nullptr && files.find("model." + name) != nullptr ? "model." + name : name;
  }

 private:
  View stored(const std::string& name) {
    const View view = store_.files_->view(stored_name(*store_.files_, name));
    if (!options_.adapt) return view;
    Tensor adapted = options_.adapt(name, view);
    if (!adapted) return view;
    adapted_.push_back(std::move(adapted.buffer));
    return adapted.view;
  }

  // Moves parts to the backend: in place where possible, else into one buffer, side by side when the
  // backend fuses weights.
  std::vector<View> place(const std::vector<View>& parts) {
    std::vector<View> placed;
    // A slice of a changed copy is copied once more: the rest of it need not stay in memory.
    const bool in_place = backend_.device() == DeviceKind::cpu && !backend_.is_dry() &&
                          (adapted_.empty() || options_.shard.count == 1);
    int64_t rows = 0;
    for (const View& part : parts) {
      const DType dtype = options_.dtype.value_or(part.dtype);
      store_.bytes_ += part.numel() * size_of(dtype);
      if (in_place && dtype == part.dtype && Safetensors::aligned(part)) placed.push_back(part);
      rows += part.rank() > 0 ? part.dim(0) : 1;
    }
    if (placed.size() == parts.size()) {
      for (Buffer& buffer : adapted_) store_.buffers_.push_back(std::move(buffer));
      adapted_.clear();
      return placed;
    }
    placed.clear();
    const DType dtype = options_.dtype.value_or(parts.front().dtype);
    Shape shape = parts.front().shape;
    if (shape.rank() > 0) shape[0] = rows;
    Tensor whole = backend_.allocate_tensor(shape, dtype);
    int64_t row = 0;
    for (const View& part : parts) {
      const int64_t count = part.rank() > 0 ? part.dim(0) : 1;
      MutView to = part.rank() > 0 ? whole.view.slice(0, row, count) : whole.view;
      move(to, part);
      placed.push_back(to);
      row += count;
    }
    if (backend_.fuses_weights()) placed = {whole.view};
    store_.buffers_.push_back(std::move(whole.buffer));
    adapted_.clear();
    return placed;
  }

  void move(MutView to, const View& part) {
    if (part.contiguous() && part.dtype == to.dtype && Safetensors::aligned(part)) {
      backend_.upload(to, part);
      return;
    }
    Tensor host = allocate_host_tensor(part.shape, to.dtype);
    convert(host.view, part);
    backend_.upload(to, host.view);
  }

  static float element(const std::byte* at, DType dtype) {
    switch (dtype) {
      case DType::f32: {
        float value;
        std::memcpy(&value, at, 4);
        return value;
      }
      case DType::bf16: {
        bf16 value;
        std::memcpy(&value, at, 2);
        return to_float(value);
      }
      default: {
        f16 value;
        std::memcpy(&value, at, 2);
        return to_float(value);
      }
    }
  }

  // Row by row, since a column slice has strided rows.
  static void convert(MutView to, const View& part) {
    const int64_t width = part.rank() > 0 ? part.dim(-1) : 1;
    const int64_t count = part.numel() / std::max<int64_t>(width, 1);
    const bool strided = part.rank() == 2;
    for (int64_t r = 0; r < count; ++r) {
      const int64_t start = strided ? r * part.stride(0) : r * width;
      const auto* from = static_cast<const std::byte*>(part.data) + start * size_of(part.dtype);
      for (int64_t c = 0; c < width; ++c) {
        const float value = element(from + c * size_of(part.dtype), part.dtype);
        if (to.dtype == DType::f32) to.as<float>()[r * width + c] = value;
        else to.as<bf16>()[r * width + c] = to_bf16(value);
      }
    }
  }

  Backend& backend_;
  WeightStore& store_;
  const LoadOptions& options_;
  std::vector<Buffer> adapted_;  // of the parts that are being placed
};

void WeightStore::release() {
  buffers_.clear();
  files_.reset();
  bytes_ = 0;
}

namespace {

// As check_finite(), of what one rank holds: it reads nothing else.
void check_slices(const Safetensors& files, const VisitFunction& visit, const Shard& shard) {
  FaultList faults;
  Lister lister([&](const std::string& name, Shape, Split split) {
    const std::string stored = WeightLoader::stored_name(files, name);
    const View slice = slice_of(files.view(stored), split, shard);
    const int64_t pieces = slice.contiguous() ? 1 : slice.dim(0);
    for (int64_t i = 0; i < pieces; ++i) {
      const auto fault = first_non_finite(slice.contiguous() ? slice : slice.select(0, i));
      if (!fault) continue;
      faults.add("not finite", stored, " in ", files.find(stored)->file, " holds ", *fault, " of slice ",
                 shard.index, " of ", shard.count, pieces > 1 ? concat(", row ", i) : "");
      break;
    }
  });
  visit(lister);
  faults.raise(ErrorKind::numeric, files.origin().string());
}

}  // namespace

void check_weights(const Safetensors& files, const VisitFunction& visit, const LoadOptions& options) {
  std::vector<TensorExpectation> expected;
  Lister lister([&](const std::string& name, Shape shape, Split split) {
    cut(shape, split, options.shard, name);
    expected.push_back({WeightLoader::stored_name(files, name), shape, false});
  });
  visit(lister);
  check_tensors(files, expected, options.ignored);
  if (!options.check_finite) return;
  if (options.shard.count == 1) check_finite(files, expected);
  else check_slices(files, visit, options.shard);
}

WeightStore fill_weights(Backend& backend, Safetensors files, const VisitFunction& visit,
                         const LoadOptions& options) {
  WeightStore store;
  WeightLoader loader(backend, std::move(files), store, options);
  visit(loader);
  return store;
}

WeightStore load_weights(Backend& backend, Safetensors files, const VisitFunction& visit,
                         const LoadOptions& options) {
  check_weights(files, visit, options);
  return fill_weights(backend, std::move(files), visit, options);
}

namespace {
class Placer final : public WeightVisitor {
 public:
  Placer(Backend& dry, DType dtype, const Shard& shard) : dry_(dry), dtype_(dtype), shard_(shard) {}
  int64_t bytes() const { return bytes_; }

  void tensor(View& slot, const std::string& name, Shape shape, Split split) override {
    slot = make(cut(shape, split, shard_, name));
  }
  void linear(Linear& slot, const std::vector<std::string>& prefixes, const std::vector<int64_t>& out,
              int64_t in, Split split, bool has_bias) override {
    slot = {};
    int64_t rows = 0;
    for (size_t i = 0; i < prefixes.size(); ++i) {
      const Shape shape = cut({out[i], in}, split, shard_, prefixes[i]);
      const int64_t bias = split == Split::rows ? shape[0] : out[i];
      rows += shape[0];
      if (dry_.fuses_weights() && i + 1 < prefixes.size()) continue;
      const int64_t held = dry_.fuses_weights() ? rows : shape[0];
      slot.weights.push_back(make({held, shape[1]}));
      if (has_bias) slot.biases.push_back(make({dry_.fuses_weights() ? rows : bias}));
    }
  }

 private:
  View make(Shape shape) {
    bytes_ += shape.numel() * size_of(dtype_);
    // One page of address space stands for any weight of a dry run.
    return make_view(reinterpret_cast<const void*>(uintptr_t{1} << 42), shape, dtype_, dry_.device());
  }

  Backend& dry_;
  DType dtype_;
  Shard shard_;
  int64_t bytes_ = 0;
};
}  // namespace

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

class RandomWeights final : public WeightVisitor {
 public:
  RandomWeights(Backend& backend, WeightStore& store, DType dtype, uint64_t seed)
      : backend_(backend), store_(store), dtype_(dtype), noise_(backend.allocate_tensor({RandomCuts::kBlock}, dtype)) {
    const std::vector<float> values = RandomCuts::normals(seed);
    Tensor staged = backend.allocate_tensor({RandomCuts::kBlock}, DType::f32);
    backend.upload(staged.view, make_view(values.data(), staged.view.shape, DType::f32));
    backend.lincomb(noise_.view, {{RandomCuts::kDeviation, staged.view}});
  }

  void tensor(View& slot, const std::string& name, Shape shape, Split) override {
    slot = make(shape, RandomCuts::is_ones(name));
  }
  void linear(Linear& slot, const std::vector<std::string>& prefixes, const std::vector<int64_t>& out,
              int64_t in, Split, bool has_bias) override {
    slot = {};
    int64_t rows = 0;
    for (size_t i = 0; i < prefixes.size(); ++i) {
      rows += out[i];
      if (backend_.fuses_weights() && i + 1 < prefixes.size()) continue;
      slot.weights.push_back(make({rows, in}, false));
      if (has_bias) slot.biases.push_back(make({rows}, false));
      rows = 0;
    }
  }

 private:
  View make(Shape shape, bool ones) {
    Tensor tensor = backend_.allocate_tensor(shape, dtype_);
    const int64_t count = shape.numel();
    store_.bytes_ += count * size_of(dtype_);
    if (ones) {
      backend_.fill(tensor.view, 1.0f);
    } else {
      const MutView flat = tensor.view.reshape({count});
      cuts_.next(count, [&](int64_t at, int64_t from, int64_t size) {
        backend_.copy(flat.slice(0, at, size), noise_.view.slice(0, from, size));
      });
    }
    store_.buffers_.push_back(std::move(tensor.buffer));
    return tensor.view;
  }

  Backend& backend_;
  WeightStore& store_;
  DType dtype_;
  Tensor noise_;
  RandomCuts cuts_;
};

WeightStore random_weights(Backend& backend, const VisitFunction& visit, DType dtype, uint64_t seed) {
  WeightStore store;
  RandomWeights visitor(backend, store, dtype, seed);
  visit(visitor);
  return store;
}

int64_t place_weights(Backend& dry, const VisitFunction& visit, DType dtype, const Shard& shard) {
  Placer placer(dry, dtype, shard);
  visit(placer);
  return placer.bytes();
}

}  // namespace orrery
