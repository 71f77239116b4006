#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/ops.h"
#include "cpu/strided.h"

namespace orrery::cpu {

namespace {

// Two dimensions of a copy: extent and the strides of output and input.
struct CopyAxis {
  int64_t size, out, in;
};

template <typename Out, typename In>
Out converted(In value) {
  if constexpr (std::is_same_v<Out, In>) {
    return value;
  } else if constexpr (std::is_same_v<In, bf16>) {
    return to_float(value);
  } else {
    return to_bf16(value);
  }
}

// Square tiles keep the lines that a transposition touches inside the first-level cache.
template <typename Out, typename In>
void copy_plane(void* out, const void* in, CopyAxis outer, CopyAxis inner) {
  constexpr int64_t kTile = 16;
  auto* to = static_cast<Out*>(out);
  const auto* from = static_cast<const In*>(in);
  for (int64_t i0 = 0; i0 < outer.size; i0 += kTile) {
    const int64_t i1 = std::min(outer.size, i0 + kTile);
    for (int64_t j0 = 0; j0 < inner.size; j0 += kTile) {
      const int64_t j1 = std::min(inner.size, j0 + kTile);
      for (int64_t i = i0; i < i1; ++i) {
        for (int64_t j = j0; j < j1; ++j) {
          to[i * outer.out + j * inner.out] = converted<Out>(from[i * outer.in + j * inner.in]);
        }
      }
    }
  }
}

void copy_plane(MutView out, View x, const Offsets& offsets, CopyAxis outer, CopyAxis inner) {
  void* to = at(out.mut(), offsets[0], out.dtype);
  const void* from = at(x.data, offsets[1], x.dtype);
  if (out.dtype == DType::f32) {
    if (x.dtype == DType::f32) return copy_plane<float, float>(to, from, outer, inner);
    return copy_plane<float, bf16>(to, from, outer, inner);
  }
  if (x.dtype == DType::f32) return copy_plane<bf16, float>(to, from, outer, inner);
  copy_plane<bf16, bf16>(to, from, outer, inner);
}

bool aligned(const View& x) {
  return reinterpret_cast<uintptr_t>(x.data) % static_cast<uintptr_t>(size_of(x.dtype)) == 0;
}

}  // namespace

void copy(Context& context, MutView out, View x) {
  const std::array operands{View(out), x};
  StridedLoop loop(out.shape, operands);
  const int last = loop.rank() - 1;
  const bool rows = loop.stride(0, last) == 1 && loop.stride(1, last) == 1;
  // Long contiguous runs, and types or addresses that the plane loop cannot read.
  if ((rows && loop.dim(last) >= 16) || loop.rank() == 1 || x.dtype == DType::f16 || !aligned(x)) {
    const int64_t out_stride = loop.stride(0, last), in_stride = loop.stride(1, last);
    for_runs(context, loop, 1, [&](const Offsets& at_, int64_t n) {
      if (out.dtype == x.dtype && out_stride == 1 && in_stride == 1) {
        std::memcpy(at(out.mut(), at_[0], out.dtype), at(x.data, at_[1], x.dtype),
                    size_t(n * size_of(x.dtype)));
        return;
      }
      alignas(64) float buffer[kChunk];
      const float* row = read_row(context.kernels, buffer, x.data, x.dtype, at_[1], n, in_stride);
      finish_row(context.kernels, row, out.mut(), out.dtype, at_[0], n, out_stride);
    });
    return;
  }
  // The other dimension of the plane is the one the input is densest in.
  int other = last - 1;
  for (int i = 0; i < last; ++i) {
    if (loop.stride(1, i) != 0 && loop.stride(1, i) < loop.stride(1, other)) other = i;
  }
  loop.swap(other, last - 1);
  const CopyAxis inner{loop.dim(last), loop.stride(0, last), loop.stride(1, last)};
  const CopyAxis outer{loop.dim(last - 1), loop.stride(0, last - 1), loop.stride(1, last - 1)};
  const int64_t band = std::max<int64_t>(16, 4096 / inner.size / 16 * 16);
  const int64_t bands = (outer.size + band - 1) / band;
  const int64_t unit = std::min(band, outer.size) * inner.size;
  parallel_ranges(context, loop.count(last - 1) * bands, std::max<int64_t>(1, 32768 / unit),
                  [&](int64_t begin, int64_t end, int) {
                    for (int64_t i = begin; i < end; ++i) {
                      Offsets offsets = loop.offsets(last - 1, i / bands);
                      const int64_t first = i % bands * band;
                      offsets[0] += first * outer.out;
                      offsets[1] += first * outer.in;
                      const int64_t size = std::min(band, outer.size - first);
                      copy_plane(out, x, offsets, {size, outer.out, outer.in}, inner);
                    }
                  });
}

void fill(Context& context, MutView out, float value) {
  alignas(64) float row[kChunk];
  std::fill(row, row + kChunk, value);
  const std::array operands{View(out)};
  const StridedLoop loop(out.shape, operands);
  for_runs(context, loop, 1, [&](const Offsets& offsets, int64_t n) {
    finish_row(context.kernels, row, out.mut(), out.dtype, offsets[0], n,
               loop.stride(0, loop.rank() - 1));
  });
}

void lincomb(Context& context, MutView out, std::span<const Term> terms) {
  std::array<View, kMaxOperands> operands{View(out)};
  for (size_t i = 0; i < terms.size(); ++i) operands[i + 1] = terms[i].x;
  const StridedLoop loop(out.shape, std::span(operands).first(terms.size() + 1));
  const int last = loop.rank() - 1;
  const Kernels& kernels = context.kernels;
  for_runs(context, loop, 1, [&](const Offsets& offsets, int64_t n) {
    // Summed apart from the output, which may be one of the later terms.
    alignas(64) float sum[kChunk], buffer[kChunk];
    for (size_t i = 0; i < terms.size(); ++i) {
      const View& x = terms[i].x;
      const float* row = read_row(kernels, buffer, x.data, x.dtype, offsets[i + 1], n,
                                  loop.stride(int(i) + 1, last));
      (i == 0 ? kernels.scale : kernels.add_scaled)(sum, row, terms[i].factor, n);
    }
    finish_row(kernels, sum, out.mut(), out.dtype, offsets[0], n, loop.stride(0, last));
  });
}

namespace {

// fn(row, first column, n) for pieces of rows of at most kChunk columns, on all threads.
template <typename Fn>
void for_row_pieces(const Context& context, int64_t rows, int64_t columns, const Fn& fn) {
  const int64_t pieces = (columns + kChunk - 1) / kChunk;
  const int64_t grain = std::max<int64_t>(1, 32 * kChunk / std::min(columns, kChunk));
  parallel_ranges(context, rows * pieces, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first = unit % pieces * kChunk;
      fn(unit / pieces, first, std::min(kChunk, columns - first));
    }
  });
}

}  // namespace

void add_row(Context& context, MutView x, View row) {
  const Kernels& kernels = context.kernels;
  for_row_pieces(context, x.dim(0), x.dim(1), [&](int64_t r, int64_t first, int64_t n) {
    alignas(64) float x_buffer[kChunk], row_buffer[kChunk];
    const int64_t element = r * x.stride(0) + first;
    const float* a = read_row(kernels, x_buffer, x.data, x.dtype, element, n);
    const float* b =
        read_row(kernels, row_buffer, row.data, row.dtype, first * row.stride(0), n, row.stride(0));
    float* sum = result_row(x_buffer, x.mut(), x.dtype, element);
    kernels.epilogue(sum, a, nullptr, b, Act::none, n);
    finish_row(kernels, sum, x.mut(), x.dtype, element, n);
  });
}

void activation(Context& context, MutView out, View x, Activation kind) {
  const Kernels& kernels = context.kernels;
  const int64_t columns = out.dim(1);
  for_row_pieces(context, out.dim(0), columns, [&](int64_t r, int64_t first, int64_t n) {
    alignas(64) float gate_buffer[kChunk], up_buffer[kChunk];
    const int64_t in = r * x.stride(0) + first, to = r * out.stride(0) + first;
    const float* gate = read_row(kernels, gate_buffer, x.data, x.dtype, in, n);
    float* y = result_row(gate_buffer, out.mut(), out.dtype, to);
    if (kind == Activation::silu_gate) {
      const float* up = read_row(kernels, up_buffer, x.data, x.dtype, in + columns, n);
      kernels.silu_gate(y, gate, up, n);
    } else {
      kernels.epilogue(y, gate, nullptr, nullptr, act(kind), n);
    }
    finish_row(kernels, y, out.mut(), out.dtype, to, n);
  });
}

namespace {

// fn(first element, n) for pieces of `count` elements, on all threads.
template <typename Fn>
void for_elements(const Context& context, int64_t count, const Fn& fn) {
  const int64_t pieces = (count + kChunk - 1) / kChunk;
  parallel_ranges(context, pieces, 32, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin * kChunk; i < end * kChunk; i += kChunk)
      fn(i, std::min(kChunk, count - i));
  });
}

}  // namespace

void clamp(Context& context, MutView x, float low, float high) {
  for_elements(context, x.numel(), [&](int64_t first, int64_t n) {
    float* values = x.as<float>() + first;
    // NaN compares false with both.
    for (int64_t i = 0; i < n; ++i) {
      const float value = values[i];
      values[i] = value < low ? low : value > high ? high : value;
    }
  });
}

void to_bytes(Context& context, MutView out, View x) {
  for_elements(context, x.numel(), [&](int64_t first, int64_t n) {
    const float* values = x.as<float>() + first;
    uint8_t* bytes = out.as<uint8_t>() + first;
    for (int64_t i = 0; i < n; ++i) {
      const float unit = values[i] * 0.5f + 0.5f;
      // The comparisons are this way round so that NaN becomes 0.
      bytes[i] =
          static_cast<uint8_t>(std::nearbyint((unit > 0 ? std::min(unit, 1.0f) : 0.0f) * 255.0f));
    }
  });
}

bool all_finite(Context& context, View x) {
  std::atomic<bool> finite = true;
  for_elements(context, x.numel(), [&](int64_t first, int64_t n) {
    alignas(64) float buffer[kChunk];
    const float* values = read_row(context.kernels, buffer, x.data, x.dtype, first, n);
    // A finite float times zero is zero; NaN and infinity survive the sum. Vectorises.
    float sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += values[i] * 0.0f;
    if (sum != 0.0f) finite = false;
  });
  return finite;
}

void gather_rows(Context& context, MutView out, View table, std::span<const int64_t> ids) {
  const Kernels& kernels = context.kernels;
  for_row_pieces(context, out.dim(0), out.dim(1), [&](int64_t r, int64_t first, int64_t n) {
    alignas(64) float buffer[kChunk];
    const int64_t from = ids[size_t(r)] * table.stride(0) + first * table.stride(1);
    const float* row = read_row(kernels, buffer, table.data, table.dtype, from, n, table.stride(1));
    finish_row(kernels, row, out.mut(), out.dtype, r * out.stride(0) + first, n);
  });
}

void snake(Context& context, MutView out, View x, View alpha, View beta) {
  const Kernels& kernels = context.kernels;
  const int64_t channels = x.dim(1);
  std::vector<float> a(static_cast<size_t>(channels)), b(a.size());
  {
    std::vector<float> buffer(a.size());
    const float* log_a =
        read_row(kernels, buffer.data(), alpha.data, alpha.dtype, 0, channels, alpha.stride(0));
    for (size_t i = 0; i < a.size(); ++i) a[i] = std::exp(log_a[i]);
    const float* log_b =
        read_row(kernels, buffer.data(), beta.data, beta.dtype, 0, channels, beta.stride(0));
    for (size_t i = 0; i < b.size(); ++i) b[i] = 1.0f / (std::exp(log_b[i]) + 1e-9f);
  }
  for_row_pieces(context, x.dim(0), channels, [&](int64_t r, int64_t first, int64_t n) {
    alignas(64) float buffer[kChunk];
    const int64_t from = r * x.stride(0) + first, to = r * out.stride(0) + first;
    const float* row = read_row(kernels, buffer, x.data, x.dtype, from, n);
    float* y = result_row(buffer, out.mut(), out.dtype, to);
    // Far from zero the fast reduction loses digits.
    bool near = true;
    for (int64_t i = 0; i < n; ++i) near &= std::fabs(a[size_t(first + i)] * row[i]) < kSnakeLimit;
    if (near) {
      kernels.snake(y, row, a.data() + first, b.data() + first, n);
    } else {
      for (int64_t i = 0; i < n; ++i) {
        const float wave = std::sin(a[size_t(first + i)] * row[i]);
        y[i] = row[i] + wave * wave * b[size_t(first + i)];
      }
    }
    finish_row(kernels, y, out.mut(), out.dtype, to, n);
  });
}

}  // namespace orrery::cpu
