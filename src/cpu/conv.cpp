// Convolution, channels last, as a matrix product without the matrix: a row of the first operand is
// the window of one output position, given by a pointer and the offsets of its kernel taps. Windows
// inside an f32 input are read where they lie; those over an edge, and other types, from a copy of
// the task's patch with zeros around it, which costs a few loads per input element against the 2
// Cout kd kh kw operations each takes part in. Measured with bench/ops_bench on an AVX2 machine at
// the VAE's widths of 24 to 96 channels, 3x3x3: 98 to 107 % of the rate of a large matrix product.
// oneDNN 2.6 reaches the same in its blocked layouts, before reordering activations into and out of
// them, and 65 to 107 % channels last; it is faster at pointwise convolutions only (95 against 71
// %).
#include <array>
#include <numeric>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/ops.h"

namespace orrery::cpu {

namespace {

using Triple = std::array<int64_t, 3>;

// One convolution with everything resolved. pad_before may be negative: the window then starts
// inside.
struct Problem {
  MutView out;    // [D', H', W', Cout]
  View x;         // [D, H, W, Cin]
  View residual;  // shape of out, or empty
  Triple kernel, stride, dilation, pad_before;
  const float* packed = nullptr;
  const float* bias = nullptr;  // f32 [Cout] or null
  int64_t channels() const { return x.dim(3); }
  // Neighbouring taps along W and their channels are one contiguous stretch.
  bool merges_width() const { return dilation[2] == 1 || kernel[2] == 1; }
};

// Strides over depth, height and width in floats.
struct Steps {
  int64_t d, h, w;
};

// The output positions of one task, all in one frame.
struct Block {
  int64_t d, h, w, rows, columns;
};

constexpr int64_t kMaxPositions = 96;
constexpr int64_t kTaskColumns = 256;

std::vector<int64_t> tap_offsets(const Problem& p, const Steps& steps) {
  std::vector<int64_t> taps;
  for (int64_t a = 0; a < p.kernel[0]; ++a) {
    for (int64_t b = 0; b < p.kernel[1]; ++b) {
      const int64_t offset = a * steps.d + b * p.dilation[1] * steps.h;
      if (p.merges_width()) {
        taps.push_back(offset);
        continue;
      }
      for (int64_t c = 0; c < p.kernel[2]; ++c)
        taps.push_back(offset + c * p.dilation[2] * steps.w);
    }
  }
  return taps;
}

// Cuts the depth into equal slices of whole taps, or a long tap into pieces. The cuts depend on the
// convolution alone, so that a position's sum does not depend on the task it falls in.
std::vector<DepthSlice> slices_of(const Problem& p, std::vector<int64_t>& taps) {
  const int64_t depth = (p.merges_width() ? p.kernel[2] : 1) * p.channels();
  const auto num_taps = int64_t(taps.size());
  std::vector<DepthSlice> slices;
  if (depth > kDepthSlice + kDepthSlice / 2) {
    const int64_t pieces = (depth + kDepthSlice - 1) / kDepthSlice;
    std::vector<int64_t> starts;
    for (int64_t tap : taps) {
      for (int64_t i = 0; i < pieces; ++i) starts.push_back(tap + depth * i / pieces);
    }
    taps = starts;
    for (int64_t t = 0; t < num_taps; ++t) {
      for (int64_t i = 0; i < pieces; ++i) {
        const int64_t begin = depth * i / pieces, end = depth * (i + 1) / pieces;
        slices.push_back({taps.data() + t * pieces + i, 1, end - begin, t * depth + begin});
      }
    }
    return slices;
  }
  const int64_t total = num_taps * depth;
  const int64_t count =
      std::min(num_taps, std::max<int64_t>(1, (total + kDepthSlice - 1) / kDepthSlice));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = num_taps * i / count, end = num_taps * (i + 1) / count;
    slices.push_back({taps.data() + begin, end - begin, depth, begin * depth});
  }
  return slices;
}

int64_t reach(const Problem& p, size_t axis, int64_t outputs) {
  return (outputs - 1) * p.stride[axis] + (p.kernel[axis] - 1) * p.dilation[axis] + 1;
}

// Copies the input under a block into f32 at the steps of a patch, zeros where there is none.
void gather_patch(const Kernels& kernels, float* patches, const Steps& steps, const Problem& p,
                  const Block& block) {
  const View& x = p.x;
  const int64_t channels = p.channels();
  const int64_t height = reach(p, 1, block.rows), width = reach(p, 2, block.columns);
  const int64_t h0 = block.h * p.stride[1] - p.pad_before[1];
  const int64_t w0 = block.w * p.stride[2] - p.pad_before[2];
  const int64_t begin = std::clamp<int64_t>(-w0, 0, width);
  const int64_t end = std::clamp<int64_t>(x.dim(2) - w0, begin, width);
  for (int64_t a = 0; a < p.kernel[0]; ++a) {
    const int64_t d = block.d * p.stride[0] + a * p.dilation[0] - p.pad_before[0];
    for (int64_t i = 0; i < height; ++i) {
      float* patch = patches + a * steps.d + i * steps.h;
      const int64_t h = h0 + i;
      if (d < 0 || d >= x.dim(0) || h < 0 || h >= x.dim(1) || begin == end) {
        std::fill(patch, patch + width * channels, 0.0f);
        continue;
      }
      std::fill(patch, patch + begin * channels, 0.0f);
      std::fill(patch + end * channels, patch + width * channels, 0.0f);
      const int64_t element = d * x.stride(0) + h * x.stride(1) + (w0 + begin) * x.stride(2);
      if (x.stride(2) == channels || end - begin == 1) {
        kernels.to_f32(patch + begin * channels, at(x.data, element, x.dtype), stored(x.dtype),
                       (end - begin) * channels);
        continue;
      }
      for (int64_t j = begin; j < end; ++j) {
        kernels.to_f32(patch + j * channels,
                       at(x.data, element + (j - begin) * x.stride(2), x.dtype), stored(x.dtype),
                       channels);
      }
    }
  }
}

bool inside(const Problem& p, const Block& block) {
  const Triple first{block.d * p.stride[0] - p.pad_before[0],
                     block.h * p.stride[1] - p.pad_before[1],
                     block.w * p.stride[2] - p.pad_before[2]};
  const Triple size{reach(p, 0, 1), reach(p, 1, block.rows), reach(p, 2, block.columns)};
  for (size_t i = 0; i < 3; ++i) {
    if (first[i] < 0 || first[i] + size[i] > p.x.dim(int(i))) return false;
  }
  return true;
}

// Windows can be read in place: f32, and taps merge only where channels of neighbours touch.
bool readable_in_place(const Problem& p) {
  return p.x.dtype == DType::f32 && reinterpret_cast<uintptr_t>(p.x.data) % alignof(float) == 0 &&
         (p.kernel[2] == 1 || p.dilation[2] != 1 || p.x.stride(2) == p.channels());
}

void run(Context& context, const Problem& p) {
  const Kernels& kernels = context.kernels;
  const int64_t channels = p.channels(), cout = p.out.dim(3);
  const int64_t depth = p.kernel[0] * p.kernel[1] * p.kernel[2] * channels;
  const Panels panels(kernels, cout);
  const int64_t panels_a_task = kTaskColumns / (2 * kernels.lanes);
  const int64_t groups = (panels.count() + panels_a_task - 1) / panels_a_task;

  const int64_t frames = p.out.dim(0), height = p.out.dim(1), width = p.out.dim(2);
  int64_t columns = 0, rows = 0, bands = 0, strips = 0;
  for (int64_t limit = kMaxPositions;; limit /= 2) {
    // Near-square blocks have little edge; equal strips leave no sliver.
    strips = (width + (height == 1 ? limit : limit / 3) - 1) / (height == 1 ? limit : limit / 3);
    columns = (width + strips - 1) / strips;
    strips = (width + columns - 1) / columns;
    rows = std::min(height, limit / columns);
    bands = (height + rows - 1) / rows;
    if (frames * bands * strips * groups >= 3 * context.threads || limit <= kRowStep) break;
  }

  const int64_t patch_width = reach(p, 2, columns), patch_height = reach(p, 1, rows);
  const Steps patch_steps{patch_height * patch_width * channels, patch_width * channels, channels};
  const Steps x_steps{p.dilation[0] * p.x.stride(0), p.x.stride(1), p.x.stride(2)};
  const bool in_place = readable_in_place(p);
  std::vector<int64_t> x_taps = tap_offsets(p, x_steps);
  const std::vector<DepthSlice> x_slices = slices_of(p, x_taps);
  std::vector<int64_t> patch_taps = tap_offsets(p, patch_steps);
  const std::vector<DepthSlice> patch_slices = slices_of(p, patch_taps);
  const int64_t sums = kMaxPositions * (kTaskColumns + 3 * kernels.lanes);
  context.per_thread.need_each(context.threads, sums + p.kernel[0] * patch_steps.d);

  // A whole strip of positions can be finished at once when its sums lie as its outputs do.
  const auto dense = [&](const View& v) { return v.stride(2) == cout || width == 1; };
  const bool flat =
      panels.padded() == cout && groups == 1 && dense(p.out) && (!p.residual || dense(p.residual));
  std::vector<float> bias;
  Finish finish;
  if (p.bias) {
    for (int64_t i = 0; i < (flat ? columns : 1); ++i)
      bias.insert(bias.end(), p.bias, p.bias + cout);
    finish.bias = bias.data();
  }

  parallel_tasks(context, frames * bands * strips * groups, [&](int64_t task, int thread) {
    const int64_t group = task % groups, strip = task / groups % strips;
    const int64_t band = task / groups / strips % bands, frame = task / groups / strips / bands;
    Block block{frame, band * rows, strip * columns, 0, 0};
    block.rows = std::min(rows, height - block.h);
    block.columns = std::min(columns, width - block.w);
    const int64_t count = block.rows * block.columns;
    float* c = context.per_thread.of(thread);

    std::array<const float*, kMaxPositions> row;
    const bool direct = in_place && inside(p, block);
    const Steps& steps = direct ? x_steps : patch_steps;
    const float* base = c + sums;
    if (direct) {
      base = p.x.as<float>() + (block.d * p.stride[0] - p.pad_before[0]) * p.x.stride(0) +
             (block.h * p.stride[1] - p.pad_before[1]) * p.x.stride(1) +
             (block.w * p.stride[2] - p.pad_before[2]) * p.x.stride(2);
    } else {
      gather_patch(kernels, c + sums, patch_steps, p, block);
    }
    for (int64_t i = 0; i < kMaxPositions; ++i) {
      const int64_t position = std::min(i, count - 1);
      row[size_t(i)] = base + position / block.columns * p.stride[1] * steps.h +
                       position % block.columns * p.stride[2] * steps.w;
    }
    const int64_t first = group * panels_a_task;
    const int64_t last = std::min(panels.count(), first + panels_a_task);
    const int64_t ldc = panels.begin(last - 1) + panels.width(last - 1) - panels.begin(first);
    multiply(kernels, c, ldc, row.data(), count, p.packed, depth, panels, first, last,
             direct ? x_slices : patch_slices, false);

    const int64_t begin = panels.begin(first), n = std::min(ldc, cout - begin);
    const auto element = [&](const View& v, int64_t h, int64_t w) {
      return v ? frame * v.stride(0) + (block.h + h) * v.stride(1) + (block.w + w) * v.stride(2)
               : 0;
    };
    for (int64_t h = 0; h < block.rows; ++h) {
      const float* sum = c + h * block.columns * ldc;
      if (flat) {
        finish.row(kernels, p.out, element(p.out, h, 0), p.residual, element(p.residual, h, 0), sum,
                   0, block.columns * cout);
        continue;
      }
      for (int64_t w = 0; w < block.columns; ++w) {
        finish.row(kernels, p.out, element(p.out, h, w), p.residual, element(p.residual, h, w),
                   sum + w * ldc, begin, n);
      }
    }
  });
}

// packed[k][cout] with k = (tap, channel). source(cout, tap, channel) is a position in `values`.
template <typename Fn>
void pack(const Kernels& kernels, float* packed, const float* values, int64_t cout, int64_t taps,
          int64_t channels, const Fn& source) {
  const Panels panels(kernels, cout);
  const int64_t depth = taps * channels;
  for (int64_t panel = 0; panel < panels.count(); ++panel) {
    const int64_t width = panels.width(panel), columns = panels.columns(panel);
    float* to = packed + panels.offset(panel, depth);
    for (int64_t t = 0; t < taps; ++t) {
      for (int64_t c = 0; c < channels; ++c, to += width) {
        for (int64_t j = 0; j < columns; ++j) {
          to[j] = values[source(panels.begin(panel) + j, t, c)];
        }
        std::fill(to + columns, to + width, 0.0f);
      }
    }
  }
}

std::vector<float> to_floats(const Kernels& kernels, const View& x) {
  std::vector<float> values(size_t(x.numel()));
  kernels.to_f32(values.data(), x.data, stored(x.dtype), x.numel());
  return values;
}

const float* packed_weights(Context& context, const View& w) {
  const WeightKey key{w.data, w.dtype, {w.dim(0), w.dim(1), w.dim(2), w.dim(3), w.dim(4)}};
  auto it = context.packed_weights.find(key);
  if (it == context.packed_weights.end()) {
    const Panels panels(context.kernels, w.dim(0));
    const int64_t channels = w.dim(1), taps = w.dim(2) * w.dim(3) * w.dim(4);
    Tensor packed = allocate_host_tensor({panels.padded() * taps * channels}, DType::f32);
    const std::vector<float> values = to_floats(context.kernels, w);
    pack(context.kernels, packed.view.as<float>(), values.data(), w.dim(0), taps, channels,
         [&](int64_t o, int64_t t, int64_t c) { return (o * channels + c) * taps + t; });
    it = context.packed_weights.emplace(key, std::move(packed)).first;
  }
  return it->second.view.as<float>();
}

std::vector<float> bias_row(const Kernels& kernels, const View& bias) {
  std::vector<float> row;
  if (!bias) return row;
  row.resize(size_t(bias.dim(0)));
  const float* values =
      read_row(kernels, row.data(), bias.data, bias.dtype, 0, bias.dim(0), bias.stride(0));
  if (values != row.data()) std::copy(values, values + bias.dim(0), row.data());
  return row;
}

// A convolution that sees one position per frame, or one at all, has no need of the image's shape:
// long rows fill the tasks.
View flattened(const View& v, bool frames) {
  View flat = v;
  if (!v) return flat;
  flat.shape[1] = 1;
  flat.shape[2] = v.dim(1) * v.dim(2);
  if (frames) {
    flat.shape[2] *= v.dim(0);
    flat.shape[0] = 1;
  }
  return flat;
}

void flatten_pointwise(Problem& p) {
  const auto pointwise = [&](size_t axis) {
    return p.kernel[axis] == 1 && p.stride[axis] == 1 && p.pad_before[axis] == 0 &&
           p.x.dim(int(axis)) == p.out.dim(int(axis));
  };
  const auto merges = [&](int outer) {
    for (const View& v : {View(p.out), p.x, p.residual}) {
      if (v && v.dim(outer) > 1 && v.stride(outer) != v.dim(outer + 1) * v.stride(outer + 1))
        return false;
    }
    return true;
  };
  if (!pointwise(1) || !pointwise(2) || !merges(1)) return;
  const bool frames = pointwise(0) && merges(0);
  p.out = MutView::cast(flattened(p.out, frames));
  p.residual = flattened(p.residual, frames);
  p.x = flattened(p.x, frames);
}

}  // namespace

void conv3d(Context& context, MutView out, View x, View w, View bias, const Conv3d& conv,
            View residual) {
  const std::vector<float> shift = bias_row(context.kernels, bias);
  Problem problem{out,
                  x,
                  residual,
                  {w.dim(2), w.dim(3), w.dim(4)},
                  conv.stride,
                  conv.dilation,
                  conv.pad_before,
                  packed_weights(context, w),
                  bias ? shift.data() : nullptr};
  flatten_pointwise(problem);
  run(context, problem);
}

void conv_transpose1d(Context& context, MutView out, View x, View w, View bias, int64_t stride,
                      int64_t padding) {
  const Kernels& kernels = context.kernels;
  const int64_t channels = w.dim(0), cout = w.dim(1), taps = w.dim(2);
  const std::vector<float> shift = bias_row(kernels, bias), values = to_floats(kernels, w);
  const Panels panels(kernels, cout);
  const auto image = [](const View& v, int64_t step) {
    View line = v;
    line.shape = {1, 1, v.dim(0) / step, v.dim(1)};
    line.strides = {0, 0, v.stride(0) * step, 1};
    return line;
  };
  // Outputs n = phase + j * stride see the taps i = first + u * stride of input j + shift - u: an
  // ordinary convolution for each phase, with its taps reversed.
  for (int64_t phase = 0; phase < stride; ++phase) {
    const int64_t first = (phase + padding) % stride, ahead = (phase + padding) / stride;
    const int64_t count = first < taps ? (taps - first + stride - 1) / stride : 0;
    Problem p;
    p.out = MutView::cast(image(out, stride));
    p.out.data = at(out.mut(), phase * out.stride(0), out.dtype);
    p.x = image(x, 1);
    p.kernel = {1, 1, std::max<int64_t>(count, 1)};
    p.stride = p.dilation = {1, 1, 1};
    p.pad_before = {0, 0, p.kernel[2] - 1 - ahead};
    float* packed = context.shared.need(panels.padded() * p.kernel[2] * channels);
    if (count == 0) {
      std::fill(packed, packed + panels.padded() * channels, 0.0f);
    } else {
      pack(kernels, packed, values.data(), cout, count, channels,
           [&](int64_t o, int64_t t, int64_t c) {
             return (c * cout + o) * taps + first + (count - 1 - t) * stride;
           });
    }
    p.packed = packed;
    p.bias = bias ? shift.data() : nullptr;
    run(context, p);
  }
}

}  // namespace orrery::cpu
