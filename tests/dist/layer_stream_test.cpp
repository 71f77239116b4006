// Layers that take turns on the device give the bytes of layers that stay there.
#include "model/layer_stream.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "base/error.h"
#include "io/safetensors.h"
#include "mesh_case.h"
#include "model/weights.h"

namespace orrery {
namespace {

using dist::MeshInputs;
using dist::MeshOutputs;
using dist::StoredOptions;

constexpr int kSteps = 2;  // around the end of the tower, back to its beginning

class LayerStreams : public testing::Test {
 protected:
  Safetensors files_ = Safetensors::open_folder(golden::model_directory() / "transformer");
  TransformerConfig config_ = TransformerConfig::from_json(
      Json::load(golden::model_directory() / "transformer/config.json"));

  AttentionStrategy strategy() const {
    const AttentionInventory inventory{static_cast<int>(config_.num_hidden_layers),
                                       {AttentionRole::und, AttentionRole::gen},
                                       "transformer",
                                       0,
                                       0};
    return AttentionStrategy::resolve(inventory, nullptr, nullptr);
  }
  std::vector<MeshOutputs> on(const Mesh& mesh, const StoredOptions& how) const {
    const AttentionStrategy plain = strategy();
    const MeshInputs in = dist::random_inputs(config_, 9, 2, 4, 6);
    if (mesh.world() == 1) return {dist::one_rank(files_, config_, in, plain, kSteps, "", how)};
    constexpr int64_t kWhole = std::numeric_limits<int64_t>::max();
    return dist::many_ranks(files_, config_, in, plain, kSteps, "", mesh, kWhole, how);
  }
};

// Even and odd numbers of layers, and fewer than there are places.
TEST_F(LayerStreams, GiveTheSameBytes) {
  for (int64_t layers : {8, 5, 2, 1}) {
    config_.num_hidden_layers = layers;
    const MeshOutputs resident = on({}, {}).front();
    const MeshOutputs streamed = on({}, {.streams = true}).front();
    ASSERT_FALSE(resident.values.empty());
    EXPECT_EQ(streamed.values, resident.values) << layers << " layers";
    if (layers > 3) {
      EXPECT_LT(streamed.weight_bytes, resident.weight_bytes);
    }
  }
}

TEST_F(LayerStreams, HoldEachRanksSlices) {
  for (const Mesh& mesh : {Mesh{2, 1, 1}, Mesh{1, 2, 1}}) {
    const std::vector<MeshOutputs> resident = on(mesh, {}), streamed = on(mesh, {.streams = true});
    for (size_t rank = 0; rank < resident.size(); ++rank)
      EXPECT_EQ(streamed[rank].values, resident[rank].values);
  }
}

// As a merged LoRA does it.
TEST_F(LayerStreams, HoldChangedWeights) {
  const auto doubled = [](const std::string& name, const View& stored) {
    Tensor copy;
    if (name != "layers.3.mlp_moe_gen.down_proj.weight" && name != "layers.2.self_attn.to_v.weight")
      return copy;
    copy = allocate_host_tensor(stored.shape, stored.dtype);
    for (int64_t i = 0; i < stored.numel(); ++i) {
      copy.view.as<bf16>()[i] = to_bf16(2.0f * to_float(static_cast<const bf16*>(stored.data)[i]));
    }
    return copy;
  };
  StoredOptions resident, streamed{.streams = true};
  const MeshOutputs plain = on({}, resident).front();
  resident.adapt = streamed.adapt = doubled;
  const MeshOutputs changed = on({}, resident).front();
  EXPECT_NE(changed.values, plain.values);
  EXPECT_EQ(on({}, streamed).front().values, changed.values);
  const Mesh two{2, 1, 1};
  EXPECT_EQ(on(two, streamed)[1].values, on(two, resident)[1].values);
}

// In the type that a device computes in, whatever is stored.
TEST_F(LayerStreams, HoldTheTypeThatIsAskedFor) {
  const auto backend = cpu::make_cpu_backend({});
  Transformer model(*backend, config_, DType::f32);
  LoadOptions options;
  options.hold = DType::f32;
  View norm;
  const auto visit = [&](int i, WeightVisitor& v) {
    v.tensor(norm, concat("layers.", i, ".input_layernorm.weight"), {config_.hidden_size});
  };
  const auto stream = LayerStream::pinned(*backend, 8, visit, files_, options);
  EXPECT_EQ(stream->host_bytes(), 8 * config_.hidden_size * 4);
  EXPECT_EQ(stream->device_bytes(), LayerStream::num_places(8) * config_.hidden_size * 4);
}

// The views of random layers hold what the device would: each layer its own values, borrowed ones
// those of the layer they borrow from.
TEST_F(LayerStreams, CanBeRandom) {
  const auto backend = cpu::make_cpu_backend({});
  std::vector<Linear> slots(5);
  const auto visit = [&](int i, WeightVisitor& v) {
    v.linear(slots[static_cast<size_t>(i)], {"a", "b"}, {4, 8}, 16, Split::none, true);
  };
  const auto stream = LayerStream::random(*backend, 5, visit, DType::f32, 7, 2);
  const auto values = [&](int i) {
    stream->acquire(i);
    const View part = slots[static_cast<size_t>(i)].weights.at(1);
    EXPECT_EQ(part.shape, (Shape{8, 16}));
    const float* data = static_cast<const float*>(part.data);
    return std::vector<float>(data, data + part.numel());
  };
  const std::vector<float> zero = values(0), one = values(1);
  EXPECT_NE(zero, one);
  EXPECT_EQ(values(2), zero);
  EXPECT_EQ(values(3), one);
  EXPECT_EQ(values(4), zero);
}

// A rank's random layers are the slices of the whole ones.
TEST_F(LayerStreams, RandomSlicesAreThoseOfTheWhole) {
  const auto backend = cpu::make_cpu_backend({});
  Linear slot;
  const auto values = [&](Split split, const Shard& shard) {
    const auto visit = [&](int, WeightVisitor& v) {
      v.linear(slot, {"a", "b"}, {4, 8}, 6, split, true);
    };
    const auto stream = LayerStream::random(*backend, 1, visit, DType::f32, 7, 1, shard);
    stream->acquire(0);
    std::vector<std::vector<float>> parts;
    for (const std::vector<View>& views : {slot.weights, slot.biases}) {
      for (const View& view : views) {
        parts.emplace_back(view.as<float>(), view.as<float>() + view.numel());
      }
    }
    return parts;
  };
  const auto whole = values(Split::rows, {});
  ASSERT_EQ(whole.size(), 4u);
  for (int rank = 0; rank < 2; ++rank) {
    const auto rows = values(Split::rows, {rank, 2, nullptr});
    const auto columns = values(Split::columns, {rank, 2, nullptr});
    for (size_t part = 0; part < whole.size(); ++part) {
      const std::vector<float>& all = whole[part];
      const auto half = static_cast<std::ptrdiff_t>(all.size() / 2);
      EXPECT_EQ(rows[part],
                std::vector<float>(all.begin() + rank * half, all.begin() + (rank + 1) * half));
      std::vector<float> want = all;  // biases stay whole
      if (part < 2) {
        want.clear();
        for (size_t i = 0; i < all.size(); ++i) {
          if (static_cast<int>(i % 6) / 3 == rank) want.push_back(all[i]);
        }
      }
      EXPECT_EQ(columns[part], want);
    }
  }
}

}  // namespace
}  // namespace orrery
