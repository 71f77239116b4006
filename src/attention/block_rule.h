// What the block-sparse methods have in common: the rule a call starts from, and the plan of one
// whose blocks the backend chooses.
#pragma once

#include "attention/method.h"

namespace orrery {

// Blocks, sharing and protection of a call. Keys of text, control, sound and action tokens are kept
// by every query, and query blocks that touch control, sound or action rows see every key.
BlockSelection rule_of(const AttentionCall& call, const BlockSparseOptions& options);

// The plan without lists, every block kept: the same kernel as the dense method, hence the same
// bits.
PlannedAttention plan_all(const AttentionCall& call, const BlockSparseOptions& options,
                          const BlockGrid& grid);

// Lists by the backend's select_blocks(): nothing is read back, so the call can be recorded. A rule
// that leaves nothing to choose scores nothing and plans as plan_all().
PlannedAttention plan_by_rule(const AttentionCall& call, const AttentionMethod& method,
                              const BlockSparseOptions& options, const BlockSelection& rule);

}  // namespace orrery
