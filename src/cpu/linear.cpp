#include <oneapi/dnnl/dnnl.hpp>

#include "base/error.h"
#include "cpu/onednn.h"
#include "cpu/ops.h"

namespace orrery::cpu {

namespace {

constexpr int64_t kBandFloats = int64_t{2} << 20;   // of widened weights: stay in the shared cache
constexpr int64_t kChunkFloats = int64_t{4} << 20;  // of widened rows at a time
// One call's share: its operands fit the second-level cache, and oneDNN reaches its full rate.
constexpr int64_t kTaskRows = 96;
constexpr int64_t kTaskColumns = 128;

// A matrix as oneDNN takes it: f32 rows at a pitch.
struct Matrix {
  const float* data;
  int64_t pitch;
};

bool usable_in_place(const View& x) {
  return x.dtype == DType::f32 && reinterpret_cast<uintptr_t>(x.data) % alignof(float) == 0 &&
         (x.stride(0) >= x.dim(1) || x.dim(0) == 1);
}

// Row `r` of an operand, widened already: times its scales.
void scale_row(const Kernels& kernels, float* row, const Operand& x, int64_t r) {
  if (!x.scales) return;
  const int64_t columns = x.dim(1), wide = x.block.columns == 0 ? columns : x.block.columns;
  const float* scales =
      x.scales.as<float>() + (x.block.rows == 0 ? 0 : r / x.block.rows) * x.scales.stride(0);
  for (int64_t c = 0; c < columns; c += wide, scales += x.scales.stride(1))
    kernels.scale(row + c, row + c, *scales, std::min(wide, columns - c));
}

// `count` rows of x, or columns of its transpose view, from `begin` on, with contiguous rows: where
// they lie if they can be used there, else widened.
Matrix as_floats(const Context& context, Scratch& scratch, const Operand& x, int dim, int64_t begin,
                 int64_t count) {
  const View part = static_cast<const View&>(x).slice(dim, begin, count);
  const int64_t rows = part.dim(0), columns = part.dim(1);
  if (usable_in_place(part)) return {part.as<float>(), std::max(part.stride(0), columns)};
  float* widened = scratch.need(rows * columns);
  parallel_ranges(context, rows, std::max<int64_t>(1, 32768 / std::max<int64_t>(columns, 1)),
                  [&](int64_t first, int64_t end, int) {
                    for (int64_t r = first; r < end; ++r) {
                      float* row = widened + r * columns;
                      context.kernels.to_f32(row, at(part.data, r * part.stride(0), part.dtype),
                                             stored(part.dtype), columns);
                      scale_row(context.kernels, row, x, begin + r);
                    }
                  });
  return {widened, columns};
}

void onednn(Context& context, MutView out, const Operand& x, const Operand& w,
            const LinearOptions& options, const Finish& finish) {
  const Kernels& kernels = context.kernels;
  const int64_t m = x.dim(0), k = x.dim(1), n = w.dim(0);
  const OneThreadCalls one_thread;
  Calls calls;
  // Weights have contiguous rows of K, or of N in the transpose view.
  const bool by_rows = w.stride(1) == 1 || k == 1;
  const Operand matrix = by_rows ? w : Operand(w.permute({1, 0}));
  const int64_t depth = std::max<int64_t>(k, 1);
  const int64_t band =
      usable_in_place(matrix)
          ? n
          : std::max(kTaskColumns, kBandFloats / depth / kTaskColumns * kTaskColumns);
  const int64_t chunk =
      usable_in_place(x) ? m : std::max(kTaskRows, kChunkFloats / depth / kTaskRows * kTaskRows);
  context.per_thread.need_each(context.threads, kTaskRows * kTaskColumns);

  for (int64_t band_begin = 0; band_begin < n; band_begin += band) {
    const int64_t columns = std::min(band, n - band_begin);
    const Matrix b =
        as_floats(context, context.shared, matrix, by_rows ? 0 : 1, band_begin, columns);
    for (int64_t chunk_begin = 0; chunk_begin < m; chunk_begin += chunk) {
      const int64_t rows = std::min(chunk, m - chunk_begin);
      const Matrix a = as_floats(context, context.values, x, 0, chunk_begin, rows);
      const int64_t task_rows = equal_pieces(rows, kTaskRows);
      const int64_t groups = ceil_div(columns, kTaskColumns);
      parallel_tasks(context, groups * ceil_div(rows, task_rows), [&](int64_t task, int thread) {
        const int64_t row = task / groups * task_rows, column = task % groups * kTaskColumns;
        const int64_t height = std::min(task_rows, rows - row);
        const int64_t width = std::min(kTaskColumns, columns - column);
        float* c = context.per_thread.of(thread);
        if (k == 0) {
          std::fill(c, c + height * width, 0.0f);
        } else {
          calls.note(int(dnnl::sgemm(
              'N', by_rows ? 'T' : 'N', height, width, k, 1.0f, a.data + row * a.pitch, a.pitch,
              b.data + column * (by_rows ? b.pitch : 1), b.pitch, 0.0f, c, width)));
        }
        for (int64_t r = 0; r < height; ++r) {
          const int64_t i = chunk_begin + row + r;
          const int64_t residual_at = options.residual ? i * options.residual.stride(0) : 0;
          finish.row(kernels, out, i * out.stride(0), options.residual, residual_at, c + r * width,
                     band_begin + column, width);
        }
      });
    }
  }
  calls.check("linear");
}

// A dot product an element: a row's bytes depend on that row and the weights alone, however many
// rows there are, on whatever rank.
void reference(Context& context, MutView out, const Operand& x, const Operand& w,
               const LinearOptions& options, const Finish& finish) {
  const Kernels& kernels = context.kernels;
  const int64_t m = x.dim(0), k = x.dim(1);
  context.per_thread.need_each(context.threads, 2 * k);
  // Row r as floats: where it lies, or in the buffer.
  const auto floats = [&](float* buffer, const Operand& of, int64_t r) {
    const float* row = read_row(kernels, buffer, of.data, of.dtype, r * of.stride(0), k,
                                k == 1 ? 1 : of.stride(1));
    if (of.scales) scale_row(kernels, buffer, of, r);
    return row;
  };
  parallel_tasks(context, w.dim(0), [&](int64_t column, int thread) {
    float* buffer = context.per_thread.of(thread);
    const float* weights = floats(buffer, w, column);
    for (int64_t r = 0; r < m; ++r) {
      const float sum = kernels.dot(floats(buffer + k, x, r), weights, k);
      const int64_t residual_at = options.residual ? r * options.residual.stride(0) : 0;
      finish.row(kernels, out, r * out.stride(0), options.residual, residual_at, &sum, column, 1);
    }
  });
}

}  // namespace

Implementations<LinearArgs> linear_implementations(Context& context) {
  const auto finished = [&context](auto* product) {
    return [&context, product](const LinearArgs& call) {
      const Finish finish{bias_row(context.kernels, call.options.bias),
                          act(call.options.activation)};
      product(context, call.out, call.x, call.w, call.options, finish);
      return Answer{};
    };
  };
  return {"linear", {{"onednn", finished(onednn)}, {"reference", finished(reference)}}};
}

void quantise(Context& context, MutOperand out, View x, Scaling scaling) {
  // Rows that share no scale are made by themselves.
  const int64_t rows = x.dim(0), step = std::max<int64_t>(out.block.rows, 1);
  if (out.block.rows == 0 && scaling == Scaling::amax) return orrery::quantise(out, x, scaling);
  parallel_tasks(context, ceil_div(rows, step), [&](int64_t i, int) {
    const int64_t count = std::min(step, rows - i * step);
    orrery::quantise(out.slice(0, i * step, count), x.slice(0, i * step, count), scaling);
  });
}

void dequantise(Context& context, MutView out, const Operand& x) {
  parallel_tasks(context, x.dim(0), [&](int64_t r, int) {
    const int64_t block = x.block.rows == 0 ? 0 : r / x.block.rows;
    const Operand row{static_cast<const View&>(x).slice(0, r, 1),
                      x.scales.slice(0, block, 1),
                      {0, x.block.columns}};
    orrery::dequantise(out.slice(0, r, 1), row);
  });
}

}  // namespace orrery::cpu
