#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "attention/block_grid.h"
#include "attention/method.h"
#include "base/error.h"

namespace orrery {

namespace {

class Threshold final : public AttentionMethod {
 public:
  Threshold(BlockSparseOptions options, double mass) : options_(std::move(options)), mass_(mass) {}
  std::string description() const override {
    return options_.describe("threshold", concat("softmax mass ", mass_));
  }
  int reuse_steps() const override { return options_.reuse_steps; }

  PlannedAttention plan(const AttentionCall& call) const override {
    require(call.backend.device() == DeviceKind::cpu, ErrorKind::unsupported,
            "attention: the threshold selection runs on the CPU backend only, because it counts each "
            "row's blocks on the host; use block_topk here");
    const BlockGrid grid(call, options_.block_q, options_.block_k);
    PlannedAttention planned;
    planned.plan.scale = call.scale;
    planned.plan.implementation = options_.kernel.implementation;
    planned.all_blocks = planned.kept_blocks = grid.all();
    if (grid.candidates() == 0 || mass_ == 1.0) return planned;

    const Shape shape{grid.heads, grid.rows, grid.blocks};
    Selection& selection = call.selections.for_steps(call, *this, shape, options_.reuse_steps);
    if (selection.stale) select(call, grid, selection);
    planned.kept_blocks = selection.kept;
    if (planned.kept_blocks < planned.all_blocks) {
      planned.mask = selection.mask(options_.block_q, options_.block_k);
    }
    return planned;
  }

 private:
  void select(const AttentionCall& call, const BlockGrid& grid, Selection& selection) const {
    const MutView scores = call.arena.make({grid.heads, grid.rows, grid.blocks}, DType::f32);
    BlockSelection rule;
    rule.block_q = options_.block_q;
    rule.block_k = options_.block_k;
    rule.scale = call.scale;
    call.backend.select_blocks(selection.indices, selection.counts, call.q, call.k, rule, scores);
    selection.stale = false;
    selection.kept = 0;
    if (call.backend.is_dry()) return;
    for (int64_t list = 0; list < grid.heads * grid.rows; ++list) {
      const auto blocks = static_cast<size_t>(grid.blocks);
      const std::span<const float> row(scores.as<float>() + list * grid.blocks, blocks);
      const std::vector<int32_t> kept = choose(call, grid, row, list % grid.rows);
      std::copy(kept.begin(), kept.end(), selection.indices.as<int32_t>() + list * grid.blocks);
      selection.counts.as<int32_t>()[list] = static_cast<int32_t>(kept.size());
      selection.kept += static_cast<int64_t>(kept.size());
    }
  }

  // Ascending ids of the blocks that query block `row` keeps; scores are logarithms of softmax mass.
  std::vector<int32_t> choose(const AttentionCall& call, const BlockGrid& grid,
                              std::span<const float> scores, int64_t row) const {
    std::vector<int32_t> kept(scores.size());
    std::iota(kept.begin(), kept.end(), 0);
    const bool finite =
        std::all_of(scores.begin(), scores.end(), [](float score) { return std::isfinite(score); });
    if (!finite || grid.is_dense(row)) return kept;

    const float top = *std::max_element(scores.begin(), scores.end());
    std::vector<double> mass(scores.size());
    for (size_t i = 0; i < scores.size(); ++i) mass[i] = std::exp(double(scores[i]) - double(top));
    const double wanted = mass_ * std::accumulate(mass.begin(), mass.end(), 0.0);

    const auto free = std::stable_partition(kept.begin(), kept.end(),
                                            [&](int32_t b) { return grid.is_protected(b); });
    double sum = 0;
    for (auto it = kept.begin(); it != free; ++it) sum += mass[static_cast<size_t>(*it)];
    // Equal blocks go to the query's own neighbourhood, not to the start of the video.
    const int64_t here = (call.text + row * options_.block_q) / options_.block_k;
    std::sort(free, kept.end(), [&](int32_t a, int32_t b) {
      const double ma = mass[static_cast<size_t>(a)], mb = mass[static_cast<size_t>(b)];
      if (ma != mb) return ma > mb;
      const int64_t da = std::abs(a - here), db = std::abs(b - here);
      return da != db ? da < db : a < b;
    });
    auto end = free;
    while (end != kept.end() && (sum < wanted || end == kept.begin())) {
      sum += mass[static_cast<size_t>(*end++)];
    }
    kept.erase(end, kept.end());
    std::sort(kept.begin(), kept.end());
    return kept;
  }

  BlockSparseOptions options_;
  double mass_;
};

}  // namespace

std::unique_ptr<AttentionMethod> make_threshold(BlockSparseOptions options, double mass) {
  return std::make_unique<Threshold>(std::move(options), mass);
}

}  // namespace orrery
