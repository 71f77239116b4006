#include "model/weight_layout.h"

#include "backend/backend.h"
#include "base/error.h"

namespace orrery {

namespace {

int cut_dimension(Split split) { return split == Split::rows ? 0 : 1; }

int64_t padded(int64_t bytes) {
  return (bytes + WeightRoom::kAlignment - 1) / WeightRoom::kAlignment * WeightRoom::kAlignment;
}

}  // namespace

View WeightPart::slice(const View& whole, const Shard& shard) const {
  if (split == Split::none || shard.count == 1) return whole;
  const int dim = cut_dimension(split);
  return whole.slice(dim, shard.index * held[dim], held[dim]);
}

int64_t WeightRoom::value_bytes() const { return padded(shape.numel() * size_of(held.dtype)); }

int64_t WeightRoom::scale_bytes() const {
  if (!held.scales) return 0;
  return padded(held.scales->shape_for(shape).numel() * size_of(DType::f32));
}

MutOperand WeightRoom::at(std::byte* address, DeviceKind device) const {
  if (address == nullptr) return {};
  const MutView values = make_mut_view(address, shape, held.dtype, device);
  if (!held.scales) return values;
  return {values,
          make_mut_view(address + value_bytes(), held.scales->shape_for(shape), DType::f32, device),
          *held.scales};
}

MutOperand WeightRoom::rows_of(const MutOperand& room, const WeightPart& part) {
  return part.held.rank() == 0 ? room : room.slice(0, part.row, part.held[0]);
}

WeightPart WeightLayout::part(WeightPart::Kind kind, const std::string& name, const Shape& shape,
                              Split split) const {
  WeightPart part{name, shape, split, kind, shape, 0};
  const int count = rules_.shard.count;
  if (split == Split::none || count == 1) return part;
  const int dim = cut_dimension(split);
  require(shape[dim] % count == 0, "tensor parallelism: dimension ", dim, " of ", name, " ", shape,
          " does not divide by ", count);
  part.held[dim] /= count;
  return part;
}

std::vector<Operand> WeightLayout::place(std::vector<WeightPart> parts) const {
  std::vector<Operand> placed;
  WeightRoom room;
  for (size_t i = 0; i < parts.size(); ++i) {
    WeightPart& part = parts[i];
    if (room.parts.empty()) {
      room.held = rules_.hold(part);
      room.shape = part.held;
    } else {
      part.row = room.shape[0];
      room.shape[0] += part.held[0];
    }
    room.parts.push_back(std::move(part));
    if (rules_.fuses && i + 1 < parts.size()) continue;
    placed.push_back(place_(room));
    room = {};
  }
  return placed;
}

void WeightLayout::place(View& slot, WeightPart part) const {
  if (const Operand placed = place(std::vector{std::move(part)}).front()) slot = placed;
}

void WeightLayout::tensor(View& slot, const std::string& name, Shape shape, Split split) {
  place(slot, part(WeightPart::Kind::tensor, name, shape, split));
}

void WeightLayout::table(View& slot, const std::string& name, Shape shape) {
  place(slot, part(WeightPart::Kind::table, name, shape, Split::none));
}

void WeightLayout::linear(Linear& slot, const std::vector<std::string>& prefixes,
                          const std::vector<int64_t>& out, int64_t in, Split split, bool has_bias) {
  std::vector<WeightPart> matrices, biases;
  for (size_t i = 0; i < prefixes.size(); ++i) {
    matrices.push_back(
        part(WeightPart::Kind::matrix, prefixes[i] + ".weight", {out[i], in}, split));
    if (!has_bias) continue;
    // A bias goes with its matrix's rows.
    biases.push_back(part(WeightPart::Kind::bias, prefixes[i] + ".bias", {out[i]},
                          split == Split::rows ? split : Split::none));
  }
  Linear placed;
  const bool has_input_scale = rules_.hold(matrices.front()).has_input_scale;
  placed.weights = place(std::move(matrices));
  for (const Operand& bias : place(std::move(biases))) placed.biases.push_back(bias);
  if (has_input_scale) {
    WeightRoom room{{}, {DType::f32, {}}, {1}};
    for (const std::string& prefix : prefixes) {
      room.parts.push_back(
          part(WeightPart::Kind::input_scale, prefix + ".input_scale", {1}, Split::none));
    }
    placed.input_scale = place_(room);
  }
  if (!placed.weights.front()) return;
  if (split == Split::columns && rules_.shard.count > 1) placed.reduce = rules_.shard.group;
  slot = std::move(placed);
}

std::vector<ListedTensor> list_tensors(const VisitFunction& visit) {
  std::vector<ListedTensor> tensors;
  WeightLayout list({DType::f32, {}, false}, [&](const WeightRoom& room) {
    tensors.push_back({room.parts.front().name, room.parts.front().shape});
    return Operand();
  });
  visit(list);
  return tensors;
}

int64_t weight_bytes(const VisitFunction& visit, const LayoutRules& rules) {
  int64_t bytes = 0;
  WeightLayout sizes(rules, [&](const WeightRoom& room) {
    bytes += room.bytes();
    return Operand();
  });
  visit(sizes);
  return bytes;
}

void place_weights(Backend& dry, const VisitFunction& visit, const HoldRule& hold,
                   const Shard& shard) {
  // One page of address space stands for any weight of a dry run.
  auto* const page = reinterpret_cast<std::byte*>(uintptr_t{1} << 42);
  WeightLayout places({hold, shard, dry.fuses_weights()},
                      [&](const WeightRoom& room) { return room.at(page, dry.device()); });
  visit(places);
}

}  // namespace orrery
