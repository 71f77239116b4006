#include "model/linear.h"

#include "base/error.h"
#include "dist/communicator.h"

namespace orrery {

int64_t Linear::out_features() const {
  int64_t total = 0;
  for (const View& weight : weights) total += weight.dim(0);
  return total;
}

int64_t Linear::in_features() const { return weights.empty() ? 0 : weights.front().dim(1); }

void apply(Backend& backend, MutView out, Operand x, const Linear& linear, View residual,
           Activation activation) {
  const bool reduces = linear.reduce != nullptr && linear.reduce->size() > 1;
  require(!reduces || activation == Activation::none,
          "linear: an activation cannot follow a partial sum");
  const bool adds = !reduces || linear.reduce->rank() == 0;
  const auto project = [&](const RowRange& part) {
    int64_t column = 0;
    for (size_t i = 0; i < linear.weights.size(); ++i) {
      const int64_t width = linear.weights[i].dim(0);
      const auto block = [&](const View& all) {
        return MutView::cast(all.slice(0, part.begin, part.count).slice(1, column, width));
      };
      LinearOptions options;
      if (adds) {
        if (!linear.biases.empty()) options.bias = linear.biases[i];
        if (residual) options.residual = block(residual);
        options.activation = activation;
      }
      backend.linear(block(out), x.slice(0, part.begin, part.count), linear.weights[i], options);
      column += width;
    }
  };
  if (!reduces) return project({0, out.dim(0)});
  // The sum of one part travels while the next is computed.
  Communicator::Ticket last = 0;
  for (const RowRange& part : row_parts(out.dim(0), linear.reduce)) {
    project(part);
    last = linear.reduce->start_all_reduce(out.slice(0, part.begin, part.count));
  }
  linear.reduce->finish(last);
}

Operand narrowed(Backend& backend, Arena& arena, View x, const Linear& linear) {
  const DType dtype = linear.weights.front().dtype;
  if (!is_narrow(dtype)) return x;
  const bool is_static = static_cast<bool>(linear.input_scale);
  MutOperand out = arena.make(x.shape, dtype);
  out.block = is_static ? ScaleBlock{} : ScaleBlock{1, 0};
  out.scales = is_static ? MutView::cast(linear.input_scale.reshape({1, 1}))
                         : arena.make(out.block.shape_for(x.shape), DType::f32);
  backend.quantise(out, x, is_static ? Scaling::given : Scaling::amax);
  return out;
}

}  // namespace orrery
