#include "backend/calls.h"

#include "base/error.h"

namespace orrery {

namespace {
std::string typed(const View& x) { return concat(x.shape, " ", name_of(x.dtype)); }
std::string typed(const Operand& x) {
  return typed(View(x)) + (x.scales ? concat(" with scales ", x.scales.shape) : "");
}
}  // namespace

std::string describe(const LinearArgs& call) {
  return concat("x ", typed(call.x), " with w ", typed(call.w), " to ", name_of(call.out.dtype));
}

std::string describe(const GatedLinearArgs& call) {
  return concat("x ", typed(call.x), " with w ", typed(call.w), " to ", name_of(call.out.dtype));
}

std::string describe(const AttentionArgs& call) {
  return concat("q ", call.q.shape, " with k ", typed(call.k));
}

std::string describe(const SelectBlocksArgs& call) {
  return concat("q ", call.q.shape, " with k ", typed(call.k));
}

std::string describe(const Conv3dArgs& call) {
  return concat("x ", typed(call.x), " with w ", typed(call.w), " to ", typed(call.out));
}

}  // namespace orrery
