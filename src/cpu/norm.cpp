#include <cmath>
#include <vector>

#include "cpu/ops.h"
#include "cpu/strided.h"

namespace orrery::cpu {

namespace {

// What one row is multiplied by before its weight.
float row_factor(float sum_squares, int64_t n, const Norm& norm) {
  if (norm.kind == NormKind::channel) return 1.0f / std::max(std::sqrt(sum_squares), 1e-12f);
  return 1.0f / std::sqrt(sum_squares / float(n) + norm.eps);
}

// y = x * factor, rounded to dtype where the kind rounds there, times weight. y may be x.
void weigh(const Kernels& kernels, float* y, const float* x, float factor, const float* weight,
           int64_t n, NormKind kind, DType dtype) {
  if (kind == NormKind::nemotron || dtype == DType::f32) {
    kernels.scale_weighted(y, x, factor, weight, n);
    return;
  }
  alignas(64) uint16_t half[kChunk];
  kernels.scale(y, x, factor, n);
  kernels.to_bf16(half, y, n);
  kernels.to_f32(y, half, Stored::bf16, n);
  kernels.scale_weighted(y, y, 1.0f, weight, n);
}

// The weight in f32, times sqrt(C) for the kind that wants it.
std::vector<float> weight_row(const Kernels& kernels, const View& weight, NormKind kind) {
  std::vector<float> row(static_cast<size_t>(weight.dim(0)));
  const float* w =
      read_row(kernels, row.data(), weight.data, weight.dtype, 0, weight.dim(0), weight.stride(0));
  const float factor = kind == NormKind::channel ? std::sqrt(float(row.size())) : 1.0f;
  kernels.scale(row.data(), w, factor, weight.dim(0));
  return row;
}

}  // namespace

void rms_norm(Context& context, MutView out, View x, View weight, const Norm& norm) {
  const Kernels& kernels = context.kernels;
  const int64_t n = x.dim(-1);
  const std::vector<float> w = weight_row(kernels, weight, norm.kind);
  // Rows: every dimension but the last.
  Shape rows;
  for (int i = 0; i + 1 < x.rank(); ++i) rows.push_back(x.dim(i));
  const std::array operands{View(out), x};
  const StridedLoop loop(rows, operands);
  if (x.dtype == DType::f32 && out.dtype == DType::f32) {
    const int last = loop.rank() - 1;
    for_runs(context, loop, n, [&](const Offsets& offsets, int64_t count) {
      kernels.norm_rows(out.as<float>() + offsets[0], loop.stride(0, last),
                        x.as<float>() + offsets[1], loop.stride(1, last), count, n, w.data(),
                        norm.kind != NormKind::channel, norm.eps, norm.silu);
    });
    return;
  }
  parallel_ranges(
      context, rows.numel(), std::max<int64_t>(1, 16384 / n), [&](int64_t begin, int64_t end, int) {
        alignas(64) float buffer[kChunk];
        for (int64_t r = begin; r < end; ++r) {
          const Offsets offsets = loop.offsets(loop.rank(), r);
          float sum = 0;
          for (int64_t i = 0; i < n; i += kChunk) {
            const int64_t count = std::min(kChunk, n - i);
            const float* row = read_row(kernels, buffer, x.data, x.dtype, offsets[1] + i, count);
            sum += kernels.dot(row, row, count);
          }
          const float factor = row_factor(sum, n, norm);
          for (int64_t i = 0; i < n; i += kChunk) {
            const int64_t count = std::min(kChunk, n - i);
            const float* row = read_row(kernels, buffer, x.data, x.dtype, offsets[1] + i, count);
            float* y = result_row(buffer, out.mut(), out.dtype, offsets[0] + i);
            weigh(kernels, y, row, factor, w.data() + i, count, norm.kind, x.dtype);
            if (norm.silu) kernels.epilogue(y, y, nullptr, nullptr, Act::silu, count);
            finish_row(kernels, y, out.mut(), out.dtype, offsets[0] + i, count);
          }
        }
      });
}

void qk_norm_rope(Context& context, MutView out, View x, View weight, View cos, View sin,
                  const Norm& norm) {
  const Kernels& kernels = context.kernels;
  const int64_t heads = x.dim(1), d = x.dim(2), half = d / 2;
  std::vector<float> w;
  if (weight) w = weight_row(kernels, weight, norm.kind);
  context.per_thread.need_each(context.threads, d);
  const auto work = [&](int64_t begin, int64_t end, int thread) {
    float* head = context.per_thread.of(thread);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t s = r / heads, h = r % heads;
      const int64_t from = s * x.stride(0) + h * x.stride(1);
      const int64_t to = s * out.stride(0) + h * out.stride(1);
      const float* row = read_row(kernels, head, x.data, x.dtype, from, d);
      if (weight) {
        const float factor = row_factor(kernels.dot(row, row, d), d, norm);
        for (int64_t i = 0; i < d; i += kChunk) {
          const int64_t count = std::min(kChunk, d - i);
          alignas(64) uint16_t rounded[kChunk];
          weigh(kernels, head + i, row + i, factor, w.data() + i, count, norm.kind, x.dtype);
          if (x.dtype == DType::bf16) {
            kernels.to_bf16(rounded, head + i, count);
            kernels.to_f32(head + i, rounded, Stored::bf16, count);
          }
        }
        row = head;
      }
      float* y = result_row(head, out.mut(), out.dtype, to);
      kernels.rotate(y, y + half, row, row + half, cos.as<float>() + s * half,
                     sin.as<float>() + s * half, half);
      finish_row(kernels, y, out.mut(), out.dtype, to, d);
    }
  };
  parallel_ranges(context, x.dim(0) * heads, std::max<int64_t>(1, 16384 / d), work);
}

}  // namespace orrery::cpu
