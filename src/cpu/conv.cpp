// Convolution by oneDNN on patches: a task gathers the input under a block of outputs into dense
// f32, channels last, zeros where there is no input, and one call convolves it. Any strides, type
// and padding of the tensors are the gather's affair; oneDNN sees one small shape per convolution,
// which stays in the second-level cache. There its channels-last kernels run at 88 to 100 % of the
// rate of a large matrix product (AVX2, 24 to 96 channels, 3x3x3); on whole images, at 65 to 100 %.
#include <array>
#include <map>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>
#include <vector>

#include "base/error.h"
#include "cpu/onednn.h"
#include "cpu/ops.h"

namespace orrery::cpu {

using Triple = std::array<int64_t, 3>;

namespace {

// One convolution with everything resolved.
struct Problem {
  MutView out;    // [D', H', W', Cout]
  View x;         // [D, H, W, Cin]
  View residual;  // shape of out, or empty
  Triple kernel;
  const Conv3d& conv;

  int64_t channels() const { return x.dim(3); }
  int64_t results() const { return out.dim(3); }
  // Inputs along an axis that so many outputs see.
  int64_t reach(size_t axis, int64_t outputs) const {
    return (outputs - 1) * conv.stride[axis] + (kernel[axis] - 1) * conv.dilation[axis] + 1;
  }
  Triple patch(const Triple& block) const {
    return {reach(0, block[0]), reach(1, block[1]), reach(2, block[2])};
  }
};

int64_t product(const Triple& t) { return t[0] * t[1] * t[2]; }

Triple blocks_of(const Problem& p, const Triple& block) {
  return {ceil_div(p.out.dim(0), block[0]), ceil_div(p.out.dim(1), block[1]),
          ceil_div(p.out.dim(2), block[2])};
}

constexpr int64_t kMostOutputs = 1024;                 // positions of a block
constexpr int64_t kFewestOutputs = 32;                 // fewer would leave oneDNN no rows to share
constexpr int64_t kTaskFloats = int64_t{128} << 10;    // patch and results of a task
constexpr int64_t kLargeWeights = int64_t{1} << 20;    // floats that fit no thread's cache
constexpr int64_t kFewestOutputsOfLargeWeights = 128;  // each read of them is worth that many
constexpr int64_t kWantedTasks = 16;

// Outputs of one task along depth, height and width. Near-square blocks of several frames share
// most of what they read. Depends on shapes alone, not on the number of threads.
Triple choose_block(const Problem& p) {
  const int64_t weights = product(p.kernel) * p.channels() * p.results();
  const int64_t fewest = weights > kLargeWeights ? kFewestOutputsOfLargeWeights : kFewestOutputs;
  for (int64_t limit = kMostOutputs;; limit /= 2) {
    const int64_t frames = equal_pieces(p.out.dim(0), std::clamp<int64_t>(limit / 256, 1, 4));
    const int64_t columns = equal_pieces(p.out.dim(2), p.out.dim(1) == 1 ? limit / frames : 32);
    const int64_t rows =
        equal_pieces(p.out.dim(1), std::max<int64_t>(1, limit / (frames * columns)));
    const Triple block{frames, rows, columns};
    const int64_t floats = product(p.patch(block)) * p.channels() + product(block) * p.results();
    const bool good = floats <= kTaskFloats && product(blocks_of(p, block)) >= kWantedTasks;
    if (good || limit <= fewest) return block;
  }
}

// Copies the input under the block at `first` into a dense f32 patch, zeros where there is none.
void gather(const Kernels& kernels, float* patch, const Triple& size, const Problem& p,
            const Triple& first) {
  const View& x = p.x;
  const int64_t channels = p.channels();
  const auto origin = [&](size_t axis) {
    return first[axis] * p.conv.stride[axis] - p.conv.pad_before[axis];
  };
  const int64_t w0 = origin(2);
  const int64_t begin = std::clamp<int64_t>(-w0, 0, size[2]);
  const int64_t end = std::clamp<int64_t>(x.dim(2) - w0, begin, size[2]);
  for (int64_t i = 0; i < size[0]; ++i) {
    const int64_t d = origin(0) + i;
    for (int64_t j = 0; j < size[1]; ++j, patch += size[2] * channels) {
      const int64_t h = origin(1) + j;
      if (d < 0 || d >= x.dim(0) || h < 0 || h >= x.dim(1) || begin == end) {
        std::fill(patch, patch + size[2] * channels, 0.0f);
        continue;
      }
      std::fill(patch, patch + begin * channels, 0.0f);
      std::fill(patch + end * channels, patch + size[2] * channels, 0.0f);
      const int64_t element = d * x.stride(0) + h * x.stride(1) + (w0 + begin) * x.stride(2);
      // All positions of the row at once where their channels touch.
      const bool touch = x.stride(2) == channels;
      const int64_t run = touch ? end - begin : 1;
      for (int64_t w = begin; w < end; w += run) {
        kernels.to_f32(patch + w * channels,
                       at(x.data, element + (w - begin) * x.stride(2), x.dtype), stored(x.dtype),
                       run * channels);
      }
    }
  }
}

using dnnl::memory;

memory::dims channels_first(int64_t batch, int64_t channels, const Triple& size) {
  return {batch, channels, size[0], size[1], size[2]};
}

memory::desc channels_last(int64_t channels, const Triple& size) {
  return {channels_first(1, channels, size), memory::data_type::f32, memory::format_tag::ndhwc};
}

std::vector<float> to_floats(const Kernels& kernels, const View& x) {
  std::vector<float> values(size_t(x.numel()));
  kernels.to_f32(values.data(), x.data, stored(x.dtype), x.numel());
  return values;
}

struct Primitive {
  dnnl::convolution_forward::primitive_desc desc;
  dnnl::convolution_forward forward;
};

// What one thread hands to a call: views of its own scratch.
struct Arguments {
  dnnl::stream stream;
  memory x, weights, out, scratchpad;

  int run(const Primitive& primitive) const {
    const std::array<dnnl_exec_arg_t, 4> list{{{DNNL_ARG_SRC, x.get()},
                                               {DNNL_ARG_WEIGHTS, weights.get()},
                                               {DNNL_ARG_DST, out.get()},
                                               {DNNL_ARG_SCRATCHPAD, scratchpad.get()}}};
    const int status = dnnl_primitive_execute(primitive.forward.get(), stream.get(),
                                              int(list.size()), list.data());
    return status != dnnl_success ? status : dnnl_stream_wait(stream.get());
  }
};

// The primitives in use and the weights in the orders that they ask for.
class Convolutions {
 public:
  const dnnl::engine& engine() const { return engine_; }

  const Primitive& primitive(const Problem& p, const Triple& block) {
    const auto& [stride, dilation, before, after] = p.conv;
    const PrimitiveKey key{p.channels(), p.results(), p.kernel, stride, dilation, block};
    auto it = primitives_.find(key);
    if (it == primitives_.end()) {
      const memory::desc w(channels_first(p.results(), p.channels(), p.kernel),
                           memory::data_type::f32, memory::format_tag::any);
      const auto dims = [](const Triple& t, int64_t less) {
        return memory::dims{t[0] - less, t[1] - less, t[2] - less};
      };
      const memory::dims none{0, 0, 0};
      dnnl::primitive_attr attributes;
      attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
      const dnnl::convolution_forward::primitive_desc desc(
          {dnnl::prop_kind::forward_inference, dnnl::algorithm::convolution_direct,
           channels_last(p.channels(), p.patch(block)), w, channels_last(p.results(), block),
           dims(stride, 0), dims(dilation, 1), none, none},
          attributes, engine_);
      it = primitives_.emplace(key, Primitive{desc, dnnl::convolution_forward(desc)}).first;
    }
    return it->second;
  }

  // w in f32 and that order, made once for each address.
  memory weights(const Kernels& kernels, const View& w, const memory::desc& order) {
    const WeightKey key{w.data, w.dtype, {w.dim(0), w.dim(1), w.dim(2), w.dim(3), w.dim(4)}};
    std::vector<memory>& orders = weights_[key];
    for (const memory& known : orders) {
      if (known.get_desc() == order) return known;
    }
    std::vector<float> values = to_floats(kernels, w);
    memory plain({{w.dim(0), w.dim(1), w.dim(2), w.dim(3), w.dim(4)},
                  memory::data_type::f32,
                  memory::format_tag::oidhw},
                 engine_, values.data());
    memory reordered(order, engine_);
    dnnl::stream stream(engine_);
    dnnl::reorder(plain, reordered).execute(stream, plain, reordered);
    stream.wait();
    orders.push_back(reordered);
    return reordered;
  }

 private:
  using PrimitiveKey = std::tuple<int64_t, int64_t, Triple, Triple, Triple, Triple>;
  using WeightKey = std::tuple<const void*, DType, std::array<int64_t, 5>>;
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  std::map<PrimitiveKey, Primitive> primitives_;
  std::map<WeightKey, std::vector<memory>> weights_;
};

void run(Context& context, Convolutions& convolutions, const Conv3dArgs& call) {
  const View& w = call.w;
  const Problem p{call.out, call.x, call.residual, {w.dim(2), w.dim(3), w.dim(4)}, call.conv};
  const Kernels& kernels = context.kernels;
  const OneThreadCalls one_thread;
  const Triple block = choose_block(p), patch = p.patch(block), blocks = blocks_of(p, block);
  const Primitive& primitive = convolutions.primitive(p, block);
  const memory weights = convolutions.weights(kernels, w, primitive.desc.weights_desc());

  const auto lines = [](int64_t floats) { return ceil_div(floats, 16) * 16; };
  const int64_t results = p.results();
  const int64_t out_at = lines(product(patch) * p.channels());
  const int64_t scratchpad_at = out_at + lines(product(block) * results);
  const auto scratchpad = int64_t(primitive.desc.scratchpad_desc().get_size() / sizeof(float));
  context.per_thread.need_each(context.threads, scratchpad_at + scratchpad);
  std::vector<Arguments> arguments;
  for (int thread = 0; thread < context.threads; ++thread) {
    float* base = context.per_thread.of(thread);
    const dnnl::engine& engine = convolutions.engine();
    arguments.push_back({dnnl::stream(engine), memory(primitive.desc.src_desc(), engine, base),
                         weights, memory(primitive.desc.dst_desc(), engine, base + out_at),
                         memory(primitive.desc.scratchpad_desc(), engine, base + scratchpad_at)});
  }

  // A row of positions is finished at once where its results touch: the bias repeats itself.
  const auto touches = [&](const View& v) { return !v || v.stride(2) == results; };
  const bool touch = touches(p.out) && touches(p.residual);
  Finish finish;
  const std::vector<float> row = bias_row(kernels, call.bias);
  for (int64_t i = 0; i < block[2]; ++i) {
    finish.bias.insert(finish.bias.end(), row.begin(), row.end());
  }

  Calls calls;
  parallel_tasks(context, product(blocks), [&](int64_t task, int thread) {
    const Triple first{task / (blocks[1] * blocks[2]) * block[0],
                       task / blocks[2] % blocks[1] * block[1], task % blocks[2] * block[2]};
    float* base = context.per_thread.of(thread);
    gather(kernels, base, patch, p, first);
    calls.note(arguments[size_t(thread)].run(primitive));
    // The last block of an axis may reach past the outputs.
    const auto inside = [&](size_t axis) {
      return std::min(block[axis], p.out.dim(int(axis)) - first[axis]);
    };
    const int64_t run = touch ? inside(2) : 1;
    for (int64_t d = 0; d < inside(0); ++d) {
      for (int64_t h = 0; h < inside(1); ++h) {
        for (int64_t c = 0; c < inside(2); c += run) {
          const auto element = [&](const View& v) {
            return v ? (first[0] + d) * v.stride(0) + (first[1] + h) * v.stride(1) +
                           (first[2] + c) * v.stride(2)
                     : 0;
          };
          finish.row(kernels, p.out, element(p.out), p.residual, element(p.residual),
                     base + out_at + ((d * block[1] + h) * block[2] + c) * results, 0,
                     run * results);
        }
      }
    }
  });
  calls.check("conv3d");
}

}  // namespace

Implementations<Conv3dArgs> conv3d_implementations(Context& context) {
  const auto convolutions = std::make_shared<Convolutions>();
  const auto onednn = [&context, convolutions](const Conv3dArgs& call) -> Answer {
    try {
      run(context, *convolutions, call);
    } catch (const dnnl::error& error) {
      if (error.status != dnnl_out_of_memory) return decline(error.what());
      fail(ErrorKind::out_of_memory, "conv3d: ", describe(call), ": ", error.what());
    }
    return {};
  };
  return {"conv3d", {{"onednn", onednn}}};
}

// One product gives every input's share in each of its outputs, which are then added up.
void conv_transpose1d(Context& context, MutView out, View x, View w, View bias, int64_t stride,
                      int64_t padding) {
  const Kernels& kernels = context.kernels;
  const int64_t channels = w.dim(0), results = w.dim(1), taps = w.dim(2), shares = taps * results;
  const OneThreadCalls one_thread;
  const Finish finish{bias_row(kernels, bias)};
  const std::vector<float> values = to_floats(kernels, w);
  float* weights = context.shared.need(shares * channels);  // [taps, Cout, Cin]
  parallel_tasks(context, shares, [&](int64_t share, int) {
    const int64_t tap = share / results, o = share % results;
    for (int64_t c = 0; c < channels; ++c) {
      weights[share * channels + c] = values[size_t((c * results + o) * taps + tap)];
    }
  });

  const int64_t inputs = std::clamp<int64_t>(2 * kTaskFloats / shares, 8, 256);  // of a task
  const int64_t most = inputs + ceil_div(taps, stride) + 1;  // with those beside it that share
  context.per_thread.need_each(context.threads, most * (channels + shares) + results);
  Calls calls;
  parallel_tasks(context, ceil_div(out.dim(0), inputs * stride), [&](int64_t task, int thread) {
    const int64_t begin = task * inputs * stride;
    const int64_t end = std::min(out.dim(0), begin + inputs * stride);
    // Output n sees input t through tap n + padding - t * stride.
    const int64_t first = std::max<int64_t>(0, (begin + padding - taps) / stride);
    const int64_t last = std::min(x.dim(0), (end - 1 + padding) / stride + 1);
    float* rows = context.per_thread.of(thread);
    float* share = rows + most * channels;
    float* sum = share + most * shares;
    for (int64_t t = first; t < last; ++t) {
      kernels.to_f32(rows + (t - first) * channels, at(x.data, t * x.stride(0), x.dtype),
                     stored(x.dtype), channels);
    }
    if (last > first) {
      calls.note(int(dnnl::sgemm('N', 'T', last - first, shares, channels, 1.0f, rows, channels,
                                 weights, channels, 0.0f, share, shares)));
    }
    for (int64_t n = begin; n < end; ++n) {
      std::fill(sum, sum + results, 0.0f);
      for (int64_t tap = (n + padding) % stride; tap < taps; tap += stride) {
        const int64_t t = (n + padding - tap) / stride;
        if (n + padding < tap || t >= last) continue;
        kernels.add_scaled(sum, share + (t - first) * shares + tap * results, 1.0f, results);
      }
      finish.row(kernels, out, n * out.stride(0), {}, 0, sum, 0, results);
    }
  });
  calls.check("conv_transpose1d");
}

}  // namespace orrery::cpu
