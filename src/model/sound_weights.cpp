#include "model/sound_weights.h"

#include <cmath>
#include <string>
#include <string_view>

#include "base/error.h"

namespace orrery {

namespace {

constexpr int64_t kKernel = 7;
constexpr std::string_view kDecoder = "decoder";

class Lister {
 public:
  explicit Lister(WeightVisitor& visitor) : visitor_(visitor) {}

  void snake(SnakeWeights& slot, const std::string& name, int64_t channels) {
    visitor_.tensor(slot.alpha, name + ".alpha", {channels});
    visitor_.tensor(slot.beta, name + ".beta", {channels});
  }

  // `biases`: length of the bias, 0 for none.
  void conv(SoundConvWeights& slot, const std::string& name, Shape shape, int64_t biases) {
    visitor_.tensor(slot.weight, name + ".weight", shape);
    if (biases > 0) visitor_.tensor(slot.bias, name + ".bias", {biases});
  }

 private:
  WeightVisitor& visitor_;
};

// How the names of one file differ from the listed ones.
struct Spelling {
  std::string prefix;  // before "decoder"
  bool flat = false;   // parts are called by their position in nested lists of layers
};

Spelling spelling_of(const Safetensors& files) {
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

// The position of a part, as listed, among the layers of its parent: of a decoder with `levels`
// blocks, of a block, or of a residual unit.
size_t position_of(std::string_view part, std::string_view parent, size_t levels) {
  if (parent == kDecoder) return part == "conv1" ? 0 : part == "snake1" ? levels + 1 : levels + 2;
  if (part.starts_with("res_unit")) return static_cast<size_t>(part.back() - '0') + 1;
  if (part == "snake1") return 0;
  return part == "snake2" ? 2 : part == "conv2" ? 3 : 1;
}

// "decoder.block.0.snake1.alpha" -> "decoder.layers.1.layers.0.alpha".
std::string flat_name(const std::string& listed, size_t levels) {
  std::string flat(kDecoder), parent(kDecoder);
  const size_t end = listed.rfind('.');
  size_t at = kDecoder.size() + 1;
  while (at < end) {
    size_t next = listed.find('.', at);
    std::string part = listed.substr(at, next - at);
    size_t position = 0;
    if (part == "block") {
      at = next + 1;
      next = listed.find('.', at);
      position = std::stoul(listed.substr(at, next - at)) + 1;
    } else {
      position = position_of(part, parent, levels);
    }
    flat += ".layers." + std::to_string(position);
    parent = part;
    at = next + 1;
  }
  return flat + listed.substr(end);
}

// W[k] = g[k] * v[k] / |v[k]|, over the first dimension: inputs in a transposed convolution.
Tensor folded(const Safetensors& files, const std::string& weight) {
  Tensor v = files.read(weight + "_v", DType::f32);
  const Tensor g = files.read(weight + "_g", DType::f32);
  const int64_t size = v.view.numel() / v.view.dim(0);
  for (int64_t k = 0; k < v.view.dim(0); ++k) {
    float* row = v.view.as<float>() + k * size;
    double squares = 0;
    for (int64_t i = 0; i < size; ++i) squares += double(row[i]) * double(row[i]);
    require(squares > 0, ErrorKind::corrupt, files.origin().string(), ": ", weight, "_v[", k,
            "] is all zeros, so weight norm has no direction");
    const auto norm = static_cast<float>(std::sqrt(squares));
    const float scale = g.view.as<float>()[k] / norm;
    for (int64_t i = 0; i < size; ++i) row[i] *= scale;
  }
  return v;
}

}  // namespace

SoundWeights sound_structure(const SoundConfig& config) {
  const size_t levels = config.dec_strides.size();
  SoundWeights weights;
  for (size_t j = 0; j < levels; ++j) {
    SoundBlockWeights& block = weights.blocks.emplace_back();
    block.in = config.width(levels - j);
    block.out = config.width(levels - 1 - j);
    block.stride = config.dec_strides[levels - 1 - j];
  }
  return weights;
}

void visit(SoundWeights& weights, const SoundConfig& config, WeightVisitor& visitor) {
  const std::string decoder(kDecoder);
  const int64_t first = config.width(config.dec_strides.size()), last = config.width(0);
  Lister list(visitor);
  list.conv(weights.conv1, decoder + ".conv1", {first, config.latent_dim, kKernel}, first);
  for (size_t j = 0; j < weights.blocks.size(); ++j) {
    SoundBlockWeights& block = weights.blocks[j];
    const std::string name = decoder + ".block." + std::to_string(j);
    list.snake(block.snake1, name + ".snake1", block.in);
    list.conv(block.conv_t1, name + ".conv_t1", {block.in, block.out, 2 * block.stride}, block.out);
    for (size_t u = 0; u < block.units.size(); ++u) {
      SoundUnitWeights& unit = block.units[u];
      const std::string unit_name = name + ".res_unit" + std::to_string(u + 1);
      list.snake(unit.snake1, unit_name + ".snake1", block.out);
      list.conv(unit.conv1, unit_name + ".conv1", {block.out, block.out, kKernel}, block.out);
      list.snake(unit.snake2, unit_name + ".snake2", block.out);
      list.conv(unit.conv2, unit_name + ".conv2", {block.out, block.out, 1}, block.out);
    }
  }
  list.snake(weights.snake1, decoder + ".snake1", last);
  list.conv(weights.conv2, decoder + ".conv2", {config.out_channels, last, kKernel}, 0);
}

LoadOptions sound_loading(const SoundConfig& config, const Safetensors& files) {
  const Spelling spelling = spelling_of(files);
  LoadOptions options;
  options.hold = SoundDecoder::kWeightType;
  options.ignored = [own = spelling.prefix + std::string(kDecoder) + "."](std::string_view name) {
    return !name.starts_with(own);
  };
  options.dialect = [spelling, levels = config.dec_strides.size()](const Safetensors& from,
                                                                   const std::string& listed,
                                                                   const Shape& shape) -> StoredAs {
    const std::string name = spelling.prefix + (spelling.flat ? flat_name(listed, levels) : listed);
    const StoredTensor* stored = from.find(name);
    if (name.ends_with(".alpha") || name.ends_with(".beta")) {
      const bool bare = stored && stored->shape.rank() == 1;
      return {{{name, bare ? shape : Shape{1, shape[0], 1}}}, {}};
    }
    if (stored || !name.ends_with(".weight")) return {{{name, shape}}, {}};
    return {{{name + "_g", {shape[0], 1, 1}}, {name + "_v", shape}},
            [name](const Safetensors& pairs) { return folded(pairs, name); }};
  };
  return options;
}

}  // namespace orrery
