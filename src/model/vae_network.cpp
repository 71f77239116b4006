#include "model/vae_network.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "base/error.h"

namespace orrery {

namespace {

// A causal 3-tap convolution sees two earlier frames; the strided one of the downsampler sees one.
constexpr int64_t kKept = 2;
constexpr int64_t kKeptByDownsampler = 1;

View rows_of(View x) { return x.reshape({-1, x.dim(-1)}); }
MutView rows_of(MutView x) { return x.reshape({-1, x.dim(-1)}); }
View matrix_of(View conv_weight) {
  return conv_weight.reshape({conv_weight.dim(0), conv_weight.dim(1)});
}
View vector_of(View gamma) { return gamma.reshape({-1}); }

// [C, C, 3, 3] as a convolution over one frame.
View image_kernel(View weight) { return weight.unsqueeze(2); }

// fn(rows of out, rows of x) for stretches that lie dense in both.
template <typename Fn>
void each_stretch(MutView out, View x, const Fn& fn) {
  if (out.contiguous() && x.contiguous()) return fn(rows_of(out), rows_of(x));
  for (int64_t t = 0; t < x.dim(0); ++t) fn(rows_of(out.select(0, t)), rows_of(x.select(0, t)));
}

// x [T * f, ...] -> frames a, a + f, a + 2f, ... [T, ...]
View every(View x, int64_t factor, int64_t a) {
  if (factor == 1) return x;
  return x.reshape({x.dim(0) / factor, factor, x.dim(1), x.dim(2), x.dim(3)}).select(1, a);
}

// x [T, H, W, C] -> the positions (b, d) of every cell of s x s: [T, H / s, W / s, C]
View corner(View x, int64_t s, int64_t b, int64_t d) {
  if (s == 1) return x;
  return x.reshape({x.dim(0), x.dim(1) / s, s, x.dim(2) / s, s, x.dim(3)})
      .select(4, d)
      .select(2, b);
}

// Channels i, i + n, i + 2n, ...
View every_channel(View x, int64_t n, int64_t i) {
  if (n == 1) return x;
  return x.reshape({x.dim(0), x.dim(1), x.dim(2), x.dim(3) / n, n}).select(4, i);
}

}  // namespace

DoublingWeights make_doubling(Backend& backend, const ConvWeights& conv, DType dtype) {
  const View& w = conv.weight;  // [C, Cin, 3, 3]
  const int64_t out = w.dim(0), in = w.dim(1);
  const Tensor wide = backend.allocate_tensor(w.shape, DType::f32);
  backend.copy(wide.view, w);
  DoublingWeights doubling{backend.allocate_tensor({4 * out, in, 1, 2, 2}, dtype),
                           backend.allocate_tensor({4 * out}, dtype)};
  // Taps of the doubled picture that meet pixel r of the two that place b sees.
  const auto taps = [](int64_t b, int64_t r) {
    return b == 0 ? (r == 0 ? std::pair{0, 1} : std::pair{1, 3})
                  : (r == 0 ? std::pair{0, 2} : std::pair{2, 3});
  };
  for (int64_t place = 0; place < 4; ++place) {
    const MutView to = doubling.weight.view.slice(0, place * out, out).select(2, 0);
    for (int64_t r = 0; r < 2; ++r) {
      for (int64_t c = 0; c < 2; ++c) {
        std::vector<Term> terms;
        const auto [row, row_end] = taps(place / 2, r);
        const auto [column, column_end] = taps(place % 2, c);
        for (int64_t i = row; i < row_end; ++i) {
          for (int64_t j = column; j < column_end; ++j) {
            terms.push_back({1.0f, wide.view.select(3, j).select(2, i)});
          }
        }
        backend.lincomb(to.select(3, c).select(2, r), terms);
      }
    }
    backend.copy(doubling.bias.view.slice(0, place * out, out), conv.bias);
  }
  backend.synchronize();  // `wide` goes
  return doubling;
}

RowRange rows_of_rank(int64_t rows, int ranks, int rank) {
  const int64_t each = rows / ranks, extra = rows % ranks;
  return {rank * each + std::min<int64_t>(rank, extra), each + (rank < extra ? 1 : 0)};
}

// The input buffer of a causal convolution: remembered frames, then this chunk's. With a halo,
// every frame has the neighbours' rows around this rank's.
struct VaePass::Input {
  MutView frames;   // [remembered + T, halo + H + halo, W, C]
  MutView current;  // the last T of them, without the halo
  FrameCache* cache;
  int64_t remembered, halo;
};

VaePass::VaePass(Backend& backend, Arena& arena, DType dtype, const HalfWeights& weights, Half half,
                 int64_t height, int64_t width, int64_t chunks,
                 std::span<const DoublingWeights> doubling, Communicator* ranks,
                 int64_t upsample_bytes)
    : backend_(backend),
      arena_(arena),
      dtype_(dtype),
      weights_(weights),
      half_(half),
      height_(height),
      width_(width),
      chunks_left_(chunks),
      doubling_(doubling),
      ranks_(ranks),
      upsample_bytes_(upsample_bytes),
      share_(ranks != nullptr ? rows_of_rank(height, ranks->size(), ranks->rank())
                              : RowRange{0, height}) {
  make_caches();
}

void VaePass::make_caches() {
  int64_t height = height_, width = width_, halo = 0;
  const auto add = [&](int64_t channels, int64_t kept = kKept) {
    FrameCache cache;
    if (chunks_left_ > 1) {
      cache.frames = arena_.make({kept, height + 2 * halo, width, channels}, dtype_);
    }
    caches_.push_back(cache);
  };
  // Of a convolution in time alone.
  const auto add_without_halo = [&](int64_t channels) {
    const int64_t around = std::exchange(halo, 0);
    add(channels);
    halo = around;
  };
  const auto add_resnet = [&](const ResnetWeights& resnet) {
    add(resnet.in);
    add(resnet.out);
  };
  const auto add_middle = [&] {
    for (const ResnetWeights& resnet : weights_.middle_resnets) add_resnet(resnet);
  };
  add(weights_.in);
  if (half_ == Half::decoder) add_middle();
  height = share_.count;
  halo = ranks_ != nullptr ? 1 : 0;
  for (const LevelWeights& level : weights_.levels) {
    if (half_ == Half::decoder && level.temporal) add_without_halo(level.out);
    for (const ResnetWeights& resnet : level.resnets) add_resnet(resnet);
    if (half_ == Half::decoder) {
      height *= level.space_factor();
      width *= level.space_factor();
    } else {
      height /= level.space_factor();
      width /= level.space_factor();
      if (level.temporal) add(level.out, kKeptByDownsampler);
    }
  }
  if (half_ == Half::encoder) add_middle();
  add(weights_.levels.back().out);
}

Shape VaePass::level_shape(const Shape& in, const LevelWeights& level) const {
  const int64_t time = first_ ? 1 : level.time_factor(), space = level.space_factor();
  if (half_ == Half::decoder) return {in[0] * time, in[1] * space, in[2] * space, level.out};
  return {in[0] / time, in[1] / space, in[2] / space, level.out};
}

Shape VaePass::output_shape(int64_t frames) const {
  Shape shape{frames, share_.count, width_, weights_.in};
  for (const LevelWeights& level : weights_.levels) shape = level_shape(shape, level);
  shape[3] = weights_.out;
  return shape;
}

// In the arena; or as one of equal ones, number `place`, in `room`.
VaePass::Input VaePass::open(FrameCache& cache, Shape shape, int64_t halo, MutView room,
                             int place) {
  Input input;
  input.cache = &cache;
  input.remembered = cache.empty ? 0 : cache.frames.dim(0);
  input.halo = halo;
  const int64_t frames = shape[0], rows = shape[1];
  shape[0] += input.remembered;
  shape[1] += 2 * halo;
  if (room) {
    const int64_t size = shape.numel();
    input.frames = room.reshape({-1})
                       .slice(0, place * size, size)
                       .reshape({shape[0], shape[1], shape[2], shape[3]});
  } else {
    input.frames = arena_.make(shape, dtype_);
  }
  input.current = input.frames.slice(0, input.remembered, frames).slice(1, halo, rows);
  if (input.remembered > 0) {
    backend_.copy(input.frames.slice(0, 0, input.remembered), cache.frames);
  }
  return input;
}

// The first and last row of x [T, 1 + H + 1, W, C]: the neighbours' next ones, zeros outside of the
// picture.
void VaePass::fill_halo(MutView x) {
  const int64_t last = x.dim(1) - 1;
  if (ranks_->rank() == 0) backend_.fill(x.select(1, 0), 0.0f);
  if (ranks_->rank() + 1 == ranks_->size()) backend_.fill(x.select(1, last), 0.0f);
  if (backend_.is_dry()) return;
  ranks_->exchange_halos(
      {x.select(1, 0), x.select(1, last), x.select(1, 1), x.select(1, last - 1)});
}

void VaePass::keep(const Input& input) {
  if (chunks_left_ == 1) return;
  FrameCache& cache = *input.cache;
  const int64_t kept = cache.frames.dim(0), have = input.frames.dim(0);
  if (have < kept) {
    backend_.fill(cache.frames.slice(0, 0, kept - have), 0.0f);
    backend_.copy(cache.frames.slice(0, kept - have, have), input.frames);
  } else {
    backend_.copy(cache.frames, input.frames.slice(0, have - kept, kept));
  }
  cache.empty = false;
}

void VaePass::conv(MutView out, const Input& input, const ConvWeights& weights, View residual) {
  const int64_t side = (weights.weight.dim(3) - 1) / 2, missing = side - input.halo;
  if (input.halo > 0) {
    fill_halo(input.frames.slice(0, input.remembered, input.current.dim(0)));
  }
  Conv3d options;
  options.pad_before = {input.cache->empty ? kKept : 0, missing, side};
  options.pad_after = {0, missing, side};
  backend_.conv3d(out, input.frames, weights.weight, weights.bias, options, residual);
  keep(input);
}

void VaePass::norm_silu(MutView out, View x, View gamma) {
  each_stretch(out, x, [&](MutView to, View from) {
    backend_.rms_norm(to, from, vector_of(gamma), {.kind = NormKind::channel, .silu = true});
  });
}

// `out` may be `x` itself: then the block adds to it in place. `spent`: the first convolution's
// input, where x lies already; x is gone afterwards. `room`: memory for both inputs.
void VaePass::resnet(MutView out, View x, const ResnetWeights& weights, const Input* spent,
                     MutView room) {
  View residual = x;
  if (weights.in != weights.out) {
    each_stretch(out, x, [&](MutView to, View from) {
      backend_.linear(to, from, matrix_of(weights.shortcut.weight),
                      {.bias = weights.shortcut.bias});
    });
    residual = out;
  }
  Arena::Scope scope(arena_);
  FrameCache& first_cache = take_cache();
  // The second convolution's input comes first in the arena, since it outlives the first one's: the
  // first convolution writes straight into it, and the norm works there in place. With a halo its
  // frames do not touch, which libraries write by way of a copy: a buffer between is as large.
  const Input second = open(take_cache(), out.shape, halo_, room, 1);
  const MutView between = halo_ == 0 ? second.current : arena_.make(out.shape, dtype_);
  {
    Arena::Scope inner(arena_);
    const Input first = spent != nullptr ? *spent : open(first_cache, x.shape, halo_, room, 0);
    norm_silu(first.current, x, weights.norm1);
    conv(between, first, weights.conv1);
  }
  norm_silu(second.current, between, weights.norm2);
  conv(out, second, weights.conv2, residual);
}

void VaePass::attention(MutView x, const ImageAttentionWeights& weights) {
  Arena::Scope scope(arena_);
  const int64_t frames = x.dim(0), positions = x.dim(1) * x.dim(2), width = x.dim(3);
  MutView normed = arena_.make({frames, positions, 1, width}, dtype_);
  MutView qkv = arena_.make({frames, positions, 3 * width}, dtype_);
  backend_.rms_norm(rows_of(normed), rows_of(x), vector_of(weights.norm),
                    {.kind = NormKind::channel});
  backend_.linear(rows_of(qkv), rows_of(normed), matrix_of(weights.to_qkv.weight),
                  {.bias = weights.to_qkv.bias});
  AttentionPlan plan;
  plan.scale = 1.0f / std::sqrt(static_cast<float>(width));
  for (int64_t t = 0; t < frames; ++t) {
    const auto part = [&](int64_t i) {
      return qkv.select(0, t).slice(1, i * width, width).reshape({positions, 1, width});
    };
    // The normed values are spent: the result takes their place.
    backend_.attention(normed.select(0, t), part(0), part(1), part(2), plan);
  }
  backend_.linear(rows_of(x), rows_of(normed), matrix_of(weights.proj.weight),
                  {.bias = weights.proj.bias, .residual = rows_of(x)});
}

void VaePass::middle(MutView x) {
  resnet(x, x, weights_.middle_resnets[0]);
  attention(x, weights_.attention);
  resnet(x, x, weights_.middle_resnets[1]);
}

// x stays as it is, for the shortcut of the level.
void VaePass::resnets(MutView out, View x, const LevelWeights& level, const Input* spent) {
  View in = x;
  MutView room;
  for (const ResnetWeights& weights : level.resnets) {
    resnet(out, in, weights, spent, room);
    in = out;
    // What has been spent holds both inputs of each later block.
    if (spent != nullptr && level.in >= 2 * level.out) room = spent->frames;
    spent = nullptr;
  }
}

void VaePass::level_down(MutView out, View x, const LevelWeights& level) {
  if (level.resamples) {
    Arena::Scope scope(arena_);
    MutView y = arena_.make({x.dim(0), x.dim(1), x.dim(2), level.out}, dtype_);
    resnets(y, x, level);
    downsample(out, y, level);
  } else {
    resnets(out, x, level);
  }
  add_averages(out, x, level);
}

void VaePass::level_up(MutView out, View x, const LevelWeights& level,
                       const DoublingWeights* doubling, const Input* spent) {
  if (!level.resamples) return resnets(out, x, level, spent);
  const Shape shape{x.dim(0), x.dim(1), x.dim(2), level.out};
  Arena::Scope scope(arena_);
  if (!level.temporal) {
    MutView y = arena_.make(shape, dtype_);
    resnets(y, x, level);
    upsample(out, {y}, x, level, *doubling);
  } else if (FrameCache& cache = take_cache(); first_) {
    // The first frame is not doubled in time and never becomes history: the time convolution of the
    // next chunk begins with zeros.
    MutView y = arena_.make(shape, dtype_);
    resnets(y, x, level);
    upsample(out, {y}, x, level, *doubling);
  } else {
    const Input input = open(cache, shape, 0);
    resnets(input.current, x, level);
    MutView pair = arena_.make({shape[0], shape[1], shape[2], 2 * level.out}, dtype_);
    conv(pair, input, level.time_conv);
    upsample(out, {pair.slice(3, 0, level.out), pair.slice(3, level.out, level.out)}, x, level,
             *doubling);
  }
}

void VaePass::downsample(MutView out, View x, const LevelWeights& level) {
  const Conv3d halve{.stride = {1, 2, 2}, .pad_after = {0, 1, 1}};
  const View kernel = image_kernel(level.resample.weight);
  if (!level.temporal) {
    backend_.conv3d(out, x, kernel, level.resample.bias, halve);
    return;
  }
  Arena::Scope scope(arena_);
  const Input input = open(take_cache(), {x.dim(0), out.dim(1), out.dim(2), level.out}, 0);
  backend_.conv3d(input.current, x, kernel, level.resample.bias, halve);
  if (first_) {
    // The first frame is not halved in time; it only is the next chunk's history.
    backend_.copy(out, input.current);
  } else {
    backend_.conv3d(out, input.frames, level.time_conv.weight, level.time_conv.bias,
                    {.stride = {2, 1, 1}});
  }
  keep(input);
}

// out frame n * t + a is frame t of part a of n, every pixel doubled, then convolved; plus the
// level's shortcut: x with every channel repeated level.out * cell / level.in times and the result
// read as (channel, time, row, column) of a cell. The first frame fills only the last place in
// time.
//
// Position (i, j) of the convolution with one pixel of padding sees rows i - 1, i and columns j -
// 1, j. Row b, column d of cell (i, j) is what position (i + b, j + d) made for place (b, d).
void VaePass::upsample(MutView out, std::initializer_list<View> parts, View x,
                       const LevelWeights& level, const DoublingWeights& doubling) {
  const auto count = static_cast<int64_t>(parts.size());
  // Of the rank with the most rows: all cut alike, since they exchange rows for each cut.
  const int64_t most =
      ranks_ != nullptr ? rows_of_rank(height_, ranks_->size(), 0).count * (x.dim(1) / share_.count)
                        : x.dim(1);
  const int64_t frame = (most + 1) * (x.dim(2) + 1) * 4 * level.out * size_of(dtype_);
  const int64_t step = std::max<int64_t>(1, upsample_bytes_ / frame);
  int64_t index = 0;
  for (const View& part : parts) {
    const View to = every(out, count, index);
    const int64_t a = level.time_factor() - count + index++;
    for (int64_t begin = 0; begin < part.dim(0); begin += step) {
      const int64_t frames = std::min(step, part.dim(0) - begin);
      upsample_frames(MutView::cast(to.slice(0, begin, frames)), part.slice(0, begin, frames),
                      x.slice(0, begin, frames), level, doubling, a);
    }
  }
}

// Place a in time of these frames.
void VaePass::upsample_frames(MutView out, View part, View x, const LevelWeights& level,
                              const DoublingWeights& doubling, int64_t a) {
  const int64_t time = level.time_factor(), space = level.space_factor();
  const int64_t channels = level.out, frames = x.dim(0), height = x.dim(1), width = x.dim(2);
  const int64_t cell = time * space * space;
  const int64_t repeats = channels * cell / level.in;
  const int64_t copies = std::max<int64_t>(1, repeats / cell);   // output channels of one x channel
  const int64_t sources = std::max<int64_t>(1, cell / repeats);  // x channels in one output channel
  const auto each_source = [&](View t) {
    return t.reshape({frames, height, width, channels / copies, copies});
  };
  Arena::Scope scope(arena_);
  if (halo_ > 0 || !part.contiguous()) {
    const MutView copied = arena_.make({frames, height + 2 * halo_, width, channels}, dtype_);
    backend_.copy(copied.slice(1, halo_, height), part);
    if (halo_ > 0) fill_halo(copied);
    part = copied;
  }
  MutView places = arena_.make({frames, height + 1, width + 1, 4 * channels}, dtype_);
  backend_.conv3d(places, part, doubling.weight.view, doubling.bias.view,
                  {.pad_before = {0, 1 - halo_, 1}, .pad_after = {0, 1 - halo_, 1}});
  for (int64_t b = 0; b < space; ++b) {
    for (int64_t d = 0; d < space; ++d) {
      const View made =
          places.slice(1, b, height).slice(2, d, width).slice(3, (2 * b + d) * channels, channels);
      const int64_t index = (a * space + b) * space + d;
      const View from = every_channel(x, sources, index / repeats % sources);
      backend_.lincomb(MutView::cast(each_source(corner(out, space, b, d))),
                       {{1.0f, each_source(made)}, {1.0f, from.unsqueeze(4).expand(4, copies)}});
    }
  }
}

// out += the mean of each group of values: index (channel, time, row, column) of a cell of x, cut
// into level.out groups. Time cells of the first frame begin with zeros, which add nothing.
void VaePass::add_averages(MutView out, View x, const LevelWeights& level) {
  const int64_t time = level.time_factor(), space = level.space_factor();
  const int64_t cell = time * space * space;
  const int64_t group = level.in * cell / level.out;
  const int64_t whole = std::max<int64_t>(1, group / cell);  // channels that a group averages
  const int64_t parts = std::max<int64_t>(1, cell / group);  // groups that share a channel
  const int64_t zeros = first_ ? time - 1 : 0;
  const float factor = 1.0f / static_cast<float>(group);
  for (int64_t part = 0; part < parts; ++part) {
    MutView to = MutView::cast(every_channel(out, parts, part));
    std::vector<Term> terms{{1.0f, to}};
    const auto flush = [&] {
      if (terms.size() > 1) backend_.lincomb(to, terms);
      terms.resize(1);
    };
    for (int64_t channel = 0; channel < whole; ++channel) {
      for (int64_t i = part * cell / parts; i < (part + 1) * cell / parts; ++i) {
        const int64_t a = i / (space * space);
        if (a < zeros) continue;
        const View frames = first_ ? x : every(x, time, a);
        terms.push_back({factor, every_channel(corner(frames, space, i / space % space, i % space),
                                               whole, channel)});
        if (terms.size() == 8) flush();
      }
    }
    flush();
  }
}

// Whether a level of the decoder can use its input up: nothing needs it once the first resnet has
// begun. Caches of the last level then are the last ones, two for each resnet, before the head's.
bool VaePass::spends_input(size_t level) const {
  if (half_ == Half::encoder || level == 0 || level + 1 != weights_.levels.size()) return false;
  const LevelWeights& last = weights_.levels[level];
  return !last.resamples && last.resnets.front().in != last.resnets.front().out;
}

void VaePass::run(MutView out, int64_t frames, const std::function<void(MutView)>& write_input) {
  Arena::Scope scope(arena_);
  next_cache_ = 0;
  const bool decodes = half_ == Half::decoder;
  const int64_t width = decodes ? weights_.middle : weights_.levels.front().in;
  MutView x = arena_.make({frames, height_, width_, width}, dtype_);
  {
    Arena::Scope input_scope(arena_);
    const Input input = open(take_cache(), {frames, height_, width_, weights_.in}, 0);
    write_input(input.current);
    conv(x, input, weights_.conv_in);
  }
  if (decodes) middle(x);
  if (ranks_ != nullptr) {
    // So far, a few percent of the whole, every rank has done the same: the middle's attention sees
    // all rows.
    const View mine = x.slice(1, share_.begin, share_.count);
    x = arena_.make(mine.shape, dtype_);
    backend_.copy(x, mine);
    halo_ = 1;
  }
  std::optional<Input> spent;
  for (size_t i = 0; i < weights_.levels.size(); ++i) {
    const LevelWeights& level = weights_.levels[i];
    const Shape shape = level_shape(x.shape, level);
    const std::optional<Input> mine = std::exchange(spent, std::nullopt);
    if (spends_input(i + 1)) {
      const size_t first = caches_.size() - 1 - 2 * weights_.levels.back().resnets.size();
      spent = open(caches_[first], shape, halo_);
    }
    const MutView y = spent ? spent->current : arena_.make(shape, dtype_);
    if (decodes) {
      level_up(y, x, level, level.resamples ? &doubling_[i] : nullptr, mine ? &*mine : nullptr);
    } else {
      level_down(y, x, level);
    }
    x = y;
  }
  if (!decodes) middle(x);
  const Input head = open(take_cache(), x.shape, halo_);
  norm_silu(head.current, x, weights_.norm_out);
  conv(out, head, weights_.conv_out);
  halo_ = 0;
  first_ = false;
  --chunks_left_;
}

}  // namespace orrery
