// How the listed tensors lie in the memory of one rank: in which type, cut by rank, side by side
// where the backend wants that, padded, scales behind values. Whatever checks, loads, sizes or
// makes weights walks the rooms of one WeightLayout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "model/weight_list.h"
#include "tensor/operand.h"

namespace orrery {

// Which slice of every split tensor this rank holds, and the group that sums partial outputs.
struct Shard {
  int index = 0;
  int count = 1;
  Communicator* group = nullptr;
};

// A listed tensor and this rank's share of it.
struct WeightPart {
  enum class Kind : uint8_t { tensor, table, matrix, bias, input_scale };
  std::string name;
  Shape shape;  // as listed
  Split split = Split::none;
  Kind kind = Kind::tensor;
  Shape held;       // of this rank's slice
  int64_t row = 0;  // of the room at which it begins

  // This rank's slice of the whole tensor.
  View slice(const View& whole, const Shard& shard) const;
};

// The form a tensor is held in.
struct Held {
  DType dtype = DType::f32;
  std::optional<ScaleBlock> scales;  // of a matrix of 8-bit values
  bool has_input_scale = false;      // one of a Linear's input goes with it
};

// Says in which form each tensor is held.
class HoldRule {
 public:
  using Function = std::function<Held(const WeightPart& part)>;
  HoldRule(DType all) : rule_([all](const WeightPart&) { return Held{all, {}}; }) {}
  HoldRule(Function rule) : rule_(std::move(rule)) {}
  Held operator()(const WeightPart& part) const { return rule_(part); }

 private:
  Function rule_;
};

// One piece of memory: a tensor, or several side by side that a backend applies as one matrix.
struct WeightRoom {
  std::vector<WeightPart> parts;
  Held held;    // the first part's
  Shape shape;  // of all parts together

  // Of the values and of the scales behind them, each padded to kAlignment.
  int64_t bytes() const { return value_bytes() + scale_bytes(); }
  // The room at an address of at least bytes() bytes; empty for a null address.
  MutOperand at(std::byte* address, DeviceKind device) const;
  // The rows of `room` that are this part's.
  static MutOperand rows_of(const MutOperand& room, const WeightPart& part);

  static constexpr int64_t kAlignment = 256;  // as an arena promises

 private:
  int64_t value_bytes() const;
  int64_t scale_bytes() const;
};

struct LayoutRules {
  HoldRule hold;
  Shard shard;
  bool fuses = false;  // Backend::fuses_weights
};

// Walks a list, asks for each room where it lies, and fills the slots with that; a room that is
// nowhere (an empty Operand) leaves its slot alone. Rooms come in the order of the list; of a
// Linear the matrices, then the biases, then the scale [1] of its input: one room for all parts.
// Throws where a dimension does not divide by the ranks.
class WeightLayout final : public WeightVisitor {
 public:
  using Place = std::function<Operand(const WeightRoom& room)>;
  WeightLayout(LayoutRules rules, Place place)
      : rules_(std::move(rules)), place_(std::move(place)) {}

  void tensor(View& slot, const std::string& name, Shape shape, Split split) override;
  void table(View& slot, const std::string& name, Shape shape) override;
  void linear(Linear& slot, const std::vector<std::string>& prefixes,
              const std::vector<int64_t>& out, int64_t in, Split split, bool has_bias) override;

 private:
  WeightPart part(WeightPart::Kind kind, const std::string& name, const Shape& shape,
                  Split split) const;
  void place(View& slot, WeightPart part) const;
  // Of parts that lie side by side, or each by itself.
  std::vector<Operand> place(std::vector<WeightPart> parts) const;

  LayoutRules rules_;
  Place place_;
};

// Bytes of all rooms: what a rank holds, and what a block of them takes.
int64_t weight_bytes(const VisitFunction& visit, const LayoutRules& rules);

// Fills the slots with addresses of the right shapes that must not be touched. For dry runs.
void place_weights(Backend& dry, const VisitFunction& visit, const HoldRule& hold,
                   const Shard& shard = {});

}  // namespace orrery
