#include "model/weights.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/parallel.h"
#include "io/fault_list.h"
#include "tensor/convert.h"
#include "tensor/quantise.h"

namespace orrery {

StoredAs stored_as_listed(const Safetensors& files, const std::string& name, const Shape& shape) {
  const bool wrapped = files.find(name) == nullptr && files.find("model." + name) != nullptr;
  return {{{wrapped ? "model." + name : name, shape, false}}, {}};
}

HoldRule hold_rule(const Safetensors& files, const LoadOptions& options) {
  return HoldRule([&files, dialect = options.dialect, hold = options.hold,
                   adapted = options.adapted_type](const WeightPart& part) {
    const StoredAs as = dialect(files, part.name, part.shape);
    const DType stored = files.view(as.parts.front().name).dtype;
    if (!is_narrow(stored)) {
      if (hold) return (*hold)(part);
      return Held{adapted ? adapted(part.name, stored).value_or(stored) : stored, {}};
    }
    require(part.kind == WeightPart::Kind::matrix, ErrorKind::unsupported, files.origin().string(),
            ": ", part.name, " is stored as ", name_of(stored),
            "; only the matrices of projections can be");
    return Held{stored, ScaleBlock{1, 0}, !as.input_scale.empty()};
  });
}

namespace {

std::vector<WeightPart> parts_of(const VisitFunction& visit, const Shard& shard) {
  std::vector<WeightPart> parts;
  WeightLayout layout({DType::f32, shard, false}, [&](const WeightRoom& room) {
    parts.push_back(room.parts.front());
    return Operand();
  });
  visit(layout);
  return parts;
}

// [rows of this rank, 1] f32 from one stored scale or one a row.
Tensor row_scales(const Safetensors& files, const std::string& name, const WeightPart& part,
                  const Shard& shard) {
  const Tensor stored = files.read(name, DType::f32);
  const int64_t rows = part.held[0], count = stored.view.numel();
  const int64_t first = part.split == Split::rows && count > 1 ? shard.index * rows : 0;
  Tensor scales = allocate_host_tensor({rows, 1}, DType::f32);
  for (int64_t r = 0; r < rows; ++r) {
    const float scale = stored.view.as<float>()[count == 1 ? 0 : first + r];
    require(scale > 0 && std::isfinite(scale), ErrorKind::numeric, files.origin().string(), ": ",
            name, " holds ", scale, "; a scale is positive and finite");
    scales.view.as<float>()[r] = scale;
  }
  return scales;
}

// As check_finite(), of what one rank holds: it reads nothing else.
std::vector<std::string> check_slices(const Safetensors& files,
                                      const std::vector<WeightPart>& parts,
                                      const LoadOptions& options) {
  struct Slice {
    std::string stored;
    View view;
    std::string fault, unlikely;
  };
  std::vector<Slice> slices;
  for (const WeightPart& part : parts) {
    for (const TensorExpectation& stored : options.dialect(files, part.name, part.shape).parts) {
      const View whole = files.view(stored.name);
      const bool is_cut = whole.shape == part.shape;
      slices.push_back({stored.name, is_cut ? part.slice(whole, options.shard) : whole, "", ""});
    }
  }
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
    const auto clause = [&](const std::string& value) {
      return concat(slice.stored, " in ", files.find(slice.stored)->file, " holds ", value,
                    " of slice ", options.shard.index, " of ", options.shard.count);
    };
    if (!slice.fault.empty())
      faults.add("not finite", clause(slice.fault));
    else if (!slice.unlikely.empty())
      unlikely.push_back(clause(slice.unlikely));
  }
  faults.raise(ErrorKind::numeric, files.origin().string());
  return unlikely;
}

class Loader {
 public:
  Loader(Backend& backend, const Safetensors& files, const LoadOptions& options,
         WeightMemory memory)
      : backend_(backend), files_(files), options_(options), memory_(memory) {}

  void load(const VisitFunction& visit) {
    WeightLayout layout({hold_rule(files_, options_), options_.shard, backend_.fuses_weights()},
                        [this](const WeightRoom& room) { return place(room); });
    visit(layout);
  }

 private:
  // A listed tensor in host memory: in the mapping, or in a buffer that was made for it.
  struct Source {
    View view;
    Buffer made;
    std::string scales;  // the name of an 8-bit matrix's
  };

  Source source_of(const WeightPart& part) const {
    StoredAs as = options_.dialect(files_, part.name, part.shape);
    Source source;
    if (as.make) {
      Tensor made = as.make(files_);
      source = {made.view, std::move(made.buffer), ""};
    } else {
      const View stored = files_.view(as.parts.front().name);
      source = {make_view(stored.data, part.shape, stored.dtype), {}, std::move(as.scales)};
    }
    if (!options_.adapt) return source;
    Tensor adapted = options_.adapt(part.name, source.view);
    if (!adapted) return source;
    return {adapted.view, std::move(adapted.buffer), ""};
  }

  Operand place(const WeightRoom& room) {
    if (room.parts.front().kind == WeightPart::Kind::input_scale) return place_input_scale(room);
    std::vector<Source> sources;
    for (const WeightPart& part : room.parts) sources.push_back(source_of(part));
    if (stays(room, sources.front())) return use_in_place(room, sources.front());
    const WeightMemory::Room made = memory_.make(room);
    for (size_t i = 0; i < sources.size(); ++i)
      fill(WeightRoom::rows_of(made.write, room.parts[i]), room.parts[i], sources[i]);
    return made.read;
  }

  // The largest of its parts' scales: none of them saturates then.
  Operand place_input_scale(const WeightRoom& room) {
    float largest = 0;
    for (const WeightPart& part : room.parts) {
      const Tensor scale = row_scales(files_, stored_name(part.name), part, options_.shard);
      largest = std::max(largest, *scale.view.as<float>());
    }
    const WeightMemory::Room made = memory_.make(room);
    move(made.write, make_view(&largest, {1}, DType::f32));
    return made.read;
  }

  std::string stored_name(const std::string& name) const {
    return stored_as_listed(files_, name, {1}).parts.front().name;
  }

  // Whether a tensor is used where it lies.
  bool stays(const WeightRoom& room, const Source& source) const {
    const WeightPart& part = room.parts.front();
    if (memory_.is_block() || room.parts.size() > 1) return false;
    if (backend_.device() != DeviceKind::cpu) return part.kind == WeightPart::Kind::table;
    // A slice of what was made is copied: the rest of it need not stay in memory.
    const bool is_slice = source.made.data() != nullptr && part.held != part.shape;
    return !backend_.is_dry() && !is_slice && room.held.dtype == source.view.dtype &&
           Safetensors::aligned(part.slice(source.view, options_.shard));
  }

  Operand use_in_place(const WeightRoom& room, Source& source) {
    const WeightPart& part = room.parts.front();
    WeightStore& store = memory_.store();
    if (source.made.data() != nullptr) store.keep(std::move(source.made));
    if (backend_.device() == DeviceKind::cpu) store.count(room.bytes());
    Operand used = part.slice(source.view, options_.shard);
    if (source.scales.empty()) return used;
    Tensor scales = row_scales(files_, source.scales, part, options_.shard);
    used = {used, scales.view, *room.held.scales};
    store.keep(std::move(scales.buffer));
    return used;
  }

  void fill(const MutOperand& to, const WeightPart& part, const Source& source) {
    const View slice = part.slice(source.view, options_.shard);
    if (is_narrow(slice.dtype) && to.dtype == slice.dtype) {
      move(to, slice);
      move(to.scales, row_scales(files_, source.scales, part, options_.shard).view);
    } else if (is_narrow(to.dtype)) {
      Tensor codes = allocate_host_tensor(slice.shape, to.dtype);
      const Tensor scales = allocate_host_tensor(to.scales.shape, DType::f32);
      const Tensor dense = allocate_host_tensor(slice.shape, DType::f32);
      convert(dense.view, slice);
      quantise({codes.view, scales.view, to.block}, dense.view, Scaling::amax);
      move(to, codes.view);
      move(to.scales, scales.view);
    } else {
      move(to, slice);
    }
  }

  void move(MutView to, const View& part) {
    if (!memory_.on_backend()) return convert(to, part);
    if (part.contiguous() && part.dtype == to.dtype && Safetensors::aligned(part))
      return backend_.upload(to, part);
    const Tensor host = allocate_host_tensor(part.shape, to.dtype);
    convert(host.view, part);
    backend_.upload(to, host.view);
  }

  Backend& backend_;
  const Safetensors& files_;
  const LoadOptions& options_;
  WeightMemory memory_;
};

}  // namespace

std::vector<std::string> check_weights(const Safetensors& files, const VisitFunction& visit,
                                       const LoadOptions& options) {
  const std::vector<WeightPart> parts = parts_of(visit, options.shard);
  std::vector<TensorExpectation> expected;
  for (const WeightPart& part : parts) {
    for (TensorExpectation& stored : options.dialect(files, part.name, part.shape).parts)
      expected.push_back(std::move(stored));
  }
  check_tensors(files, expected, options.ignored);
  if (!options.check_finite) return {};
  return options.shard.count == 1 ? check_finite(files, expected)
                                  : check_slices(files, parts, options);
}

WeightStore fill_weights(Backend& backend, Safetensors files, const VisitFunction& visit,
                         const LoadOptions& options) {
  WeightStore store;
  Loader(backend, files, options, WeightMemory(backend, store)).load(visit);
  store.keep(std::move(files));
  return store;
}

WeightStore load_weights(Backend& backend, Safetensors files, const VisitFunction& visit,
                         const LoadOptions& options) {
  check_weights(files, visit, options);
  return fill_weights(backend, std::move(files), visit, options);
}

void fill_block(Backend& backend, const Safetensors& files, const VisitFunction& visit,
                const LoadOptions& options, WeightBlock& block) {
  Loader(backend, files, options, WeightMemory(backend, block)).load(visit);
}

}  // namespace orrery
