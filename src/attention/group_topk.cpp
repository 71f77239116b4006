#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "attention/block_grid.h"
#include "attention/host_scores.h"
#include "attention/method.h"
#include "base/error.h"

namespace orrery {

namespace {

// block_topk with one list per group of query heads that read the same keys: a kernel then fetches
// a key block once for the whole group. The group's score is the log-sum-exp of its heads' scores.
class GroupTopk final : public AttentionMethod {
 public:
  GroupTopk(BlockSparseOptions options, double target_sparsity)
      : options_(std::move(options)), target_sparsity_(target_sparsity) {}
  std::string description() const override {
    return options_.describe("block_topk", concat("target sparsity ", target_sparsity_,
                                                  ", one list per key/value head"));
  }
  int reuse_steps() const override { return options_.reuse_steps; }
  bool needs_whole_groups() const override { return true; }

  PlannedAttention plan(const AttentionCall& call) const override {
    const BlockGrid grid(call, options_.block_q, options_.block_k);
    BlockSelection rule;
    rule.target_sparsity = target_sparsity_;
    const int64_t budget = rule.budget(grid.candidates());
    PlannedAttention planned;
    planned.plan.scale = call.scale;
    planned.plan.implementation = options_.kernel.implementation;
    planned.all_blocks = grid.all();
    planned.kept_blocks = grid.kept(budget);
    if (planned.kept_blocks == planned.all_blocks) return planned;

    Selection& selection = call.selections.for_steps(
        call, *this, {grid.heads, grid.rows, grid.blocks}, options_.reuse_steps);
    if (selection.stale) select(call, grid, budget, selection);
    planned.mask = selection.mask(options_.block_q, options_.block_k);
    return planned;
  }

 private:
  void select(const AttentionCall& call, const BlockGrid& grid, int64_t budget,
              Selection& selection) const {
    const MutView scores =
        score_on_host(call, options_, "block_topk with share_kv_group", selection);
    selection.stale = false;
    if (call.backend.is_dry()) return;
    const int64_t group = grid.heads / call.k.dim(1);
    for (int64_t first = 0; first < grid.heads; first += group) {
      for (int64_t row = 0; row < grid.rows; ++row) {
        const std::vector<int32_t> kept = choose(call, grid, budget, scores, first, group, row);
        for (int64_t head = first; head < first + group; ++head) {
          const int64_t list = head * grid.rows + row;
          std::copy(kept.begin(), kept.end(), selection.indices.as<int32_t>() + list * grid.blocks);
          selection.counts.as<int32_t>()[list] = static_cast<int32_t>(kept.size());
        }
      }
    }
  }

  std::vector<int32_t> choose(const AttentionCall& call, const BlockGrid& grid, int64_t budget,
                              const MutView& scores, int64_t first, int64_t group,
                              int64_t row) const {
    std::vector<int32_t> kept(static_cast<size_t>(grid.blocks));
    std::iota(kept.begin(), kept.end(), 0);
    if (grid.is_dense(row)) return kept;
    std::vector<double> joint(kept.size());
    for (int64_t block = 0; block < grid.blocks; ++block) {
      const auto score = [&](int64_t head) {
        return double(scores.as<float>()[(head * grid.rows + row) * grid.blocks + block]);
      };
      double top = score(first), sum = 0;
      for (int64_t head = first + 1; head < first + group; ++head) top = std::max(top, score(head));
      for (int64_t head = first; head < first + group; ++head) sum += std::exp(score(head) - top);
      joint[static_cast<size_t>(block)] = top + std::log(sum);
    }
    const auto free = std::stable_partition(kept.begin(), kept.end(),
                                            [&](int32_t b) { return grid.is_protected(b); });
    // As in block_topk, a row that cannot be scored keeps the first candidates.
    if (std::all_of(joint.begin(), joint.end(), [](double s) { return std::isfinite(s); })) {
      order_by_score({free, kept.end()}, joint, own_block(call, options_, row));
    }
    kept.erase(free + budget, kept.end());
    std::sort(kept.begin(), kept.end());
    return kept;
  }

  BlockSparseOptions options_;
  double target_sparsity_;
};

}  // namespace

std::unique_ptr<AttentionMethod> make_group_topk(BlockSparseOptions options,
                                                 double target_sparsity) {
  return std::make_unique<GroupTopk>(std::move(options), target_sparsity);
}

}  // namespace orrery
