// Ranks on CUDA devices, threads of one process: collectives are right, overlapped work does not
// race, a rank that fails ends all, and every mesh of two gives what one device gives. Needs two
// devices and NCCL, no CPU backend, no media libraries.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>

#include "../e2e/small_request.h"
#include "base/error.h"
#include "base/json.h"
#include "cuda/cuda_backend.h"
#include "dist/mesh_run.h"
#include "dist/nccl_comm.h"
#include "dist/thread_comm.h"
#include "engine/fidelity.h"
#include "engine/ranks.h"
#include "model/random_weights.h"
#include "orrery/engine.h"
#include "published/presets.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

constexpr int64_t kEngineChoice = 0;

int count_devices() {
  int count = 0;
  try {
    while (true) {
      cuda::device_memory(count);
      ++count;
    }
  } catch (const Error&) {
    return count;
  }
}

class DeviceMesh : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_nccl_built()) GTEST_SKIP() << "this build has no NCCL";
    if (count_devices() < 2) GTEST_SKIP() << "needs two CUDA devices";
  }
};

using Body = std::function<void(int rank, Backend& backend, const MeshGroups& groups)>;

// body on every rank of the mesh, rank r on cuda:r. Everything of a rank ends on its own thread.
void on_devices(const Mesh& mesh, int64_t part_rows, const Body& body) {
  const auto size = static_cast<size_t>(mesh.world());
  ThreadWorld world(mesh.world());
  std::vector<std::unique_ptr<Backend>> backends(size);
  std::vector<MeshGroups> groups(size);
  world.run([&](int rank) {
    const auto at = static_cast<size_t>(rank);
    backends[at] = cuda::make_cuda_backend({rank});
    groups[at] = connect(world, mesh, rank, *backends[at], part_rows);
  });
  world.run([&](int rank) { body(rank, *backends[size_t(rank)], groups[size_t(rank)]); },
            [&] {
              for (const MeshGroups& of_rank : groups) abort(of_rank);
            });
  world.run([&](int rank) {
    groups[static_cast<size_t>(rank)] = {};
    backends[static_cast<size_t>(rank)].reset();
  });
}

Tensor to_device(Backend& backend, const std::vector<float>& values, Shape shape,
                 DType dtype = DType::f32) {
  Tensor wide = backend.allocate_tensor(shape, DType::f32);
  backend.upload(wide.view, make_view(values.data(), shape, DType::f32));
  if (dtype == DType::f32) return wide;
  Tensor narrow = backend.allocate_tensor(shape, dtype);
  backend.copy(narrow.view, wide.view);
  backend.synchronize();
  return narrow;
}

std::vector<float> to_host(Backend& backend, const View& x) {
  Tensor wide = backend.allocate_tensor(x.shape, DType::f32);
  backend.copy(wide.view, x);
  std::vector<float> values(static_cast<size_t>(x.numel()));
  backend.download(make_mut_view(values.data(), x.shape, DType::f32), wide.view);
  return values;
}

TEST_F(DeviceMesh, SumsGathersAndBroadcasts) {
  on_devices({1, 2, 1}, kEngineChoice, [](int rank, Backend& backend, const MeshGroups& groups) {
    Communicator& comm = *groups.cp;
    ASSERT_EQ(comm.rank(), rank);
    ASSERT_EQ(comm.size(), 2);
    for (DType dtype : {DType::f32, DType::bf16}) {
      // Whole words: NCCL reads the end of an odd number of bf16 values with what is behind it.
      const Tensor x = to_device(backend, {1.0f + float(rank), 2.0f, -3.0f, 0.5f}, {4}, dtype);
      comm.all_reduce(x.view);
      EXPECT_EQ(to_host(backend, x.view), (std::vector<float>{3.0f, 4.0f, -6.0f, 1.0f}));
    }
    const Tensor mine = to_device(backend, {float(rank), 10.0f * float(rank)}, {2});
    const Tensor all = to_device(backend, {-1, -1, -1, -1}, {2, 2});
    comm.all_gather(all.view, mine.view);
    EXPECT_EQ(to_host(backend, all.view), (std::vector<float>{0, 0, 1, 10}));
    // In place: a rank's own block of the result is what it brings.
    const Tensor in_place = to_device(backend, {0, 0, 0, 0}, {2, 2});
    backend.fill(in_place.view.select(0, rank), float(rank + 5));
    comm.all_gather(in_place.view, in_place.view.select(0, rank));
    EXPECT_EQ(to_host(backend, in_place.view), (std::vector<float>{5, 5, 6, 6}));
    comm.broadcast(mine.view, 1);
    EXPECT_EQ(to_host(backend, mine.view), (std::vector<float>{1, 10}));
    comm.barrier();
  });
}

// Two trades at once, blocks with gaps; a rank's own blocks stay as they are.
TEST_F(DeviceMesh, Exchanges) {
  on_devices({1, 2, 1}, kEngineChoice, [](int rank, Backend& backend, const MeshGroups& groups) {
    const float base = 100.0f * float(rank);
    const Tensor in =
        to_device(backend, {base, base + 1, base + 2, base + 3, base + 4, base + 5}, {2, 3});
    const Tensor dense = to_device(backend, {-1, -1, -1, -1, -1, -1}, {2, 3});
    const Tensor gaps = to_device(backend, {-1, -1, -1, -1, -1, -1}, {2, 3});
    const Trade trades[] = {{dense.view, in.view},
                            {gaps.view.slice(1, 0, 2), in.view.slice(1, 1, 2)}};
    groups.cp->exchange(trades);
    const float sent = rank == 0 ? 100.0f : 3.0f;  // block `rank` of the other
    const std::vector<float> kept{-1, -1, -1};
    std::vector<float> want_dense{sent, sent + 1, sent + 2}, want_gaps{sent + 1, sent + 2, -1};
    want_dense.insert(rank == 0 ? want_dense.begin() : want_dense.end(), kept.begin(), kept.end());
    want_gaps.insert(rank == 0 ? want_gaps.begin() : want_gaps.end(), kept.begin(), kept.end());
    EXPECT_EQ(to_host(backend, dense.view), want_dense);
    EXPECT_EQ(to_host(backend, gaps.view), want_gaps);
  });
}

// Two blocks of rows 0 (halo), 1, 2, 3 (halo); nobody stands outside of the row of ranks.
TEST_F(DeviceMesh, HalosComeFromTheNeighbours) {
  on_devices({1, 2, 1}, kEngineChoice, [](int rank, Backend& backend, const MeshGroups& groups) {
    std::vector<float> values;
    for (int i = 0; i < 16; ++i) values.push_back(100.0f * float(rank) + float(i));
    const Tensor rows = to_device(backend, values, {2, 4, 2});
    const MutView& x = rows.view;
    groups.cp->exchange_halos({x.select(1, 0), x.select(1, 3), x.select(1, 1), x.select(1, 2)});
    std::vector<float> want = values;
    for (size_t block = 0; block < 2; ++block) {
      for (size_t i = 0; i < 2; ++i) {
        if (rank == 0) want[8 * block + 6 + i] = 100.0f + float(8 * block + 2 + i);
        if (rank == 1) want[8 * block + i] = float(8 * block + 4 + i);
      }
    }
    EXPECT_EQ(to_host(backend, rows.view), want);
  });
}

// What is sent is what was written before, and what is read after finish() has arrived, with other
// work between; 200 rounds queued at once, so that a missing wait between the streams shows.
TEST_F(DeviceMesh, OverlappedCollectivesKeepTheirOrder) {
  on_devices({1, 2, 1}, kEngineChoice, [](int rank, Backend& backend, const MeshGroups& groups) {
    constexpr int64_t kRounds = 200, kWide = int64_t{1} << 20;
    const Tensor x = backend.allocate_tensor({2, kWide}, DType::f32);
    const Tensor arrived = backend.allocate_tensor({2, kWide}, DType::f32);
    const Tensor sums = backend.allocate_tensor({kWide}, DType::f32);
    const Tensor seen = backend.allocate_tensor({kRounds, 2}, DType::f32);
    const Tensor other = backend.allocate_tensor({1024, 1024}, DType::f32);
    const Tensor product = backend.allocate_tensor({1024, 1024}, DType::f32);
    backend.fill(other.view, 0.5f);
    for (int64_t i = 0; i < kRounds; ++i) {
      backend.fill(x.view, float(2 * i + rank));
      backend.fill(sums.view, float(i + rank));
      const Trade trade{arrived.view, x.view};
      const auto exchanged = groups.cp->start_exchange({&trade, 1});
      const auto summed = groups.cp->start_all_reduce(sums.view);
      backend.linear(product.view, other.view, other.view);
      groups.cp->finish(exchanged);
      backend.copy(seen.view.slice(0, i, 1).slice(1, 0, 1),
                   arrived.view.select(0, 1 - rank).slice(0, kWide - 1, 1).unsqueeze(0));
      groups.cp->finish(summed);
      backend.copy(seen.view.slice(0, i, 1).slice(1, 1, 1),
                   sums.view.slice(0, kWide - 1, 1).unsqueeze(0));
    }
    const std::vector<float> values = to_host(backend, seen.view);
    for (int64_t i = 0; i < kRounds; ++i) {
      EXPECT_EQ(values[size_t(2 * i)], float(2 * i + 1 - rank)) << i;
      EXPECT_EQ(values[size_t(2 * i + 1)], float(2 * i + 1)) << i;
    }
  });
}

// Its message comes out, nobody waits for it, and the group can be used again.
TEST_F(DeviceMesh, AFailingRankEndsAll) {
  ThreadWorld world(2);
  std::array<std::unique_ptr<Backend>, 2> backends;
  std::array<MeshGroups, 2> groups;
  const auto all = [&](const Body& body) {
    world.run([&](int rank) { body(rank, *backends[size_t(rank)], groups[size_t(rank)]); },
              [&] {
                for (const MeshGroups& of_rank : groups) abort(of_rank);
              });
  };
  world.run([&](int rank) {
    backends[size_t(rank)] = cuda::make_cuda_backend({rank});
    groups[size_t(rank)] = connect(world, {1, 2, 1}, rank, *backends[size_t(rank)]);
  });
  const auto start = std::chrono::steady_clock::now();
  try {
    all([](int rank, Backend& backend, const MeshGroups& of_rank) {
      of_rank.cp->barrier();
      if (rank == 1) fail(ErrorKind::numeric, "layer 7 holds a NaN");
      const Tensor x = to_device(backend, {1, 2}, {2});
      of_rank.cp->all_reduce(x.view);  // rank 1 never comes
      backend.synchronize();
    });
    FAIL() << "the failure was lost";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::numeric);
    EXPECT_STREQ(error.what(), "layer 7 holds a NaN");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  EXPECT_THROW(all([](int, Backend& backend, const MeshGroups& of_rank) {
                 of_rank.cp->all_reduce(to_device(backend, {1, 2}, {2}).view);
               }),
               Error);
  all([](int, Backend& backend, const MeshGroups& of_rank) {
    renew(of_rank);
    const Tensor x = to_device(backend, {1, 2}, {2});
    of_rank.cp->all_reduce(x.view);
    EXPECT_EQ(to_host(backend, x.view), (std::vector<float>{2, 4}));
  });
  world.run([&](int rank) {
    groups[size_t(rank)] = {};
    backends[size_t(rank)].reset();
  });
}

// --- models --------------------------------------------------------------------------------------

struct Model {
  const char* name;
  TransformerConfig config;
  dist::MeshInputs inputs;
};

// Nano's shape of heads, small; 1275 video tokens (odd in time, height and width, of a latent that
// patches do not divide), sound and actions where the config has them.
Model small(int64_t hidden, int64_t heads, int64_t kv_heads) {
  Model model;
  model.config = TransformerConfig::from_json(model_preset("nano").transformer);
  model.config.num_hidden_layers = 3;
  model.config.hidden_size = hidden;
  model.config.num_attention_heads = heads;
  model.config.num_key_value_heads = kv_heads;
  model.config.intermediate_size = 3 * hidden;
  model.config.vocab_size = 997;
  model.inputs = dist::random_inputs(model.config, 37, 5, 29, 34);
  return model;
}

std::string sparse(const char* kernel) {
  return concat(R"({"name": "block_sparse", "config": {"block_size": [64, 64], "selection": )",
                R"({"name": "block_topk", "config": {"target_sparsity": 0.6}}, )",
                R"("backend": {"require": ")", kernel, "\"}}}");
}

struct Strategy {
  const char* name;
  int steps;
  std::string json;
};

std::vector<Strategy> strategies(DType dtype) {
  // The kernels written for the device take bf16.
  const char* kernel = dtype == DType::bf16 ? "native" : "reference";
  const std::string mixed = concat(
      R"({"presets": {"dense": "FLASH_ATTN", "sparse": )", sparse(kernel), "}, ",
      R"("layouts": {"dense": {"default": "dense"}, "mixed": {"default": "dense", "overrides": [)",
      R"({"attention_role": "cosmos3.gen", "layers": [1], "use": "sparse"}]}}, )",
      R"("schedule": {"coordinate": "step_index", "phases": [{"until": 1, "layout": "dense"}, )",
      R"({"until": null, "layout": "mixed"}]}})");
  return {{"dense", 1, R"({"default": "FLASH_ATTN"})"},
          {"sparse", 1, concat(R"({"per_role": {"cosmos3.gen": )", sparse(kernel), "}}")},
          {"mixed", 2, mixed}};
}

double difference(const std::vector<float>& got, const std::vector<float>& want) {
  double sum = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    sum += std::pow(double(got[i]) - double(want[i]), 2);
    norm += std::pow(double(want[i]), 2);
  }
  return std::sqrt(sum / norm);
}

// f32: another order of a sum of K terms moves it by about sqrt(K) half-ulps; two cut or re-tiled
// products a layer, 4 for what later layers make of it. bf16: every stored value is rounded to 2^-9
// of its size, about ten times a layer, and any of these roundings may fall differently once sums
// are ordered differently (tp also rounds each rank's part); independent moves add up as the root
// of their number, 2 covers tp's parts. A selection of blocks may hang on such a move, which then
// swaps a few blocks of near-equal weight.
double tolerance(const TransformerConfig& config, DType dtype, bool selects) {
  const auto layers = double(config.num_hidden_layers);
  if (dtype == DType::f32) {
    return 4 * 2 * layers * std::sqrt(double(config.intermediate_size)) * 0x1p-24 *
           (selects ? 100 : 1);
  }
  return 2 * std::sqrt(10 * layers) * 0x1p-9 * (selects ? 3 : 1);
}

void expect_one_device_output(const Model& model, DType dtype, const dist::MakeWeights& weights) {
  const AttentionInventory inventory{static_cast<int>(model.config.num_hidden_layers),
                                     {AttentionRole::und, AttentionRole::gen},
                                     "transformer",
                                     0,
                                     0};
  for (const Strategy& s : strategies(dtype)) {
    const Json json = Json::parse(s.json, s.name);
    const AttentionStrategy strategy = AttentionStrategy::resolve(inventory, &json, nullptr);
    const auto run = [&](Backend& backend, const MeshGroups& groups) {
      return dist::evaluate(backend, dtype, weights, model.config, model.inputs, strategy, s.steps,
                            groups);
    };
    dist::MeshOutputs want;
    {
      const auto backend = cuda::make_cuda_backend({0});
      want = run(*backend, make_absent_groups({}, 0));
    }
    const bool selects = want.kept_blocks < want.all_blocks;
    EXPECT_EQ(selects, std::string(s.name) != "dense") << s.name;
    for (const Mesh& mesh : {Mesh{2, 1, 1}, Mesh{1, 2, 1}}) {
      // One part, and several.
      for (int64_t part_rows : {int64_t{1} << 30, int64_t{128}}) {
        std::array<dist::MeshOutputs, 2> got;
        on_devices(mesh, part_rows, [&](int rank, Backend& backend, const MeshGroups& groups) {
          got[size_t(rank)] = run(backend, groups);
        });
        const std::string label = concat(model.name, " ", name_of(dtype), " ", s.name, ", tp ",
                                         mesh.tp, " cp ", mesh.cp, ", parts of ", part_rows);
        ASSERT_EQ(got[0].values.size(), want.values.size()) << label;
        EXPECT_EQ(std::memcmp(got[0].values.data(), got[1].values.data(),
                              want.values.size() * sizeof(float)),
                  0)
            << label << ": ranks differ";
        const double found = difference(got[0].values, want.values);
        EXPECT_LT(found, tolerance(model.config, dtype, selects)) << label;
        std::printf("%s: differs by %.2e, limit %.2e\n", label.c_str(), found,
                    tolerance(model.config, dtype, selects));
      }
    }
  }
}

dist::MakeWeights random_of(DType dtype) {
  return [dtype](Transformer& model, const Shard& shard) {
    dist::RankWeights held;
    held.store = random_weights(model.backend(), dist::both_towers(model), dtype, 7, shard);
    return held;
  };
}

TEST_F(DeviceMesh, RandomModelGivesTheOneDeviceOutputInF32) {
  Model model = small(512, 8, 2);
  model.name = "8 over 2 heads";
  expect_one_device_output(model, DType::f32, random_of(DType::f32));
}

TEST_F(DeviceMesh, RandomModelGivesTheOneDeviceOutputInBf16) {
  Model model = small(1024, 16, 4);
  model.name = "16 over 4 heads";
  expect_one_device_output(model, DType::bf16, random_of(DType::bf16));
}

// The checkpoint of the repository.
// Layers stay on the device, or take turns there.
TEST_F(DeviceMesh, PicoGivesTheOneDeviceOutput) {
  const std::filesystem::path folder = source_dir() / "models/cosmos3-pico/transformer";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << folder << " is not there";
  Model model;
  model.config = TransformerConfig::from_json(Json::load(folder / "config.json"));
  const int64_t p = model.config.latent_patch_size;
  model.inputs = dist::random_inputs(model.config, 37, 5, 15 * p - p / 2, 17 * p);
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (bool streams : {false, true}) {
      model.name = streams ? "pico, layers in turns" : "pico";
      dist::StoredOptions how;
      how.streams = streams;
      how.dtype = dtype;
      expect_one_device_output(model, dtype, [&](Transformer& of_rank, const Shard& shard) {
        return dist::stored_weights(Safetensors::open_folder(folder), of_rank, shard, how);
      });
    }
  }
}

// --- whole requests ------------------------------------------------------------------------------

// Odd numbers of tokens: 5 latent frames of 17 x 15; 9 latent rows for one rank's decode, 8 for the
// other's.
Result generate(const std::string& dtype, const Mesh& mesh, const std::string& offload,
                const std::string& recipe) {
  EngineOptions options;
  options.device = "cuda";
  options.dtype = value_named<ComputeType>(dtype).value();
  options.tp_degree = mesh.tp;
  options.cp_degree = mesh.cp;
  options.cfg_degree = mesh.cfg;
  options.offload = value_named<Offload>(offload).value();
  if (!recipe.empty()) options.attention = source_dir() / "recipes/attention" / recipe;
  Request request = e2e::small_request(272, 240, 17);
  request.num_inference_steps = 4;
  request.seed = 11;
  return Engine::open(source_dir() / "models/cosmos3-pico", options).generate(request);
}

// Every mesh of two x strategy x offload: the clip of one device. In f32 the sum of a few steps'
// roundings; in bf16 what the clip test allows between devices, and three times as much where
// blocks are selected, as in tolerance(). Guidance ranks share the work of decoding, whose
// convolutions of fewer rows may add in another order: half a level at most.
TEST_F(DeviceMesh, EngineGivesTheOneDeviceClip) {
  if (!std::filesystem::exists(source_dir() / "models/cosmos3-pico")) GTEST_SKIP();
  for (const char* recipe : {"", "pico-mixed-layers.json", "pico-static-sparse.json"}) {
    for (const char* dtype : {"fp32", "bf16"}) {
      const Result want = generate(dtype, {}, "none", recipe);
      EXPECT_EQ(kept_share(want.attention) < 1, *recipe != 0) << kept_share(want.attention);
      for (const Mesh& mesh : {Mesh{2, 1, 1}, Mesh{1, 2, 1}, Mesh{1, 1, 2}}) {
        for (const char* offload : {"none", "model", "layer"}) {
          const Result got = generate(dtype, mesh, offload, recipe);
          const std::string label = concat(dtype, " tp ", mesh.tp, " cp ", mesh.cp, " cfg ",
                                           mesh.cfg, ", offload ", offload, ", ", recipe);
          ASSERT_EQ(got.latents.shape, want.latents.shape) << label;
          const double off = difference(got.latents.values, want.latents.values);
          const double fidelity = psnr(got.frames, want.frames);
          std::printf("%s: latents differ by %.2e, frames %.1f dB\n", label.c_str(), off, fidelity);
          if (mesh.cfg == 2) {
            EXPECT_EQ(off, 0) << label;
          } else {
            EXPECT_LT(off, std::string(dtype) == "fp32" ? 1e-3 : *recipe == 0 ? 0.1 : 0.3) << label;
          }
          EXPECT_GT(fidelity, mesh.cfg == 2 || std::string(dtype) == "fp32" ? 48 : 30) << label;
        }
      }
    }
  }
}

// Two ranks of cp share each key/value head.
TEST_F(DeviceMesh, GivesTheOneDeviceOutputOfHeadsThatRanksShare) {
  Model model = small(512, 8, 1);
  model.name = "8 over 1 heads";
  const AttentionStrategy dense = AttentionStrategy::dense(
      {static_cast<int>(model.config.num_hidden_layers), {}, "transformer", 0, 0});
  const dist::MakeWeights weights = random_of(DType::bf16);
  std::vector<float> want;
  {
    const auto backend = cuda::make_cuda_backend({0});
    want = dist::evaluate(*backend, DType::bf16, weights, model.config, model.inputs, dense, 1,
                          make_absent_groups({}, 0))
               .values;
  }
  on_devices({1, 2, 1}, 128, [&](int, Backend& backend, const MeshGroups& groups) {
    const auto got =
        dist::evaluate(backend, DType::bf16, weights, model.config, model.inputs, dense, 1, groups);
    EXPECT_LT(difference(got.values, want), tolerance(model.config, DType::bf16, false));
  });
}

}  // namespace
}  // namespace orrery
