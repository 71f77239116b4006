#include "cpu/gemm.h"

#include <array>
#include <vector>

#include "cpu/ops.h"

namespace orrery::cpu {

Panels::Panels(const Kernels& kernels, int64_t n)
    : n_(n), lanes_(kernels.lanes), step_(2 * kernels.lanes) {
  // A remainder of at most one vector widens the last full panel instead of half-filling its own.
  const int64_t full = n / step_, rest = n % step_;
  if (rest == 0) {
    count_ = full;
    last_ = 2;
  } else if (rest <= lanes_ && full > 0) {
    count_ = full;
    last_ = 3;
  } else {
    count_ = full + 1;
    last_ = rest <= lanes_ ? 1 : 2;
  }
}

void pack_columns(const Kernels& kernels, float* dst, int64_t width, const void* src, DType dtype,
                  int64_t element, int64_t row_stride, int64_t rows, int64_t k) {
  constexpr int64_t kPiece = 64;
  constexpr int64_t kMaxWidth = 48;
  alignas(64) float block[kMaxWidth * kPiece];
  // Columns of padding are zero rows of the block.
  std::fill(block + rows * kPiece, block + width * kPiece, 0.0f);
  for (int64_t k0 = 0; k0 < k; k0 += kPiece) {
    const int64_t n = std::min(kPiece, k - k0);
    for (int64_t r = 0; r < rows; ++r) {
      kernels.to_f32(block + r * kPiece, at(src, element + r * row_stride + k0, dtype),
                     stored(dtype), n);
    }
    kernels.transpose(dst + k0 * width, width, block, kPiece, width, n);
  }
}

void cut_depth(std::vector<int64_t>& taps, std::vector<DepthSlice>& slices, int64_t depth) {
  for (int64_t begin = 0; begin < depth; begin += kDepthSlice) taps.push_back(begin);
  for (const int64_t& begin : taps) {
    slices.push_back({&begin, 1, std::min(kDepthSlice, depth - begin), begin});
  }
}

void multiply(const Kernels& kernels, float* c, int64_t ldc, const float* const* rows,
              int64_t num_rows, const float* packed, int64_t packed_depth, const Panels& panels,
              int64_t first, int64_t last, std::span<const DepthSlice> slices, bool accumulate) {
  for (const DepthSlice& slice : slices) {
    for (int64_t panel = first; panel < last; ++panel) {
      const int64_t vectors = panels.vectors(panel), height = kernels.rows[vectors];
      const float* b =
          packed + panels.offset(panel, packed_depth) + slice.begin * panels.width(panel);
      float* column = c + panels.begin(panel) - panels.begin(first);
      for (int64_t r = 0; r < num_rows; r += height) {
        kernels.tile[vectors](column + r * ldc, ldc, rows + r, b, slice.taps, slice.num_taps,
                              slice.depth, accumulate);
      }
    }
    accumulate = true;
  }
}

void Finish::row(const Kernels& kernels, const MutView& out, int64_t out_element,
                 const View& residual, int64_t residual_element, const float* c, int64_t first,
                 int64_t n) const {
  alignas(64) float residual_buffer[kChunk], buffer[kChunk];
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t count = std::min(kChunk, n - i), column = first + i;
    const float* add = nullptr;
    if (residual) {
      add = read_row(kernels, residual_buffer, residual.data, residual.dtype,
                     residual_element + column, count);
    }
    float* y = result_row(buffer, out.mut(), out.dtype, out_element + column);
    kernels.epilogue(y, c + i, bias ? bias + column : nullptr, add, act, count);
    finish_row(kernels, y, out.mut(), out.dtype, out_element + column, count);
  }
}

namespace {

// Packs columns [begin, begin + width) of w^T over its whole depth.
void pack_weight_panel(const Kernels& kernels, float* dst, const View& w, int64_t begin,
                       int64_t columns, int64_t width) {
  const int64_t k = w.dim(1);
  if (w.stride(1) == 1 || k == 1) {
    return pack_columns(kernels, dst, width, w.data, w.dtype, begin * w.stride(0), w.stride(0),
                        columns, k);
  }
  // The transpose view: a depth step is a contiguous run of columns.
  for (int64_t i = 0; i < k; ++i) {
    kernels.to_f32(dst + i * width, at(w.data, i * w.stride(1) + begin, w.dtype), stored(w.dtype),
                   columns);
    std::fill(dst + i * width + columns, dst + (i + 1) * width, 0.0f);
  }
}

// Rows are used where they lie when they are f32 and do not all fall on the same cache sets.
bool usable_in_place(const View& x) {
  return x.dtype == DType::f32 && reinterpret_cast<uintptr_t>(x.data) % alignof(float) == 0 &&
         (x.stride(0) % 512 != 0 || x.dim(1) <= kDepthSlice);
}

// The first operand as f32 rows at a pitch.
struct Rows {
  const float* data;
  int64_t pitch;
};

// Copies rows [begin, begin + count) of x to `copied`, `pitch` apart.
Rows copy_rows(const Context& context, float* copied, const View& x, int64_t begin, int64_t count,
               int64_t pitch) {
  parallel_ranges(
      context, count, std::max<int64_t>(1, 32768 / pitch), [&](int64_t first, int64_t last, int) {
        for (int64_t r = first; r < last; ++r) {
          context.kernels.to_f32(copied + r * pitch, at(x.data, (begin + r) * x.stride(0), x.dtype),
                                 stored(x.dtype), x.dim(1));
        }
      });
  return {copied, pitch};
}

constexpr int64_t kPackedFloats = int64_t{2}
                                  << 20;  // of weights at a time: stays in the shared cache
constexpr int64_t kTaskColumns = 256;     // sums of one task stay in the second-level cache
constexpr int64_t kTaskRows = 96;
constexpr int64_t kCopiedFloats = int64_t{4} << 20;  // of rows at a time

}  // namespace

void linear(Context& context, MutView out, View x, View w, const LinearOptions& options) {
  const Kernels& kernels = context.kernels;
  const int64_t m = x.dim(0), k = x.dim(1), n = w.dim(0);
  Finish finish;
  finish.act = act(options.activation);
  std::vector<float> bias;
  if (options.bias) {
    bias.resize(size_t(n));
    const float* row = read_row(kernels, bias.data(), options.bias.data, options.bias.dtype, 0, n,
                                options.bias.stride(0));
    if (row != bias.data()) std::copy(row, row + n, bias.data());
    finish.bias = bias.data();
  }
  const int64_t step = 2 * kernels.lanes;
  // Columns packed at once: whole task widths if the depth allows it.
  int64_t band = std::max(step, kPackedFloats / std::max<int64_t>(k, 1) / step * step);
  if (band > kTaskColumns) band = band / kTaskColumns * kTaskColumns;
  // Fewer rows a task when there would be too few tasks for the threads.
  int64_t task_rows = kTaskRows;
  const auto tasks_with = [&](int64_t rows, int64_t columns) {
    return ((m + rows - 1) / rows) * ((columns + kTaskColumns - 1) / kTaskColumns);
  };
  while (task_rows > kRowStep && tasks_with(task_rows, std::min(band, n)) < 3 * context.threads) {
    task_rows /= 2;
  }
  // Rows that must be copied are copied in chunks, at a pitch off the cache's period.
  const bool in_place = usable_in_place(x);
  const int64_t pitch = (k + 15) / 16 * 16 + 16;
  const int64_t chunk =
      in_place ? m : std::max(kTaskRows, kCopiedFloats / pitch / kTaskRows * kTaskRows);
  float* copied = in_place ? nullptr : context.values.need(std::min(chunk, m) * pitch);
  context.per_thread.need_each(context.threads, kTaskRows * (kTaskColumns + 3 * kernels.lanes));

  std::vector<int64_t> taps;
  std::vector<DepthSlice> slices;
  cut_depth(taps, slices, k);

  for (int64_t band_begin = 0; band_begin < n; band_begin += band) {
    const Panels panels(kernels, std::min(band, n - band_begin));
    float* packed = context.shared.need(panels.padded() * k);
    parallel_tasks(context, panels.count(), [&](int64_t panel, int) {
      pack_weight_panel(kernels, packed + panels.offset(panel, k), w,
                        band_begin + panels.begin(panel), panels.columns(panel),
                        panels.width(panel));
    });
    const int64_t panels_a_task = kTaskColumns / step;
    const int64_t groups = (panels.count() + panels_a_task - 1) / panels_a_task;
    for (int64_t chunk_begin = 0; chunk_begin < m; chunk_begin += chunk) {
      const int64_t chunk_rows = std::min(chunk, m - chunk_begin);
      const Rows a = in_place ? Rows{x.as<float>(), x.stride(0)}
                              : copy_rows(context, copied, x, chunk_begin, chunk_rows, pitch);
      const int64_t row_tasks = (chunk_rows + task_rows - 1) / task_rows;
      parallel_tasks(context, groups * row_tasks, [&](int64_t task, int thread) {
        const int64_t row_begin = task / groups * task_rows;
        const int64_t rows = std::min(task_rows, chunk_rows - row_begin);
        const int64_t first = task % groups * panels_a_task;
        const int64_t last = std::min(panels.count(), first + panels_a_task);
        const int64_t ldc = panels.begin(last - 1) + panels.width(last - 1) - panels.begin(first);
        float* c = context.per_thread.of(thread);
        std::array<const float*, kTaskRows> row;
        for (int64_t r = 0; r < kTaskRows; ++r) {
          row[size_t(r)] = a.data + (row_begin + std::min(r, rows - 1)) * a.pitch;
        }
        if (k == 0) std::fill(c, c + rows * ldc, 0.0f);
        multiply(kernels, c, ldc, row.data(), rows, packed, k, panels, first, last, slices, false);
        const int64_t column = band_begin + panels.begin(first);
        const int64_t columns = std::min(ldc, n - column);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t i = chunk_begin + row_begin + r;
          const int64_t residual_at = options.residual ? i * options.residual.stride(0) : 0;
          finish.row(kernels, out, i * out.stride(0), options.residual, residual_at, c + r * ldc,
                     column, columns);
        }
      });
    }
  }
}

}  // namespace orrery::cpu
