#include <utility>

#include "attention/block_rule.h"
#include "base/error.h"

namespace orrery {

namespace {

class Threshold final : public AttentionMethod {
 public:
  Threshold(BlockSparseOptions options, double mass) : options_(std::move(options)), mass_(mass) {}
  std::string description() const override {
    return options_.describe("threshold", concat("softmax mass ", mass_));
  }
  bool keeps_by_data() const override { return true; }
  int reuse_steps() const override { return options_.reuse_steps; }
  bool needs_whole_groups() const override { return options_.share_kv_group; }

  PlannedAttention plan(const AttentionCall& call) const override {
    BlockSelection rule = rule_of(call, options_);
    if (mass_ == 1) return plan_all(call, options_, rule.grid(call.q.dim(0), call.k.dim(0)));
    rule.mass = mass_;
    return plan_by_rule(call, *this, options_, rule);
  }

 private:
  BlockSparseOptions options_;
  double mass_;
};

}  // namespace

std::unique_ptr<AttentionMethod> make_threshold(BlockSparseOptions options, double mass) {
  return std::make_unique<Threshold>(std::move(options), mass);
}

}  // namespace orrery
