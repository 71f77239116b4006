#include <algorithm>
#include <cmath>
#include <string>

#include "base/config_reader.h"
#include "base/error.h"
#include "model/vae.h"

namespace orrery {

namespace {

constexpr int64_t kMaxSize = 1 << 16;
constexpr size_t kMaxLevels = 8;  // a side falls to 1 / 128; released files have 4

void read_statistics(ConfigReader& config, const char* key, std::vector<float>& field) {
  const Json& list = config.at(key);
  for (const Json& item : list.items()) field.push_back(static_cast<float>(item.as_double()));
}

void require_known(ConfigReader& config) {
  if (const Json* name = config.find("_class_name")) {
    require(name->as_string() == "AutoencoderKLWan", ErrorKind::unsupported, config.where(),
            ": _class_name is \"", name->as_string(), "\"; this engine runs AutoencoderKLWan");
  }
  const Json* residual = config.find("is_residual");
  require(residual && residual->as_bool(), ErrorKind::unsupported, config.where(),
          ": is_residual is false: the Wan 2.1 layout is not supported, only the residual Wan 2.2 "
          "layout");
  if (const Json* scales = config.find("attn_scales")) {
    require(scales->items().empty(), ErrorKind::unsupported, config.where(),
            ": attn_scales is not empty: attention outside the middle block is not supported");
  }
}

// The parameter-free shortcuts average or repeat channels in groups; a group is whole cells (the
// positions that one position becomes) or a whole part of one cell.
void require_groups(const ConfigReader& config, const char* side, size_t level, int64_t values,
                    int64_t groups, int64_t cell) {
  const int64_t size = values % groups == 0 ? values / groups : 0;
  require(size > 0 && (size % cell == 0 || cell % size == 0), ErrorKind::unsupported,
          config.where(), ": dim_mult: the shortcut of ", side, " block ", level, " cannot share ",
          values, " values out to ", groups, " channels");
}

void check(const ConfigReader& config, const VaeConfig& c) {
  const std::string where = config.where();
  const size_t levels = c.dim_mult.size();
  require(levels <= kMaxLevels, ErrorKind::unsupported, where, ": dim_mult has ", levels,
          " entries, at most ", kMaxLevels, " are supported");
  require(levels >= 2 && c.temporal_downsample.size() == levels - 1, ErrorKind::unsupported, where,
          ": dim_mult has ", levels, " entries and temperal_downsample ",
          c.temporal_downsample.size(), ", expected one fewer and at least one");
  require(c.patch_size <= 2, ErrorKind::unsupported, where, ": patch_size is ", c.patch_size,
          ", expected 1 or 2");
  const int64_t channels = 3 * c.patch_size * c.patch_size;
  require(c.in_channels == channels && c.out_channels == channels, ErrorKind::unsupported, where,
          ": in_channels ", c.in_channels, " and out_channels ", c.out_channels,
          " do not fit patch_size ", c.patch_size, ", expected ", channels);
  const auto halvings =
      std::count(c.temporal_downsample.begin(), c.temporal_downsample.end(), true);
  require(c.scale_factor_temporal == int64_t{1} << halvings, ErrorKind::corrupt, where,
          ": scale_factor_temporal is ", c.scale_factor_temporal,
          ", but temperal_downsample makes ", int64_t{1} << halvings);
  const int64_t spatial = c.patch_size << (levels - 1);
  require(c.scale_factor_spatial == spatial, ErrorKind::corrupt, where,
          ": scale_factor_spatial is ", c.scale_factor_spatial,
          ", but patch_size and dim_mult make ", spatial);
  for (const auto& [name, values] :
       {std::pair{"latents_mean", &c.latents_mean}, {"latents_std", &c.latents_std}}) {
    require(static_cast<int64_t>(values->size()) == c.z_dim, ErrorKind::corrupt, where, ": ", name,
            " has ", values->size(), " values, but z_dim is ", c.z_dim);
    for (float value : *values) {
      require(std::isfinite(value) && (values != &c.latents_std || value > 0), ErrorKind::corrupt,
              where, ": ", name, " holds ", value);
    }
  }
  for (size_t b = 0; b < levels; ++b) {
    const bool resamples = b + 1 < levels;
    const auto mult = [&](size_t i) { return c.dim_mult[i]; };
    const auto cell = [&](bool temporal) { return (resamples ? 4 : 1) * (temporal ? 2 : 1); };
    const int64_t down = cell(resamples && c.temporal_downsample[b]);
    const int64_t narrow = b == 0 ? 1 : mult(b - 1);
    require_groups(config, "encoder", b, narrow * down, mult(b), down);
    if (!resamples) continue;
    const int64_t up = cell(c.temporal_downsample[levels - 2 - b]);
    const int64_t wide = b == 0 ? mult(levels - 1) : mult(levels - b);
    require_groups(config, "decoder", b, mult(levels - 1 - b) * up, wide, up);
  }
}

}  // namespace

VaeConfig VaeConfig::from_json(const Json& json) {
  ConfigReader config(json);
  require_known(config);
  config.harmless({"dropout", "clip_output"});  // output is always clamped
  VaeConfig c;
  config.read("base_dim", c.base_dim, 1, kMaxSize);
  c.decoder_base_dim = c.base_dim;
  config.read("decoder_base_dim", c.decoder_base_dim, 1, kMaxSize);
  config.read("z_dim", c.z_dim, 1, kMaxSize);
  config.read("num_res_blocks", c.num_res_blocks, 1, kMaxSize);
  config.read("in_channels", c.in_channels, 1, kMaxSize);
  config.read("out_channels", c.out_channels, 1, kMaxSize);
  config.read("patch_size", c.patch_size, 1, kMaxSize);
  config.read("scale_factor_temporal", c.scale_factor_temporal, 1, kMaxSize);
  config.read("scale_factor_spatial", c.scale_factor_spatial, 1, kMaxSize);
  if (const Json* list = config.find("dim_mult")) {
    c.dim_mult.clear();
    for (const Json& item : list->items()) {
      c.dim_mult.push_back(item.as_int());
      require(c.dim_mult.back() > 0 && c.dim_mult.back() <= kMaxSize, ErrorKind::corrupt,
              json.where(), ": dim_mult holds ", c.dim_mult.back(), ", expected 1 to ", kMaxSize);
    }
  }
  // The key is misspelt in every released file.
  if (const Json* list = config.find("temperal_downsample")) {
    c.temporal_downsample.clear();
    for (const Json& item : list->items()) c.temporal_downsample.push_back(item.as_bool());
  }
  read_statistics(config, "latents_mean", c.latents_mean);
  read_statistics(config, "latents_std", c.latents_std);
  config.refuse_rest("this engine's VAE");
  check(config, c);
  return c;
}

}  // namespace orrery
