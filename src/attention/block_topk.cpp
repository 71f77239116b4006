#include <utility>

#include "attention/block_rule.h"
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
  bool needs_whole_groups() const override { return options_.share_kv_group; }

  PlannedAttention plan(const AttentionCall& call) const override {
    BlockSelection rule = rule_of(call, options_);
    rule.target_sparsity = target_sparsity_;
    return plan_by_rule(call, *this, options_, rule);
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
