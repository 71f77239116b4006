#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "attention/block_grid.h"
#include "attention/host_scores.h"
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
    const MutView scores = score_on_host(call, options_, "the threshold selection", selection);
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

  // Ascending ids of the blocks that query block `row` keeps; scores are logarithms of softmax
  // mass.
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
    order_by_score({free, kept.end()}, mass, own_block(call, options_, row));
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
