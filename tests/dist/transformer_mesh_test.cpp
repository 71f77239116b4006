// Every transformer, with every kind of strategy, on every mesh that fits it, gives what one rank
// gives: with the reference linear, whose rows do not depend on each other, the same bits where cp
// cuts and the same within the rounding of a sum where tp does; with oneDNN within rounding.
#include <cmath>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "io/safetensors.h"
#include "mesh_case.h"
#include "model/random_weights.h"
#include "model/weights.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

using dist::MeshInputs;
using dist::MeshOutputs;

struct Strategy {
  const char* name;
  int steps;
  bool sparse;
  std::array<int64_t, 3> tile;
  std::string json;
};

std::string sparse_preset(const std::string& selection, const char* kernel) {
  return concat(R"({"name": "block_sparse", "config": {"block_size": [16, 16], "selection": )",
                selection, R"(, "backend": {"require": ")", kernel, "\"}}}");
}

std::string gen_by(const std::string& method) {
  return R"({"per_role": {"cosmos3.gen": )" + method + "}}";
}

std::vector<Strategy> strategies() {
  const std::string topk = R"({"name": "block_topk", "config": {"target_sparsity": 0.6}})";
  const std::string mixed = concat(
      R"({"presets": {"dense": {"backend": "native"}, "sparse": )", sparse_preset(topk, "native"),
      "}, ",
      R"("layouts": {"dense": {"default": "dense"}, "mixed": {"default": "dense", "overrides": [)",
      R"({"attention_role": "cosmos3.gen", "layers": [1], "use": "sparse"}]}}, )",
      R"("schedule": {"coordinate": "step_index", "phases": [{"until": 1, "layout": "dense"}, )",
      R"({"until": null, "layout": "mixed"}]}})");
  return {
      {"dense native", 1, false, {1, 1, 1}, gen_by(R"("native")")},
      {"dense reference", 1, false, {1, 1, 1}, gen_by(R"("reference")")},
      {"dense in tiles", 1, false, {2, 4, 4}, gen_by(R"("native")")},
      {"block_topk", 1, true, {1, 1, 1}, gen_by(sparse_preset(topk, "native"))},
      {"block_topk reference in tiles",
       1,
       true,
       {2, 4, 4},
       gen_by(sparse_preset(topk, "reference"))},
      {"sliding_tile",
       1,
       true,
       {1, 4, 4},
       gen_by(sparse_preset(R"({"name": "sliding_tile", "config": {"window": [3, 1, 1]}})",
                            "native"))},
      {"threshold",
       1,
       true,
       {1, 1, 1},
       gen_by(sparse_preset(R"({"name": "threshold", "config": {"mass": 0.6}})", "native"))},
      {"mixed schedule", 2, true, {1, 1, 1}, mixed},
  };
}

bool fits(const Mesh& mesh, const TransformerConfig& config) {
  try {
    mesh.check({config.num_attention_heads, config.num_key_value_heads, {config.intermediate_size}},
               mesh.world());
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Meshes of 2, 3, 4, 6 and 8 ranks that the config's heads and widths divide into.
std::vector<Mesh> meshes(const TransformerConfig& config) {
  std::vector<Mesh> found;
  for (int world : {2, 3, 4, 6, 8}) {
    for (int tp = 1; tp <= world; ++tp) {
      if (world % tp == 0 && fits({tp, world / tp, 1}, config))
        found.push_back({tp, world / tp, 1});
    }
  }
  return found;
}

// tp sums each output of the two cut projections of a layer in parts. A sum of K terms in another
// order moves by about sqrt(K) half-ulps of its size; the moves of all layers add up at worst, and
// later layers pass them on with a gain that norms keep near 1; 4 covers it.
double sum_tolerance(const TransformerConfig& config) {
  const auto terms = static_cast<double>(
      std::max(config.intermediate_size, config.num_attention_heads * config.head_dim));
  return 4 * 2 * static_cast<double>(config.num_hidden_layers) * std::sqrt(terms) * 0x1p-24;
}

void expect_one_rank_output(const Safetensors& files, const TransformerConfig& config,
                            const MeshInputs& given, bool is_long) {
  const std::string reference = "reference";
  const AttentionInventory inventory{static_cast<int>(config.num_hidden_layers),
                                     {AttentionRole::und, AttentionRole::gen},
                                     "transformer",
                                     0,
                                     0};
  for (const Strategy& s : strategies()) {
    const Json json = Json::parse(s.json, s.name);
    const AttentionStrategy strategy = AttentionStrategy::resolve(inventory, &json, nullptr);
    MeshInputs inputs = given;
    inputs.tile = s.tile;
    const MeshOutputs want = dist::one_rank(files, config, inputs, strategy, s.steps, reference);
    for (float value : want.values) ASSERT_TRUE(std::isfinite(value)) << s.name;
    if (s.sparse && is_long) {
      ASSERT_LT(want.kept_blocks, want.all_blocks) << s.name << " left nothing out";
    }
    for (const Mesh& mesh : meshes(config)) {
      const auto label = concat(s.name, ", tp ", mesh.tp, " cp ", mesh.cp);
      const auto got = dist::many_ranks(files, config, inputs, strategy, s.steps, reference, mesh);
      for (size_t rank = 0; rank < got.size(); ++rank) {
        ASSERT_EQ(got[rank].values.size(), want.values.size());
        const MeshOutputs& same = mesh.tp == 1 ? want : got[0];
        EXPECT_EQ(std::memcmp(got[rank].values.data(), same.values.data(),
                              same.values.size() * sizeof(float)),
                  0)
            << label << ", rank " << rank;
      }
      EXPECT_LT(golden::relative_error(got[0].values, want.values), sum_tolerance(config)) << label;
    }
  }
}

class MeshGolden : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const auto folder = golden::directory() / "transformer" / GetParam();
    config_ = TransformerConfig::from_json(Json::load(folder / "transformer/config.json"));
    files_.emplace(Safetensors::open_folder(folder / "transformer"));
    const golden::Tensors stored(folder / "tensors.safetensors");
    golden_.ids = stored.integers("input_ids");
    const auto take = [&](const char* name, std::vector<float>& values, Shape& shape) {
      if (!stored.has(name)) return;
      values = stored.floats(name);
      shape = stored.shape(name);
    };
    Shape latent;
    take("vision_latent", golden_.latent, latent);
    for (int i = 1; i < latent.rank(); ++i) golden_.latent_shape.push_back(latent[i]);
    take("sound_latent", golden_.sound, golden_.sound_shape);
    take("action_latent", golden_.action, golden_.action_shape);
    golden_.noisy.assign(static_cast<size_t>(golden_.latent_shape[1]), false);
    for (int64_t t : stored.integers("noisy_frames")) golden_.noisy[static_cast<size_t>(t)] = true;
    if (!golden_.action.empty())
      golden_.action_noisy.assign(static_cast<size_t>(golden_.action_shape[0]), true);
  }
  TransformerConfig config_;
  std::optional<Safetensors> files_;
  MeshInputs golden_;
};

TEST_P(MeshGolden, GivesTheOneRankOutput) {
  expect_one_rank_output(*files_, config_, golden_, false);
}

// Enough tokens for sparse selection to leave blocks out, odd in every way: 7 text tokens, 3 x 7 x
// 11 video tokens of a latent that patches do not divide (B71).
TEST_P(MeshGolden, GivesTheOneRankOutputOfOddLengths) {
  const int64_t p = config_.latent_patch_size;
  expect_one_rank_output(*files_, config_,
                         dist::random_inputs(config_, 7, 3, 7 * p - p / 2, 11 * p), true);
}

// B71: fewer tokens than ranks.
TEST_P(MeshGolden, GivesTheOneRankOutputOfFewTokens) {
  const int64_t p = config_.latent_patch_size;
  MeshInputs inputs = dist::random_inputs(config_, 1, 1, p, 2 * p);
  inputs.sound.clear();
  inputs.action.clear();
  expect_one_rank_output(*files_, config_, inputs, false);
}

INSTANTIATE_TEST_SUITE_P(Cases, MeshGolden, testing::ValuesIn(golden::cases("transformer")),
                         [](const auto& test) { return test.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MeshGolden);

// A checkpoint of random weights in a folder.
class RandomCheckpoint {
 public:
  explicit RandomCheckpoint(const TransformerConfig& config) {
    Transformer model(*backend_, config, DType::f32);
    std::vector<Tensor> tensors;
    std::vector<NamedTensor> named;
    unsigned seed = 0;
    for (const ListedTensor& listed :
         list_tensors([&](WeightVisitor& v) { model.visit_und(v), model.visit_gen(v); })) {
      tensors.push_back(allocate_host_tensor(listed.shape, DType::f32));
      std::vector<float> values = dist::normals(listed.shape.numel(), ++seed);
      const bool is_norm = listed.name.find("norm") != std::string::npos;
      for (float& value : values) value = is_norm ? 1 + 0.1f * value : 0.08f * value;
      std::memcpy(tensors.back().view.mut(), values.data(), values.size() * sizeof(float));
      named.push_back({listed.name, tensors.back().view});
    }
    write_safetensors(folder_.path() / "diffusion_pytorch_model.safetensors", named);
  }
  Safetensors open() const { return Safetensors::open_folder(folder_.path()); }

 private:
  std::unique_ptr<Backend> backend_ = cpu::make_cpu_backend({.num_threads = 1});
  ScratchFolder folder_;
};

TransformerConfig eight_heads() {
  TransformerConfig config = TransformerConfig::from_json(
      Json::load(golden::model_directory() / "transformer/config.json"));
  config.num_hidden_layers = 2;
  config.hidden_size = 128;
  config.num_attention_heads = 8;
  config.num_key_value_heads = 4;
  config.intermediate_size = 96;
  config.vocab_size = 32;
  return config;
}

// Eight ranks as tp 1 x cp 8 (two ranks to a key/value head), 2 x 4 and 4 x 2; actions in the
// sequence.
TEST(MeshRandom, GivesTheOneRankOutput) {
  const TransformerConfig config = eight_heads();
  const RandomCheckpoint checkpoint(config);
  ASSERT_EQ(meshes(config).size(), 2u + 3u + 3u);
  expect_one_rank_output(checkpoint.open(), config, dist::random_inputs(config, 9, 3, 14, 21),
                         true);
}

// oneDNN may add up a row's products in another order when a rank has fewer rows, in every product
// of a layer; a rank's own numbers are the same again with the same ranks.
TEST(MeshRandom, OnednnGivesTheOneRankOutputWithinRounding) {
  const TransformerConfig config = eight_heads();
  const RandomCheckpoint checkpoint(config);
  const MeshInputs inputs = dist::random_inputs(config, 9, 3, 14, 21);
  const AttentionStrategy strategy =
      AttentionStrategy::dense({static_cast<int>(config.num_hidden_layers),
                                {AttentionRole::und, AttentionRole::gen},
                                "transformer",
                                0,
                                0});
  const MeshOutputs want = dist::one_rank(checkpoint.open(), config, inputs, strategy, 1, "onednn");
  constexpr double kProducts = 7;  // q, k, v, o, gate, up, down, where sum_tolerance() counts two
  for (const Mesh& mesh : meshes(config)) {
    const auto label = concat("tp ", mesh.tp, " cp ", mesh.cp);
    const auto run = [&] {
      return dist::many_ranks(checkpoint.open(), config, inputs, strategy, 1, "onednn", mesh);
    };
    const auto got = run();
    EXPECT_LT(golden::relative_error(got[0].values, want.values),
              kProducts / 2 * sum_tolerance(config))
        << label;
    for (const MeshOutputs& rank : run()) EXPECT_EQ(rank.values, got[0].values) << label;
  }
}

// Rows that travel in parts give the bits of rows that travel at once.
TEST(MeshRandom, PartsGiveTheOutputOfTheWhole) {
  const TransformerConfig config = eight_heads();
  const RandomCheckpoint checkpoint(config);
  const MeshInputs inputs = dist::random_inputs(config, 9, 5, 14, 21);
  const AttentionInventory inventory{static_cast<int>(config.num_hidden_layers),
                                     {AttentionRole::und, AttentionRole::gen},
                                     "transformer",
                                     0,
                                     0};
  const AttentionStrategy strategy = AttentionStrategy::dense(inventory);
  const MeshOutputs one =
      dist::one_rank(checkpoint.open(), config, inputs, strategy, 1, "reference");
  for (const Mesh& mesh : {Mesh{1, 2, 1}, Mesh{2, 1, 1}, Mesh{2, 2, 1}}) {
    const auto whole =
        dist::many_ranks(checkpoint.open(), config, inputs, strategy, 1, "reference", mesh);
    const auto parts =
        dist::many_ranks(checkpoint.open(), config, inputs, strategy, 1, "reference", mesh, 50);
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      EXPECT_EQ(parts[rank].values, whole[0].values) << "tp " << mesh.tp << " cp " << mesh.cp;
    }
    EXPECT_LT(golden::relative_error(parts[0].values, one.values), sum_tolerance(config));
  }
}

// Random weights of a rank are the slices of the whole ones.
TEST(MeshRandom, RandomWeightsAreTheSameOnEveryMesh) {
  const TransformerConfig config = eight_heads();
  const MeshInputs inputs = dist::random_inputs(config, 5, 1, 8, 8);
  const AttentionStrategy strategy = AttentionStrategy::dense(
      {static_cast<int>(config.num_hidden_layers), {}, "transformer", 0, 0});
  const auto weights = [](Transformer& model, const Shard& shard) {
    dist::RankWeights held;
    held.store = random_weights(model.backend(), dist::both_towers(model), DType::f32, 3, shard);
    return held;
  };
  const auto run = [&](const MeshGroups& groups) {
    const auto backend = cpu::make_cpu_backend({.num_threads = 1, .linear = "reference"});
    return dist::evaluate(*backend, DType::f32, weights, config, inputs, strategy, 1, groups);
  };
  const MeshOutputs want = run(make_absent_groups({}, 0));
  ThreadWorld world(2);
  world.run([&](int rank) {
    const MeshOutputs got = run(make_groups(world, {2, 1, 1}, rank));
    EXPECT_LT(golden::relative_error(got.values, want.values), sum_tolerance(config));
    EXPECT_LT(got.weight_bytes, want.weight_bytes);
  });
}

// A rank of tp 4 holds a quarter of what is cut, and what is not cut.
TEST(MeshRandom, RankHoldsItsSliceOfTheWeights) {
  const TransformerConfig config = eight_heads();
  const RandomCheckpoint checkpoint(config);
  const AttentionStrategy strategy =
      AttentionStrategy::dense({static_cast<int>(config.num_hidden_layers),
                                {AttentionRole::und, AttentionRole::gen},
                                "transformer",
                                0,
                                0});
  const MeshInputs inputs = dist::random_inputs(config, 3, 1, 4, 4);
  const int64_t whole =
      dist::one_rank(checkpoint.open(), config, inputs, strategy, 1, "").weight_bytes;
  // Counted here, not by the code under test: q, k, v, o and the MLP of both towers.
  const int64_t h = config.hidden_size, q = config.num_attention_heads * config.head_dim,
                kv = config.num_key_value_heads * config.head_dim;
  const int64_t towers = 4 * 2 * config.num_hidden_layers *
                         (2 * h * q + 2 * h * kv + 3 * h * config.intermediate_size);
  const int64_t replicated = whole - towers;
  ASSERT_GT(replicated, 0);
  for (const MeshOutputs& rank :
       dist::many_ranks(checkpoint.open(), config, inputs, strategy, 1, "", {4, 1, 1})) {
    EXPECT_EQ(rank.weight_bytes, towers / 4 + replicated);
    EXPECT_LE(static_cast<double>(rank.weight_bytes),
              0.30 * static_cast<double>(towers) + static_cast<double>(replicated));
  }
}

// B14 under tensor parallelism: a NaN in a slice is found by the rank that holds it.
TEST(MeshRandom, RankRefusesANanInItsSlice) {
  TransformerConfig config = eight_heads();
  const auto backend = cpu::make_cpu_backend({.num_threads = 1});
  Transformer model(*backend, config, DType::f32);
  const VisitFunction visit = [&](WeightVisitor& v) { model.visit_gen(v); };
  std::vector<Tensor> tensors;
  std::vector<NamedTensor> named;
  const std::string victim = "layers.1.self_attn.to_add_out.weight";
  for (const ListedTensor& listed : list_tensors(visit)) {
    tensors.push_back(allocate_host_tensor(listed.shape, DType::f32));
    backend->fill(tensors.back().view, 1.0f);
    // Row 3, in the columns of the third rank of four.
    if (listed.name == victim) {
      tensors.back().view.as<float>()[3 * listed.shape[1] + listed.shape[1] * 5 / 8] = NAN;
    }
    named.push_back({listed.name, tensors.back().view});
  }
  const ScratchFolder folder;
  write_safetensors(folder.path() / "diffusion_pytorch_model.safetensors", named);
  for (int rank = 0; rank < 4; ++rank) {
    LoadOptions options;
    options.shard = {rank, 4, nullptr};
    std::string refusal;
    try {
      check_weights(Safetensors::open_folder(folder.path()), visit, options);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::numeric);
      refusal = error.what();
    }
    EXPECT_EQ(refusal.find(victim) != std::string::npos, rank == 2)
        << "rank " << rank << ": " << refusal;
  }
}

}  // namespace
}  // namespace orrery
