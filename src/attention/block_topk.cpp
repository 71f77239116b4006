#include <utility>

#include "attention/block_grid.h"
#include "attention/method.h"
#include "base/error.h"

namespace orrery {

namespace {

class BlockTopk final : public AttentionMethod {
 public:
  BlockTopk(BlockSparseOptions options, double target_sparsity)
      : options_(std::move(options)), target_sparsity_(target_sparsity) {}
  std::string description() const override {
    return options_.describe("block_topk", concat("target sparsity ", target_sparsity_));
  }
  int reuse_steps() const override { return options_.reuse_steps; }

  PlannedAttention plan(const AttentionCall& call) const override {
    const BlockGrid grid(call, options_.block_q, options_.block_k);
    BlockSelection rule;
    rule.block_q = options_.block_q;
    rule.block_k = options_.block_k;
    rule.target_sparsity = target_sparsity_;
    rule.protected_keys = call.text + call.sequence.control_tokens;
    rule.protected_head_queries = call.sequence.control_tokens;
    rule.protected_tail_keys = call.sequence.tail_tokens();
    rule.protected_tail_queries = call.sequence.tail_tokens();
    rule.scale = call.scale;

    PlannedAttention planned;
    planned.plan.scale = call.scale;
    planned.plan.implementation = options_.kernel.implementation;
    planned.all_blocks = grid.all();
    planned.kept_blocks = grid.kept(rule.budget(grid.candidates()));
    // Nothing to choose: no scoring, and the same kernel as the dense method, hence the same bits.
    if (planned.kept_blocks == planned.all_blocks) return planned;

    const Shape shape{grid.heads, grid.rows, grid.blocks};
    Selection& selection = call.selections.for_steps(call, *this, shape, options_.reuse_steps);
    if (selection.stale) {
      call.backend.select_blocks(selection.indices, selection.counts, call.q, call.k, rule);
      selection.stale = false;
    }
    planned.mask = selection.mask(options_.block_q, options_.block_k);
    return planned;
  }

 private:
  BlockSparseOptions options_;
  double target_sparsity_;
};

}  // namespace

std::unique_ptr<AttentionMethod> make_block_topk(BlockSparseOptions options,
                                                 double target_sparsity) {
  return std::make_unique<BlockTopk>(std::move(options), target_sparsity);
}

}  // namespace orrery
