#include "model/vae_weights.h"

#include <string>

namespace orrery {

namespace {

// widths[b] -> widths[b + 1] at level b; `temporal` says which levels resample in time.
HalfWeights half(int64_t in, int64_t out, int64_t middle, const std::vector<int64_t>& widths,
                 const std::vector<bool>& temporal, int64_t resnets) {
  HalfWeights half;
  half.in = in;
  half.out = out;
  half.middle = middle;
  for (ResnetWeights& resnet : half.middle_resnets) resnet.in = resnet.out = middle;
  for (size_t b = 0; b + 1 < widths.size(); ++b) {
    LevelWeights level;
    level.in = widths[b];
    level.out = widths[b + 1];
    level.resamples = b < temporal.size();
    level.temporal = level.resamples && temporal[b];
    level.resnets.resize(static_cast<size_t>(resnets));
    for (size_t r = 0; r < level.resnets.size(); ++r) {
      level.resnets[r].in = r == 0 ? level.in : level.out;
      level.resnets[r].out = level.out;
    }
    half.levels.push_back(std::move(level));
  }
  return half;
}

class Lister {
 public:
  explicit Lister(WeightVisitor& visitor) : visitor_(visitor) {}

  void conv(ConvWeights& slot, const std::string& name, Shape shape) {
    visitor_.tensor(slot.weight, name + ".weight", shape);
    visitor_.tensor(slot.bias, name + ".bias", {shape[0]});
  }

  void norm(View& slot, const std::string& name, Shape shape) {
    visitor_.tensor(slot, name + ".gamma", shape);
  }

  void resnet(ResnetWeights& r, const std::string& name) {
    norm(r.norm1, name + ".norm1", {r.in, 1, 1, 1});
    conv(r.conv1, name + ".conv1", {r.out, r.in, 3, 3, 3});
    norm(r.norm2, name + ".norm2", {r.out, 1, 1, 1});
    conv(r.conv2, name + ".conv2", {r.out, r.out, 3, 3, 3});
    if (r.in != r.out) conv(r.shortcut, name + ".conv_shortcut", {r.out, r.in, 1, 1, 1});
  }

  void half(HalfWeights& h, const std::string& name, bool encoder) {
    const int64_t first = encoder ? h.levels.front().in : h.middle;
    const int64_t last = encoder ? h.middle : h.levels.back().out;
    conv(h.conv_in, name + ".conv_in", {first, h.in, 3, 3, 3});
    for (size_t i = 0; i < h.middle_resnets.size(); ++i) {
      resnet(h.middle_resnets[i], name + ".mid_block.resnets." + std::to_string(i));
    }
    const std::string attention = name + ".mid_block.attentions.0";
    norm(h.attention.norm, attention + ".norm", {h.middle, 1, 1});
    conv(h.attention.to_qkv, attention + ".to_qkv", {3 * h.middle, h.middle, 1, 1});
    conv(h.attention.proj, attention + ".proj", {h.middle, h.middle, 1, 1});
    for (size_t b = 0; b < h.levels.size(); ++b) {
      LevelWeights& level = h.levels[b];
      const std::string block =
          name + (encoder ? ".down_blocks." : ".up_blocks.") + std::to_string(b);
      for (size_t r = 0; r < level.resnets.size(); ++r) {
        resnet(level.resnets[r], block + ".resnets." + std::to_string(r));
      }
      if (!level.resamples) continue;
      const std::string sampler = block + (encoder ? ".downsampler" : ".upsampler");
      conv(level.resample, sampler + ".resample.1", {level.out, level.out, 3, 3});
      if (!level.temporal) continue;
      const int64_t made = encoder ? level.out : 2 * level.out;
      conv(level.time_conv, sampler + ".time_conv", {made, level.out, 3, 1, 1});
    }
    norm(h.norm_out, name + ".norm_out", {last, 1, 1, 1});
    conv(h.conv_out, name + ".conv_out", {h.out, last, 3, 3, 3});
  }

 private:
  WeightVisitor& visitor_;
};

}  // namespace

VaeWeights vae_structure(const VaeConfig& c) {
  std::vector<int64_t> down{c.base_dim};
  for (int64_t mult : c.dim_mult) down.push_back(c.base_dim * mult);
  std::vector<int64_t> up{c.decoder_base_dim * c.dim_mult.back()};
  for (size_t i = c.dim_mult.size(); i-- > 0;) up.push_back(c.decoder_base_dim * c.dim_mult[i]);
  const std::vector<bool> upsample(c.temporal_downsample.rbegin(), c.temporal_downsample.rend());
  VaeWeights weights;
  weights.encoder =
      half(c.in_channels, 2 * c.z_dim, down.back(), down, c.temporal_downsample, c.num_res_blocks);
  weights.decoder = half(c.z_dim, c.out_channels, up.front(), up, upsample, c.num_res_blocks + 1);
  return weights;
}

void visit(VaeWeights& weights, const VaeConfig& c, WeightVisitor& visitor) {
  Lister lister(visitor);
  lister.half(weights.encoder, "encoder", true);
  lister.conv(weights.quant, "quant_conv", {2 * c.z_dim, 2 * c.z_dim, 1, 1, 1});
  lister.conv(weights.post_quant, "post_quant_conv", {c.z_dim, c.z_dim, 1, 1, 1});
  lister.half(weights.decoder, "decoder", false);
}

}  // namespace orrery
