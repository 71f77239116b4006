#include "model/sound_weights.h"

#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "io/checkpoint.h"

namespace orrery {

namespace {

constexpr int64_t kKernel = 7;

// Names of parts in the two layouts: decoder.block.0.res_unit1.conv1, or by position in nested
// lists of layers.
struct Layout {
  std::string prefix;  // before "decoder."
  bool flat = false;

  std::string part(const std::string& parent, const char* name, size_t place) const {
    return flat ? parent + ".layers." + std::to_string(place) : parent + "." + name;
  }
  std::string block(const std::string& parent, size_t j) const {
    return flat ? parent + ".layers." + std::to_string(j + 1)
                : parent + ".block." + std::to_string(j);
  }
};

Layout find_layout(const Safetensors& files) {
  for (const auto& [first, flat] :
       {std::pair{"decoder.conv1.", false}, {"decoder.layers.0.", true}}) {
    for (const StoredTensor& tensor : files.tensors()) {
      for (const char* kind : {"weight", "weight_v"}) {
        const std::string wanted = std::string(first) + kind;
        if (tensor.name.ends_with(wanted)) {
          return {tensor.name.substr(0, tensor.name.size() - wanted.size()), flat};
        }
      }
    }
  }
  fail(ErrorKind::corrupt, files.origin().string(),
       ": no sound decoder in it: neither decoder.conv1 nor decoder.layers.0 has a weight");
}

class Visitor {
 public:
  virtual ~Visitor() = default;
  virtual void snake(SnakeWeights& slot, const std::string& name, int64_t channels) = 0;
  // `biases`: length of the bias, 0 for none.
  virtual void conv(SoundConvWeights& slot, const std::string& name, Shape shape,
                    int64_t biases) = 0;
};

void visit(SoundWeights& weights, const SoundConfig& config, const Layout& layout,
           Visitor& visitor) {
  const std::string decoder = layout.prefix + "decoder";
  const size_t levels = config.dec_strides.size();
  const auto width = [&](size_t i) {
    return config.dec_dim * (i == 0 ? 1 : config.dec_c_mults[i - 1]);
  };
  weights.blocks.resize(levels);
  visitor.conv(weights.conv1, layout.part(decoder, "conv1", 0),
               {width(levels), config.latent_dim, kKernel}, width(levels));
  for (size_t j = 0; j < levels; ++j) {
    SoundBlockWeights& block = weights.blocks[j];
    block.in = width(levels - j);
    block.out = width(levels - 1 - j);
    block.stride = config.dec_strides[levels - 1 - j];
    const std::string name = layout.block(decoder, j);
    visitor.snake(block.snake1, layout.part(name, "snake1", 0), block.in);
    visitor.conv(block.conv_t1, layout.part(name, "conv_t1", 1),
                 {block.in, block.out, 2 * block.stride}, block.out);
    for (size_t u = 0; u < block.units.size(); ++u) {
      SoundUnitWeights& unit = block.units[u];
      const std::string unit_name =
          layout.part(name, ("res_unit" + std::to_string(u + 1)).c_str(), u + 2);
      visitor.snake(unit.snake1, layout.part(unit_name, "snake1", 0), block.out);
      visitor.conv(unit.conv1, layout.part(unit_name, "conv1", 1), {block.out, block.out, kKernel},
                   block.out);
      visitor.snake(unit.snake2, layout.part(unit_name, "snake2", 2), block.out);
      visitor.conv(unit.conv2, layout.part(unit_name, "conv2", 3), {block.out, block.out, 1},
                   block.out);
    }
  }
  visitor.snake(weights.snake1, layout.part(decoder, "snake1", levels + 1), width(0));
  visitor.conv(weights.conv2, layout.part(decoder, "conv2", levels + 2),
               {config.out_channels, width(0), kKernel}, 0);
}

class Expectations final : public Visitor {
 public:
  explicit Expectations(const Safetensors& files) : files_(files) {}
  std::vector<TensorExpectation> list;

  void snake(SnakeWeights&, const std::string& name, int64_t channels) override {
    for (const char* part : {".alpha", ".beta"}) {
      const StoredTensor* stored = files_.find(name + part);
      const bool bare = stored && stored->shape.rank() == 1;
      list.push_back({name + part, bare ? Shape{channels} : Shape{1, channels, 1}});
    }
  }

  void conv(SoundConvWeights&, const std::string& name, Shape shape, int64_t biases) override {
    if (files_.find(name + ".weight")) {
      list.push_back({name + ".weight", shape});
    } else {
      list.push_back({name + ".weight_g", {shape[0], 1, 1}});
      list.push_back({name + ".weight_v", shape});
    }
    if (biases > 0) list.push_back({name + ".bias", {biases}});
  }

 private:
  const Safetensors& files_;
};

class Loader final : public Visitor {
 public:
  Loader(Backend& backend, const Safetensors& files, std::vector<Buffer>& buffers)
      : backend_(backend), files_(files), buffers_(buffers) {}

  void snake(SnakeWeights& slot, const std::string& name, int64_t channels) override {
    slot.alpha = place(files_.read(name + ".alpha", DType::f32).view.reshape({channels}));
    slot.beta = place(files_.read(name + ".beta", DType::f32).view.reshape({channels}));
  }

  void conv(SoundConvWeights& slot, const std::string& name, Shape, int64_t biases) override {
    slot.weight =
        place(files_.find(name + ".weight") ? files_.read(name + ".weight", DType::f32).view
                                            : folded(name).view);
    if (biases > 0) slot.bias = place(files_.read(name + ".bias", DType::f32).view);
  }

 private:
  // W[k] = g[k] * v[k] / |v[k]|, over the first dimension: inputs in a transposed convolution.
  Tensor folded(const std::string& name) const {
    Tensor v = files_.read(name + ".weight_v", DType::f32);
    const Tensor g = files_.read(name + ".weight_g", DType::f32);
    const int64_t size = v.view.numel() / v.view.dim(0);
    for (int64_t k = 0; k < v.view.dim(0); ++k) {
      float* row = v.view.as<float>() + k * size;
      double squares = 0;
      for (int64_t i = 0; i < size; ++i) squares += double(row[i]) * double(row[i]);
      require(squares > 0, ErrorKind::corrupt, files_.origin().string(), ": ", name, ".weight_v[",
              k, "] is all zeros, so weight norm has no direction");
      const auto norm = static_cast<float>(std::sqrt(squares));
      const float scale = g.view.as<float>()[k] / norm;
      for (int64_t i = 0; i < size; ++i) row[i] *= scale;
    }
    return v;
  }

  View place(View host) {
    Tensor held = backend_.allocate_tensor(host.shape, DType::f32);
    backend_.upload(held.view, host);
    buffers_.push_back(std::move(held.buffer));
    return held.view;
  }

  Backend& backend_;
  const Safetensors& files_;
  std::vector<Buffer>& buffers_;
};

}  // namespace

SoundWeights load_sound_weights(Backend& backend, const SoundConfig& config,
                                const Safetensors& files) {
  const Layout layout = find_layout(files);
  const std::string own = layout.prefix + "decoder.";
  SoundWeights weights;
  Expectations expected(files);
  visit(weights, config, layout, expected);
  check_tensors(files, expected.list,
                [&](std::string_view name) { return !name.starts_with(own); });
  check_finite(files, expected.list);
  Loader loader(backend, files, weights.buffers);
  visit(weights, config, layout, loader);
  return weights;
}

}  // namespace orrery
