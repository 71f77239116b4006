#include <utility>

#include "attention/method.h"

namespace orrery {

namespace {

class Dense final : public AttentionMethod {
 public:
  explicit Dense(KernelChoice kernel) : kernel_(std::move(kernel)) {}
  std::string description() const override { return "dense (" + kernel_.provider + ")"; }
  bool is_dense() const override { return true; }
  PlannedAttention plan(const AttentionCall& call) const override {
    PlannedAttention planned;
    planned.plan.causal = call.site.role == AttentionRole::und;
    planned.plan.scale = call.scale;
    planned.plan.implementation = kernel_.implementation;
    return planned;
  }

 private:
  KernelChoice kernel_;
};

}  // namespace

std::unique_ptr<AttentionMethod> make_dense(KernelChoice kernel) {
  return std::make_unique<Dense>(std::move(kernel));
}

}  // namespace orrery
