// Block-sparse against dense attention of the CPU backend, in one process: 8192 queries and keys,
// 8 query and 2 key/value heads of 64, 75% sparsity in blocks of 64, the selector included.
//
//   attention_bench >> bench/results/cpu-attention.jsonl
//
// One JSON line a figure; value over peer_value is the ratio asked about. The three calls take
// turns, and each figure is the fastest of its runs: other load on the machine falls on all alike
// and then drops out.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "base/provenance.h"
#include "cpu/cpu_backend.h"

namespace {

using namespace orrery;

constexpr int64_t kTokens = 8192, kHeads = 8, kKvHeads = 2, kHeadDim = 64, kBlock = 64;
constexpr int kRuns = 7;

Tensor normals(Backend& backend, Shape shape, uint32_t seed) {
  Tensor tensor = backend.allocate_tensor(shape, DType::f32);
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < tensor.view.numel(); ++i) tensor.view.as<float>()[i] = normal(engine);
  return tensor;
}

double seconds(const std::function<void()>& fn) {
  const auto start = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int main() {
  const std::unique_ptr<Backend> backend = cpu::make_cpu_backend();
  const Tensor q = normals(*backend, {kTokens, kHeads, kHeadDim}, 1),
               k = normals(*backend, {kTokens, kKvHeads, kHeadDim}, 2),
               v = normals(*backend, {kTokens, kKvHeads, kHeadDim}, 3),
               out = backend->allocate_tensor({kTokens, kHeads, kHeadDim}, DType::f32);
  constexpr int64_t kBlocks = kTokens / kBlock;
  const Tensor indices = backend->allocate_tensor({kHeads, kBlocks, kBlocks}, DType::i32),
               counts = backend->allocate_tensor({kHeads, kBlocks}, DType::i32);
  BlockSelection selection;
  selection.block_q = selection.block_k = kBlock;
  selection.target_sparsity = 0.75;
  selection.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(kHeadDim)));
  const BlockMask mask{kBlock, kBlock, indices.view, counts.view};
  AttentionPlan dense_plan, sparse_plan;
  dense_plan.scale = sparse_plan.scale = selection.scale;
  sparse_plan.mask = &mask;

  const auto select = [&] {
    backend->select_blocks(indices.view, counts.view, q.view, k.view, selection);
  };
  const std::vector<std::function<void()>> calls{
      [&] { backend->attention(out.view, q.view, k.view, v.view, dense_plan); },
      [&] {
        select();
        backend->attention(out.view, q.view, k.view, v.view, sparse_plan);
      },
      select,
  };
  std::vector<double> best(calls.size(), HUGE_VAL);
  for (const auto& call : calls) call();  // packs nothing twice, grows scratch memory
  for (int run = 0; run < kRuns; ++run) {
    for (size_t i = 0; i < calls.size(); ++i) best[i] = std::min(best[i], seconds(calls[i]));
  }

  const auto line = [&](const char* what, size_t index, Json floor) {
    const Json json =
        Json::object()
            .set("bench", "attention")
            .set("case", concat(what, ", ", kTokens, " queries and keys, ", kHeads, "/", kKvHeads,
                                " heads of ", kHeadDim, ", 75% sparsity, fp32"))
            .set("device", backend->description())
            .set("driver", Json())
            .set("commit", measured_commit())
            .set("date", today())
            .set("command", "attention_bench")
            .set("value", best[index] * 1e3)
            .set("unit", "ms")
            .set("floor", std::move(floor))
            .set("peer", "dense, same process")
            .set("peer_value", best[0] * 1e3)
            .set("ratio", best[index] / best[0]);
    std::printf("%s\n", json.dump().c_str());
  };
  // The floor is the work that remains: the kept share of the blocks.
  line("block-sparse with selector", 1, 0.25 * best[0] * 1e3);
  line("selector", 2, Json());
}
