// Whoever walks a list of weights agrees on the rooms: their shapes, bytes and places.
#include "model/weight_layout.h"

#include <gtest/gtest.h>

#include <numeric>

#include "backend/dry_run.h"
#include "cpu/cpu_backend.h"
#include "expect_error.h"
#include "model/random_weights.h"
#include "model/weights.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

// One of everything that a list can hold.
struct Network {
  View norm, table;
  Linear fan, back, whole;

  void visit(WeightVisitor& v) {
    v.table(table, "table.weight", {10, 6});
    v.tensor(norm, "norm.weight", {6});
    v.linear(fan, {"q", "k", "v"}, {8, 4, 4}, 6, Split::rows, true);
    v.linear(back, {"out"}, {6}, 8, Split::columns, true);
    v.linear(whole, {"head"}, {5}, 6, Split::none, false);
  }
  VisitFunction visitor() {
    return [this](WeightVisitor& v) { visit(v); };
  }
  std::vector<View> slots() const {
    std::vector<View> all{table, norm};
    for (const Linear* linear : {&fan, &back, &whole}) {
      for (const Operand& weight : linear->weights) {
        all.push_back(weight);
        if (weight.scales) all.push_back(weight.scales);
      }
      all.insert(all.end(), linear->biases.begin(), linear->biases.end());
    }
    return all;
  }
};

// Each element of a file has a value of its own: 100 for each tensor and its place in it.
Safetensors files_of(const ScratchFolder& scratch, DType dtype) {
  Network network;
  std::vector<Tensor> tensors;
  std::vector<NamedTensor> named;
  for (const ListedTensor& listed : list_tensors(network.visitor())) {
    Tensor& tensor = tensors.emplace_back(allocate_host_tensor(listed.shape, dtype));
    for (int64_t i = 0; i < listed.shape.numel(); ++i) {
      const auto value = static_cast<float>(100 * std::ssize(tensors) + i);
      if (dtype == DType::f32)
        tensor.view.as<float>()[i] = value;
      else
        tensor.view.as<bf16>()[i] = to_bf16(value);
    }
    named.push_back({listed.name, tensor.view});
  }
  const auto file = scratch.path() / "weights.safetensors";
  write_safetensors(file, named);
  return Safetensors::open_file(file);
}

struct Case {
  Shard shard;
  bool fuses;
  std::optional<DType> held;  // empty: as stored
  DType stored;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Shard& shard : {Shard{0, 1, nullptr}, Shard{0, 2, nullptr}, Shard{1, 2, nullptr}}) {
    for (bool fuses : {false, true}) {
      for (DType stored : {DType::f32, DType::bf16}) {
        for (std::optional<DType> held :
             {std::optional<DType>(), std::optional(DType::f32), std::optional(DType::bf16)}) {
          all.push_back({shard, fuses, held, stored});
        }
      }
    }
  }
  return all;
}

struct Place {
  Shape shape;
  DType dtype;
  int64_t offset;
  bool operator==(const Place&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Place& place) {
  return out << place.shape << ' ' << name_of(place.dtype) << " at " << place.offset;
}

std::vector<Place> places_of(const Network& network, const std::byte* base) {
  std::vector<Place> places;
  for (const View& slot : network.slots())
    places.push_back({slot.shape, slot.dtype, static_cast<const std::byte*>(slot.data) - base});
  return places;
}

TEST(WeightLayout, LoadingSizingAndRandomWeightsAgreeOnEveryRoom) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(concat("rank ", c.shard.index, " of ", c.shard.count, c.fuses ? ", fused" : "",
                        ", stored as ", name_of(c.stored), ", held as ",
                        c.held ? name_of(*c.held) : "stored"));
    const ScratchFolder scratch;
    const Safetensors files = files_of(scratch, c.stored);
    LoadOptions options;
    options.shard = c.shard;
    if (c.held) options.hold = *c.held;
    const HoldRule hold = hold_rule(files, options);
    DryRunBackend backend(DeviceKind::cpu, c.fuses);

    // The planner itself, one room after another.
    Network planned;
    std::vector<Place> rooms;
    int64_t end = 0;
    WeightLayout layout({hold, c.shard, c.fuses}, [&](const WeightRoom& room) {
      const Operand place = room.at(reinterpret_cast<std::byte*>(4096 + end), DeviceKind::cpu);
      end += room.bytes();
      return place;
    });
    planned.visit(layout);
    rooms = places_of(planned, reinterpret_cast<std::byte*>(4096));
    EXPECT_EQ(weight_bytes(planned.visitor(), {hold, c.shard, c.fuses}), end);

    const auto in_block = [&](Network& network, const auto& fill) {
      Buffer memory = allocate_host(static_cast<size_t>(end));
      auto* const read = reinterpret_cast<std::byte*>(uintptr_t{1} << 40);
      WeightBlock block{static_cast<std::byte*>(memory.data()),
                        read,
                        DeviceKind::cpu,
                        DeviceKind::cpu,
                        memory.bytes(),
                        0};
      fill(block);
      EXPECT_EQ(static_cast<int64_t>(block.used), end);
      EXPECT_EQ(places_of(network, read), rooms);
      return memory;
    };
    Network loaded, random;
    const Buffer memory = in_block(loaded, [&](WeightBlock& block) {
      fill_block(backend, files, loaded.visitor(), options, block);
    });
    if (c.stored == DType::f32 && c.held) {  // their block of normals takes its time
      in_block(random, [&](WeightBlock& block) {
        random_block(backend, random.visitor(), hold, 1, c.shard, block);
      });
    }
    Network dry;
    place_weights(backend, dry.visitor(), hold, c.shard);
    for (size_t i = 0; i < rooms.size(); ++i) EXPECT_EQ(dry.slots()[i].shape, rooms[i].shape);

    // What lies there is this rank's share of the files: a row of q, one of v, a column of out.
    const auto value = [&](const Place& place, int64_t i) {
      const auto* at = static_cast<const std::byte*>(memory.data()) + place.offset;
      return place.dtype == DType::f32 ? reinterpret_cast<const float*>(at)[i]
                                       : to_float(reinterpret_cast<const bf16*>(at)[i]);
    };
    const auto stored = [&](int tensor, int64_t i) {
      const auto exact = static_cast<float>(100 * tensor + i);
      return c.stored == DType::bf16 || c.held == DType::bf16 ? round_to_bf16(exact) : exact;
    };
    const int64_t q_rows = 8 / c.shard.count, k_rows = 4 / c.shard.count;
    const int64_t v_first = c.fuses ? (q_rows + k_rows) * 6 : 0;
    EXPECT_EQ(value(rooms[2], 1), stored(3, c.shard.index * q_rows * 6 + 1));
    EXPECT_EQ(value(rooms[c.fuses ? 2 : 4], v_first), stored(5, c.shard.index * k_rows * 6));
    const size_t out = c.fuses ? 4 : 8;
    const int64_t width = 8 / c.shard.count;
    EXPECT_EQ(value(rooms[out], width), stored(9, 8 + c.shard.index * width));
  }
}

// On the CPU a weight in its stored type is read in the mapping; any other is a copy of its own.
TEST(WeightLayout, TheCpuReadsTheMappingWhereItCan) {
  const ScratchFolder scratch;
  const Safetensors files = files_of(scratch, DType::bf16);
  const auto backend = cpu::make_cpu_backend();
  const StoredTensor* stored = files.find("k.weight");
  Network network;
  const WeightStore mapped = fill_weights(*backend, files, network.visitor(), {});
  EXPECT_EQ(network.fan.weights[1].data, stored->data);
  EXPECT_EQ(mapped.bytes(),
            weight_bytes(network.visitor(), {DType::bf16, {}, backend->fuses_weights()}));
  LoadOptions options;
  options.hold = DType::f32;
  const WeightStore widened = fill_weights(*backend, files, network.visitor(), options);
  EXPECT_EQ(network.fan.weights[1].dtype, DType::f32);
  EXPECT_EQ(network.fan.weights[1].as<float>()[3], round_to_bf16(403));
  EXPECT_EQ(widened.bytes(),
            weight_bytes(network.visitor(), {DType::f32, {}, backend->fuses_weights()}));
}

// Scales lie behind the values, in f32, padded by themselves; whatever granularity they have.
TEST(WeightLayout, ScalesLieBehindTheValues) {
  struct Scaled {
    ScaleBlock block;
    Shape scales;  // of [16, 6] and of a fused [4 + 2 + 2, 6]
  };
  for (const auto& [block, scales] : {Scaled{{0, 0}, {1, 1}}, Scaled{{1, 0}, {16, 1}},
                                      Scaled{{0, 1}, {1, 6}}, Scaled{{5, 4}, {4, 2}}}) {
    SCOPED_TRACE(concat(block.rows, " x ", block.columns));
    const HoldRule hold([&, per = block](const WeightPart& part) -> Held {
      if (part.kind == WeightPart::Kind::matrix) return {DType::u8, per};
      return {DType::f32, {}};
    });
    Network network;
    std::byte* const base = reinterpret_cast<std::byte*>(4096);
    int64_t end = 0;
    WeightLayout layout({hold, {}, true}, [&](const WeightRoom& room) {
      std::byte* const at = base + end;
      end += room.bytes();
      return room.at(at, DeviceKind::cpu);
    });
    network.visit(layout);
    const Operand& fan = network.fan.weights.front();
    EXPECT_EQ(fan.shape, (Shape{16, 6}));
    EXPECT_EQ(fan.scales.shape, scales);
    EXPECT_EQ(fan.scales.dtype, DType::f32);
    EXPECT_EQ(
        static_cast<const std::byte*>(fan.scales.data) - static_cast<const std::byte*>(fan.data),
        WeightRoom::kAlignment);
    EXPECT_FALSE(Operand(network.fan.biases.front()).scales);
    EXPECT_EQ(weight_bytes(network.visitor(), {hold, {}, true}), end);
  }
}

// The steps of a new type on this floor: a rule says who is held in it, with scales of a
// granularity; loading makes codes and scales of what files store; products read both. Whoever
// sizes, places and fills blocks follows.
TEST(WeightLayout, ARuleHoldsMatricesInEightBits) {
  const ScratchFolder scratch;
  const Safetensors files = files_of(scratch, DType::f32);
  const auto backend = cpu::make_cpu_backend();
  for (DType dtype : {DType::f8e4m3, DType::i8}) {
    for (const Shard& shard : {Shard{}, Shard{1, 2, nullptr}}) {
      SCOPED_TRACE(concat(name_of(dtype), ", ", shard.count, " ranks"));
      LoadOptions options;
      options.shard = shard;
      options.hold = HoldRule([&](const WeightPart& part) -> Held {
        if (part.kind != WeightPart::Kind::matrix) return {DType::f32, {}};
        return {dtype, ScaleBlock{1, 0}};
      });
      Network plain, narrow;
      LoadOptions whole;
      whole.shard = shard;
      const WeightStore as_stored = fill_weights(*backend, files, plain.visitor(), whole);
      const WeightStore held = fill_weights(*backend, files, narrow.visitor(), options);
      EXPECT_EQ(held.bytes(), weight_bytes(narrow.visitor(), {*options.hold, shard, false}));

      const Operand& q = narrow.fan.weights.front();
      EXPECT_EQ(q.dtype, dtype);
      EXPECT_EQ(q.scales.shape, (Shape{8 / shard.count, 1}));
      // The network's values are wide apart: a row's largest, 1 % below and above.
      const View x = make_view(plain.norm.data, {1, 6}, DType::f32);
      Arena arena(backend->allocate(4096));
      const int64_t width = narrow.fan.out_features();
      Tensor wide = allocate_host_tensor({1, width}, DType::f32),
             weights_only = allocate_host_tensor({1, width}, DType::f32),
             both = allocate_host_tensor({1, width}, DType::f32);
      apply(*backend, wide.view, x, plain.fan);
      apply(*backend, weights_only.view, x, narrow.fan);
      const Operand x8 = narrowed(*backend, arena, x, narrow.fan);
      EXPECT_EQ(x8.dtype, dtype);
      apply(*backend, both.view, x8, narrow.fan);
      // Rounding errors of e4m3 are at most 2^-4 of a value, those of i8 smaller still.
      for (int64_t i = 0; i < width; ++i) {
        const float want = wide.view.as<float>()[i];
        EXPECT_NEAR(weights_only.view.as<float>()[i], want, want / 16);
        EXPECT_NEAR(both.view.as<float>()[i], want, want / 8);
        EXPECT_NE(both.view.as<float>()[i], want);
      }
    }
  }
}

TEST(WeightLayout, NamesWhatDoesNotDivide) {
  Network network;
  expect_error(ErrorKind::invalid_argument, {"dimension 0 of q.weight [8, 6]", "divide by 3"}, [&] {
    weight_bytes(network.visitor(), {DType::f32, {0, 3, nullptr}, false});
  });
}

// A rank's slice of random weights is what the whole has there; norms are ones.
TEST(RandomWeights, SlicesAreOfTheWhole) {
  const auto backend = cpu::make_cpu_backend();
  Network whole, half;
  const WeightStore all = random_weights(*backend, whole.visitor(), DType::f32, 5);
  const WeightStore part = random_weights(*backend, half.visitor(), DType::f32, 5, {1, 2, nullptr});
  EXPECT_EQ(half.norm.as<float>()[0], 1.0f);
  EXPECT_EQ(half.fan.weights[2].as<float>()[0], whole.fan.weights[2].as<float>()[2 * 6]);
  EXPECT_EQ(half.back.weights[0].as<float>()[4], whole.back.weights[0].as<float>()[8 + 4]);
  EXPECT_NE(whole.fan.weights[0].as<float>()[0], whole.fan.weights[1].as<float>()[0]);
}

}  // namespace
}  // namespace orrery
