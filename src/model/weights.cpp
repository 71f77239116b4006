#include "model/weights.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/parallel.h"
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
  require(!reduces || activation == Activation::none,
          "linear: an activation cannot follow a partial sum");
  const bool adds = !reduces || linear.reduce->rank() == 0;
  const auto project = [&](const RowRange& part) {
    int64_t column = 0;
    for (size_t i = 0; i < linear.weights.size(); ++i) {
      const int64_t width = linear.weights[i].dim(0);
      const auto block = [&](const View& all) {
        return MutView::cast(all.slice(0, part.begin, part.count).slice(1, column, width));
      };
      LinearOptions options;
      if (adds) {
        if (!linear.biases.empty()) options.bias = linear.biases[i];
        if (residual) options.residual = block(residual);
        options.activation = activation;
      }
      backend.linear(block(out), x.slice(0, part.begin, part.count), linear.weights[i], options);
      column += width;
    }
  };
  if (!reduces) return project({0, out.dim(0)});
  // The sum of one part travels while the next is computed.
  Communicator::Ticket last = 0;
  for (const RowRange& part : row_parts(out.dim(0), linear.reduce)) {
    project(part);
    last = linear.reduce->start_all_reduce(out.slice(0, part.begin, part.count));
  }
  linear.reduce->finish(last);
}

namespace {

Shape cut(Shape shape, Split split, const Shard& shard, const std::string& name) {
  if (split == Split::none || shard.count == 1) return shape;
  const int dim = split == Split::rows ? 0 : 1;
  require(shape[dim] % shard.count == 0, "tensor parallelism: dimension ", dim, " of ", name, " ",
          shape, " does not divide by ", shard.count);
  shape[dim] /= shard.count;
  return shape;
}

// A bias goes with its matrix's rows.
Split bias_split(Split matrix) { return matrix == Split::rows ? Split::rows : Split::none; }

View slice_of(const View& whole, Split split, const Shard& shard) {
  if (split == Split::none || shard.count == 1) return whole;
  const int dim = split == Split::rows ? 0 : 1;
  const int64_t size = whole.dim(dim) / shard.count;
  return whole.slice(dim, shard.index * size, size);
}

constexpr size_t kBlockAlignment = 256;  // as an arena promises

// The next room of a block on its write or read side; the read side comes last and moves on.
MutView take(WeightBlock& block, const Shape& shape, DType dtype, bool read) {
  const auto bytes = static_cast<size_t>(shape.numel() * size_of(dtype));
  const size_t padded = (bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
  require(block.used + padded <= block.capacity, "weights: a block of ", block.capacity,
          " bytes has no room for ", shape, " behind ", block.used);
  const MutView room =
      read ? make_mut_view(block.read + block.used, shape, dtype, block.read_device)
           : make_mut_view(block.write + block.used, shape, dtype, block.write_device);
  if (read) block.used += padded;
  return room;
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
        fn_(prefixes[i] + ".bias", Shape{out[i]}, bias_split(split));
      }
    }
  }

 private:
  Fn fn_;
};

}  // namespace

StoredAs stored_as_listed(const Safetensors& files, const std::string& name, const Shape& shape) {
  const bool wrapped = files.find(name) == nullptr && files.find("model." + name) != nullptr;
  return {{{wrapped ? "model." + name : name, shape, false}}, {}};
}

std::vector<ListedTensor> list_tensors(const VisitFunction& visit) {
  std::vector<ListedTensor> tensors;
  Lister lister([&](const std::string& name, Shape shape, Split) {
    tensors.push_back({name, shape});
  });
  visit(lister);
  return tensors;
}

class WeightLoader final : public WeightVisitor {
 public:
  // Into memory of its own, or into `block`, which must outlive the views.
  WeightLoader(Backend& backend, Safetensors files, WeightStore& store, const LoadOptions& options,
               WeightBlock* block = nullptr)
      : backend_(backend), store_(store), options_(options), block_(block) {
    store_.files_ = std::move(files);
  }

  void tensor(View& slot, const std::string& name, Shape shape, Split split) override {
    slot = place({slice_of(stored(name, shape), split, options_.shard)}).front();
  }

  // As it lies in the mapped file.
  void table(View& slot, const std::string& name, Shape shape) override {
    if (block_ != nullptr || backend_.device() == DeviceKind::cpu)
      return tensor(slot, name, shape, Split::none);
    slot = stored(name, shape);
    for (Buffer& buffer : made_) store_.buffers_.push_back(std::move(buffer));
    made_.clear();
  }

  void linear(Linear& slot, const std::vector<std::string>& prefixes,
              const std::vector<int64_t>& out, int64_t in, Split split, bool has_bias) override {
    std::vector<View> weights, biases;
    for (size_t i = 0; i < prefixes.size(); ++i) {
      weights.push_back(
          slice_of(stored(prefixes[i] + ".weight", {out[i], in}), split, options_.shard));
      if (has_bias) {
        biases.push_back(
            slice_of(stored(prefixes[i] + ".bias", {out[i]}), bias_split(split), options_.shard));
      }
    }
    slot.weights = place(weights);
    slot.biases = biases.empty() ? biases : place(biases);
    slot.reduce =
        split == Split::columns && options_.shard.count > 1 ? options_.shard.group : nullptr;
  }

 private:
  View stored(const std::string& name, const Shape& shape) {
    const StoredAs as = options_.dialect(*store_.files_, name, shape);
    View view;
    if (as.make) {
      Tensor made = as.make(*store_.files_);
      view = made.view;
      made_.push_back(std::move(made.buffer));
    } else {
      view = store_.files_->view(as.parts.front().name);
      view = make_view(view.data, shape, view.dtype);
    }
    if (!options_.adapt) return view;
    Tensor adapted = options_.adapt(name, view);
    if (!adapted) return view;
    made_.push_back(std::move(adapted.buffer));
    return adapted.view;
  }

  // Moves parts to the backend: in place where possible, else into one buffer, side by side when
  // the backend fuses weights.
  std::vector<View> place(const std::vector<View>& parts) {
    std::vector<View> placed;
    // A slice of a changed copy is copied once more: the rest of it need not stay in memory.
    const bool in_place = block_ == nullptr && backend_.device() == DeviceKind::cpu &&
                          !backend_.is_dry() && (made_.empty() || options_.shard.count == 1);
    int64_t rows = 0;
    for (const View& part : parts) {
      const DType dtype = options_.dtype.value_or(part.dtype);
      store_.bytes_ += part.numel() * size_of(dtype);
      if (in_place && dtype == part.dtype && Safetensors::aligned(part)) placed.push_back(part);
      rows += part.rank() > 0 ? part.dim(0) : 1;
    }
    if (placed.size() == parts.size()) {
      for (Buffer& buffer : made_) store_.buffers_.push_back(std::move(buffer));
      made_.clear();
      return placed;
    }
    placed.clear();
    // Where a changed copy lies beside a stored part, the wider type.
    const auto wider = [](const View& x, const View& y) {
      return size_of(x.dtype) < size_of(y.dtype);
    };
    const DType dtype =
        options_.dtype.value_or(std::max_element(parts.begin(), parts.end(), wider)->dtype);
    Shape shape = parts.front().shape;
    if (shape.rank() > 0) shape[0] = rows;
    const Room whole = make_room(shape, dtype);
    int64_t row = 0;
    for (const View& part : parts) {
      const int64_t count = part.rank() > 0 ? part.dim(0) : 1;
      const auto of = [&](MutView x) { return part.rank() > 0 ? x.slice(0, row, count) : x; };
      move(of(whole.write), part);
      placed.push_back(of(whole.read));
      row += count;
    }
    if (backend_.fuses_weights()) placed = {whole.read};
    made_.clear();
    return placed;
  }

  struct Room {
    MutView write, read;
  };
  Room make_room(Shape shape, DType dtype) {
    if (block_ != nullptr)
      return {take(*block_, shape, dtype, false), take(*block_, shape, dtype, true)};
    Tensor whole = backend_.allocate_tensor(shape, dtype);
    store_.buffers_.push_back(std::move(whole.buffer));
    return {whole.view, whole.view};
  }

  void move(MutView to, const View& part) {
    const bool is_plain = part.contiguous() && part.dtype == to.dtype && Safetensors::aligned(part);
    // The backend serves one thread; blocks in host memory may be filled by several.
    if (block_ != nullptr && block_->write != block_->read) {
      if (is_plain)
        std::memcpy(to.mut(), part.data, static_cast<size_t>(part.bytes()));
      else
        convert(to, part);
      return;
    }
    if (is_plain) return backend_.upload(to, part);
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
      if (part.dtype == to.dtype) {
        const int64_t bytes = width * size_of(to.dtype);
        std::memcpy(to.as<std::byte>() + r * bytes, from, static_cast<size_t>(bytes));
        continue;
      }
      for (int64_t c = 0; c < width; ++c) {
        const float value = element(from + c * size_of(part.dtype), part.dtype);
        if (to.dtype == DType::f32)
          to.as<float>()[r * width + c] = value;
        else
          to.as<bf16>()[r * width + c] = to_bf16(value);
      }
    }
  }

  Backend& backend_;
  WeightStore& store_;
  const LoadOptions& options_;
  WeightBlock* block_;
  std::vector<Buffer> made_;  // of the parts that are being placed
};

void WeightStore::release() {
  buffers_.clear();
  files_.reset();
  bytes_ = 0;
}

namespace {

// As check_finite(), of what one rank holds: it reads nothing else.
std::vector<std::string> check_slices(const Safetensors& files, const VisitFunction& visit,
                                      const LoadOptions& options) {
  const Shard& shard = options.shard;
  struct Slice {
    std::string stored;
    View view;
    std::string fault, unlikely;
  };
  std::vector<Slice> slices;
  Lister lister([&](const std::string& name, Shape shape, Split split) {
    for (const TensorExpectation& part : options.dialect(files, name, shape).parts)
      slices.push_back({part.name, slice_of(files.view(part.name), split, shard), "", ""});
  });
  visit(lister);
  parallel_for(static_cast<int64_t>(slices.size()), [&](int64_t at) {
    Slice& slice = slices[static_cast<size_t>(at)];
    const int64_t pieces = slice.view.contiguous() ? 1 : slice.view.dim(0);
    for (int64_t i = 0; i < pieces && slice.fault.empty(); ++i) {
      const ValueRange range =
          value_range(slice.view.contiguous() ? slice.view : slice.view.select(0, i));
      const std::string row = pieces > 1 ? concat(" of row ", i) : "";
      if (range.fault) slice.fault = *range.fault + row;
      if (!range.is_likely()) slice.unlikely = range.unlikely() + row;
    }
  });
  FaultList faults;
  std::vector<std::string> unlikely;
  for (const Slice& slice : slices) {
    const auto sentence = [&](const std::string& value) {
      return concat(slice.stored, " in ", files.find(slice.stored)->file, " holds ", value,
                    " of slice ", shard.index, " of ", shard.count);
    };
    if (!slice.fault.empty())
      faults.add("not finite", sentence(slice.fault));
    else if (!slice.unlikely.empty())
      unlikely.push_back(sentence(slice.unlikely));
  }
  faults.raise(ErrorKind::numeric, files.origin().string());
  return unlikely;
}

}  // namespace

std::vector<std::string> check_weights(const Safetensors& files, const VisitFunction& visit,
                                       const LoadOptions& options) {
  std::vector<TensorExpectation> expected;
  Lister lister([&](const std::string& name, Shape shape, Split split) {
    cut(shape, split, options.shard, name);
    for (TensorExpectation& part : options.dialect(files, name, shape).parts)
      expected.push_back(std::move(part));
  });
  visit(lister);
  check_tensors(files, expected, options.ignored);
  if (!options.check_finite) return {};
  return options.shard.count == 1 ? check_finite(files, expected)
                                  : check_slices(files, visit, options);
}

WeightStore fill_weights(Backend& backend, Safetensors files, const VisitFunction& visit,
                         const LoadOptions& options) {
  WeightStore store;
  WeightLoader loader(backend, std::move(files), store, options);
  visit(loader);
  return store;
}

void fill_block(Backend& backend, const Safetensors& files, const VisitFunction& visit,
                const LoadOptions& options, WeightBlock& block) {
  WeightStore store;
  WeightLoader loader(backend, files, store, options, &block);
  visit(loader);
}

DType held_type(const Safetensors& files, const LoadOptions& options, const std::string& name) {
  if (options.dtype) return *options.dtype;
  return files.view(options.dialect(files, name, {}).parts.front().name).dtype;
}

namespace {

class BlockSizer final : public WeightVisitor {
 public:
  BlockSizer(const std::function<DType(const std::string&)>& dtype_of, const Shard& shard)
      : dtype_of_(dtype_of), shard_(shard) {}
  int64_t bytes() const { return bytes_; }

  void tensor(View&, const std::string& name, Shape shape, Split split) override {
    add(cut(shape, split, shard_, name).numel(), name);
  }
  void linear(Linear&, const std::vector<std::string>& prefixes, const std::vector<int64_t>& out,
              int64_t in, Split split, bool has_bias) override {
    int64_t weights = 0, biases = 0;
    for (size_t i = 0; i < prefixes.size(); ++i) {
      const Shape shape = cut({out[i], in}, split, shard_, prefixes[i]);
      weights += shape.numel();
      biases += split == Split::rows ? shape[0] : out[i];
    }
    add(weights, prefixes.front() + ".weight");
    if (has_bias) add(biases, prefixes.front() + ".bias");
  }

 private:
  void add(int64_t count, const std::string& name) {
    constexpr auto kStep = static_cast<int64_t>(kBlockAlignment);
    bytes_ += (count * size_of(dtype_of_(name)) + kStep - 1) / kStep * kStep;
  }

  const std::function<DType(const std::string&)>& dtype_of_;
  Shard shard_;
  int64_t bytes_ = 0;
};

}  // namespace

int64_t block_bytes(const VisitFunction& visit,
                    const std::function<DType(const std::string&)>& dtype_of, const Shard& shard) {
  BlockSizer sizer(dtype_of, shard);
  visit(sizer);
  return sizer.bytes();
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
  void linear(Linear& slot, const std::vector<std::string>& prefixes,
              const std::vector<int64_t>& out, int64_t in, Split split, bool has_bias) override {
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
    return make_view(reinterpret_cast<const void*>(uintptr_t{1} << 42), shape, dtype_,
                     dry_.device());
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

namespace {

// This rank's slices of random tensors. What lies where and what writes it is the heirs' matter.
class RandomSlices : public WeightVisitor {
 public:
  void tensor(View& slot, const std::string& name, Shape shape, Split split) final {
    slot = place({{shape, split, name}}, RandomCuts::is_ones(name)).front();
  }
  void linear(Linear& slot, const std::vector<std::string>& prefixes,
              const std::vector<int64_t>& out, int64_t in, Split split, bool has_bias) final {
    std::vector<Part> weights, biases;
    for (size_t i = 0; i < prefixes.size(); ++i) {
      weights.push_back({{out[i], in}, split, prefixes[i]});
      biases.push_back({{out[i]}, bias_split(split), prefixes[i]});
    }
    slot.weights = place(weights, false);
    slot.biases = has_bias ? place(biases, false) : std::vector<View>{};
    slot.reduce = split == Split::columns && shard_.count > 1 ? shard_.group : nullptr;
  }

 protected:
  RandomSlices(const Backend& backend, const Shard& shard)
      : fuses_(backend.fuses_weights()), shard_(shard) {}

  struct Room {
    MutView write, read;  // `write` is empty where nothing is written
  };
  virtual Room make_room(const Shape& shape) = 0;
  // Of a whole tensor while its slice is taken.
  virtual Tensor make_scratch(const Shape& shape) = 0;
  virtual void fill_ones(MutView out) = 0;
  virtual void copy(MutView out, View x) = 0;

  Tensor noise_;  // [RandomCuts::kBlock] where the heir copies from

 private:
  struct Part {
    Shape shape;  // whole
    Split split;
    std::string name;
  };

  // One after the other in one room; as one view when the backend fuses weights.
  std::vector<View> place(const std::vector<Part>& parts, bool ones) {
    std::vector<Shape> shapes;
    int64_t rows = 0;
    for (const Part& part : parts) {
      shapes.push_back(cut(part.shape, part.split, shard_, part.name));
      rows += shapes.back()[0];
    }
    Shape all = shapes.front();
    all[0] = rows;
    const Room room = make_room(all);
    std::vector<View> placed;
    int64_t row = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      if (room.write) write(room.write.slice(0, row, shapes[i][0]), parts[i], ones);
      placed.push_back(room.read.slice(0, row, shapes[i][0]));
      row += shapes[i][0];
    }
    if (fuses_) return {room.read};
    return placed;
  }

  void write(MutView out, const Part& part, bool ones) {
    if (ones) return fill_ones(out);
    if (out.shape == part.shape) return draw(out);
    const Tensor whole = make_scratch(part.shape);
    draw(whole.view);
    copy(out, slice_of(whole.view, part.split, shard_));
  }

  void draw(MutView out) {
    const MutView flat = out.reshape({out.numel()});
    cuts_.next(out.numel(), [&](int64_t at, int64_t from, int64_t count) {
      copy(flat.slice(0, at, count), noise_.view.slice(0, from, count));
    });
  }

  bool fuses_;
  Shard shard_;
  RandomCuts cuts_;
};

}  // namespace

class RandomWeights final : public RandomSlices {
 public:
  RandomWeights(Backend& backend, WeightStore& store, DType dtype, uint64_t seed,
                const Shard& shard)
      : RandomSlices(backend, shard), backend_(backend), store_(store), dtype_(dtype) {
    const std::vector<float> values = RandomCuts::normals(seed);
    noise_ = backend.allocate_tensor({RandomCuts::kBlock}, dtype);
    const Tensor staged = backend.allocate_tensor({RandomCuts::kBlock}, DType::f32);
    backend.upload(staged.view, make_view(values.data(), staged.view.shape, DType::f32));
    backend.lincomb(noise_.view, {{RandomCuts::kDeviation, staged.view}});
  }

  // In host memory, where the one of a file stays.
  void table(View& slot, const std::string& name, Shape shape) override {
    if (backend_.device() == DeviceKind::cpu) return tensor(slot, name, shape, Split::none);
    const Tensor noise = allocate_host_tensor({RandomCuts::kBlock}, dtype_);
    backend_.download(noise.view, noise_.view);
    Tensor table = allocate_host_tensor(shape, dtype_);
    const int64_t width = size_of(dtype_);
    RandomCuts().next(shape.numel(), [&](int64_t at, int64_t from, int64_t count) {
      std::memcpy(table.view.as<std::byte>() + at * width,
                  noise.view.as<std::byte>() + from * width, static_cast<size_t>(count * width));
    });
    slot = table.view;
    store_.buffers_.push_back(std::move(table.buffer));
  }

 private:
  Room make_room(const Shape& shape) override {
    Tensor tensor = backend_.allocate_tensor(shape, dtype_);
    store_.bytes_ += tensor.view.bytes();
    store_.buffers_.push_back(std::move(tensor.buffer));
    return {tensor.view, tensor.view};
  }
  Tensor make_scratch(const Shape& shape) override {
    return backend_.allocate_tensor(shape, dtype_);
  }
  void fill_ones(MutView out) override { backend_.fill(out, 1.0f); }
  void copy(MutView out, View x) override { backend_.copy(out, x); }

  Backend& backend_;
  WeightStore& store_;
  DType dtype_;
};

WeightStore random_weights(Backend& backend, const VisitFunction& visit, DType dtype, uint64_t seed,
                           const Shard& shard) {
  WeightStore store;
  RandomWeights visitor(backend, store, dtype, seed, shard);
  visit(visitor);
  return store;
}

namespace {

class RandomBlock final : public RandomSlices {
 public:
  RandomBlock(const Backend& backend, DType dtype, uint64_t seed, const Shard& shard,
              WeightBlock& block)
      : RandomSlices(backend, shard), dtype_(dtype), block_(block) {
    if (block.write == nullptr) return;
    const std::vector<float> normals = RandomCuts::normals(seed);
    noise_ = allocate_host_tensor({RandomCuts::kBlock}, dtype);
    for (size_t i = 0; i < normals.size(); ++i)
      store(noise_.view, static_cast<int64_t>(i), RandomCuts::kDeviation * normals[i]);
  }

 private:
  Room make_room(const Shape& shape) override {
    const MutView write = block_.write != nullptr ? take(block_, shape, dtype_, false) : MutView{};
    return {write, take(block_, shape, dtype_, true)};
  }
  Tensor make_scratch(const Shape& shape) override { return allocate_host_tensor(shape, dtype_); }
  void fill_ones(MutView out) override {
    for (int64_t i = 0; i < out.numel(); ++i) store(out, i, 1.0f);
  }
  // Rows lie together, of a slice of columns each by itself.
  void copy(MutView out, View x) override {
    const int64_t pieces = x.contiguous() ? 1 : x.dim(0), bytes = out.bytes() / pieces;
    for (int64_t i = 0; i < pieces; ++i) {
      std::memcpy(out.as<std::byte>() + i * bytes,
                  x.as<std::byte>() + i * x.stride(0) * size_of(dtype_),
                  static_cast<size_t>(bytes));
    }
  }

  void store(const MutView& to, int64_t i, float value) const {
    if (dtype_ == DType::f32)
      to.as<float>()[i] = value;
    else
      to.as<bf16>()[i] = to_bf16(value);
  }

  DType dtype_;
  WeightBlock& block_;
};

}  // namespace

void random_block(const Backend& backend, const VisitFunction& visit, DType dtype, uint64_t seed,
                  const Shard& shard, WeightBlock& block) {
  RandomBlock visitor(backend, dtype, seed, shard, block);
  visit(visitor);
}

int64_t place_weights(Backend& dry, const VisitFunction& visit, DType dtype, const Shard& shard) {
  Placer placer(dry, dtype, shard);
  visit(placer);
  return placer.bytes();
}

}  // namespace orrery
