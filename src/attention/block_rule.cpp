#include "attention/block_rule.h"

namespace orrery {

BlockSelection rule_of(const AttentionCall& call, const BlockSparseOptions& options) {
  const Sequence& sequence = call.sequence;
  BlockSelection rule;
  rule.block_q = options.block_q;
  rule.block_k = options.block_k;
  if (options.share_kv_group) rule.heads_per_list = call.q.dim(1) / call.k.dim(1);
  rule.protected_keys = call.text + sequence.control_tokens;
  rule.protected_head_queries = sequence.control_tokens;
  rule.protected_tail_keys = rule.protected_tail_queries = sequence.tail_tokens();
  rule.scale = call.scale;
  return rule;
}

PlannedAttention plan_all(const AttentionCall& call, const BlockSparseOptions& options,
                          const BlockGrid& grid) {
  PlannedAttention planned;
  planned.plan.scale = call.scale;
  planned.plan.implementation = options.kernel.implementation;
  planned.all_blocks = call.q.dim(1) * grid.rows * grid.blocks;
  planned.kept_blocks = planned.all_blocks;
  return planned;
}

PlannedAttention plan_by_rule(const AttentionCall& call, const AttentionMethod& method,
                              const BlockSparseOptions& options, const BlockSelection& rule) {
  const BlockGrid grid = rule.grid(call.q.dim(0), call.k.dim(0));
  PlannedAttention planned = plan_all(call, options, grid);
  if (rule.keeps_all(grid)) return planned;

  const int64_t heads = call.q.dim(1), candidates = grid.candidates();
  if (rule.mass > 0) {
    planned.kept_blocks.reset();
  } else {
    const int64_t dropped = candidates - rule.budget(candidates);
    *planned.kept_blocks -= heads * (grid.rows - grid.dense_rows()) * dropped;
  }
  Selection& selection = call.selections.for_steps(
      call, method, {heads / rule.heads_per_list, grid.rows, grid.blocks}, options.reuse_steps);
  if (selection.stale) {
    planned.seconds =
        call.backend.select_blocks(selection.indices, selection.counts, call.q, call.k, rule)
            .seconds;
    selection.stale = false;
  }
  planned.mask = selection.mask(options.block_q, options.block_k);
  return planned;
}

}  // namespace orrery
