#include "tensor/operand.h"

#include <algorithm>

#include "base/error.h"

namespace orrery {

Operand Operand::slice(int dim, int64_t begin, int64_t size) const {
  const View values = View::slice(dim, begin, size);
  const int64_t step = dim == 0 ? block.rows : block.columns;
  if (!scales || step == 0) return {values, scales, block};
  require(begin % step == 0, "operand: a slice begins at ", begin, ", inside a block of ", step,
          " that shares a scale");
  return {values, scales.slice(dim, begin / step, (size + step - 1) / step), block};
}

MutOperand MutOperand::slice(int dim, int64_t begin, int64_t size) const {
  const Operand part = Operand(*this).slice(dim, begin, size);
  return {MutView::cast(part), MutView::cast(part.scales), block};
}

}  // namespace orrery
