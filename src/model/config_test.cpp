// Every key of every config is obeyed or refused by name: what changes a model is never passed
// over.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "expect_error.h"
#include "model/scheduler.h"
#include "model/sound.h"
#include "model/transformer_config.h"
#include "model/vae.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

struct Refused {
  const char* key;
  const char* value;
  ErrorKind kind;
  const char* says;
};

Json with(const Json& config, const Refused& change) {
  Json changed = config;
  changed.set(change.key, Json::parse(change.value, change.key));
  return changed;
}

Json pico(const std::string& file) {
  return Json::load(source_dir() / "models/cosmos3-pico" / file);
}

template <typename Config>
void expect_refused(const Json& config, const std::vector<Refused>& changes) {
  EXPECT_NO_THROW(Config::from_json(config));
  // Null, false and empty switch nothing on.
  for (const char* off : {"null", "false", "0", "\"\"", "[]", "{}", "[null, null]"})
    EXPECT_NO_THROW(Config::from_json(with(config, {"novel", off, {}, ""}))) << off;
  for (const Refused& change : changes) {
    SCOPED_TRACE(std::string(change.key) + ": " + change.value);
    expect_error(change.kind, {change.says}, [&] { Config::from_json(with(config, change)); });
  }
  expect_error(ErrorKind::unsupported, {"cannot obey novel"}, [&] {
    Config::from_json(with(config, {"novel", "1", {}, ""}));
  });
}

TEST(Configs, Transformer) {
  constexpr auto kCorrupt = ErrorKind::corrupt, kUnsupported = ErrorKind::unsupported;
  expect_refused<TransformerConfig>(
      pico("transformer/config.json"),
      {
          {"rope_scaling", R"({"rope_type": "yarn", "factor": 4})", kUnsupported, "yarn"},
          {"rope_scaling", R"({"type": "linear"})", kUnsupported, "linear"},
          {"rope_scaling", R"({"factor": 2.0})", kUnsupported, "factor"},
          {"rope_scaling", R"({"mrope_interleaved": false})", kUnsupported, "mrope_interleaved"},
          {"rope_scaling", R"({"mrope_section": [10, 12, 10]})", kCorrupt, "rope_axes_dim is"},
          {"rope_axes_dim", "[12, 10, 9]", kCorrupt, "rope_axes_dim is [12,10,9]"},
          {"rope_axes_dim", "[42, 0, -10]", kCorrupt, "rope_axes_dim"},
          {"rope_axes_dim", "[32, 0]", kCorrupt, "three numbers"},
          {"timestep_scale", "0", kCorrupt, "timestep_scale is 0"},
          {"timestep_scale", "-1e-3", kCorrupt, "timestep_scale"},
          {"rms_norm_eps", "0", kCorrupt, "rms_norm_eps"},
          {"num_hidden_layers", "2000000", kCorrupt, "num_hidden_layers is 2000000"},
          {"num_hidden_layers", "2147483648", kCorrupt, "num_hidden_layers"},
          {"latent_patch_size", "2147483648", kCorrupt, "latent_patch_size"},
          {"latent_channel", "2147483648", kCorrupt, "latent_channel"},
          {"patch_latent_dim", "65", kCorrupt, "latent_patch_size^2 * latent_channel is 64"},
          {"hidden_size", "0", kCorrupt, "hidden_size is 0"},
          {"hidden_act", R"("gelu")", kUnsupported, "gelu"},
          {"_class_name", R"("Other")", kUnsupported, "Other"},
          {"sliding_window", "1024", kUnsupported, "sliding_window"},
          {"attention_bias", "\"no\"", kCorrupt, "expected a boolean"},
      });
  // Alone, axes must make up half a head.
  Json alone = pico("transformer/config.json");
  alone.set("rope_scaling", {});
  for (const char* axes : {"[12, 10, 9]", "[42, 0, -10]"}) {
    expect_error(kCorrupt, {"do not add up to half of head_dim 64"}, [&] {
      TransformerConfig::from_json(with(alone, {"rope_axes_dim", axes, {}, ""}));
    });
  }
  // Without axes of its own the section counts.
  Json config = pico("transformer/config.json");
  config.set("rope_axes_dim", {})
      .set("rope_scaling", Json::parse(R"({"mrope_section": [16, 8, 8]})", "rope"));
  EXPECT_EQ(TransformerConfig::from_json(config).rope_axes_dim, (std::array<int64_t, 3>{16, 8, 8}));
}

TEST(Configs, Vae) {
  const std::string levels66 = "[1" + [] {
    std::string more;
    for (int i = 0; i < 65; ++i) more += ", 1";
    return more;
  }() + "]";
  expect_refused<VaeConfig>(
      pico("vae/config.json"),
      {
          {"dim_mult", levels66.c_str(), ErrorKind::unsupported, "66 entries, at most 8"},
          {"attn_scales", "[0.5]", ErrorKind::unsupported, "attn_scales"},
          {"is_residual", "false", ErrorKind::unsupported, "is_residual"},
          {"use_quant_conv", "true", ErrorKind::unsupported, "use_quant_conv"},
          {"z_dim", "0", ErrorKind::corrupt, "z_dim is 0"},
      });
}

TEST(Configs, Scheduler) {
  expect_refused<SchedulerConfig>(
      pico("scheduler/scheduler_config.json"),
      {
          {"solver_type", R"("bh1")", ErrorKind::unsupported, "bh1"},
          {"thresholding", "true", ErrorKind::unsupported, "thresholding"},
          {"use_lu_lambdas", "true", ErrorKind::unsupported, "use_lu_lambdas"},
          {"shift_terminal", "0.1", ErrorKind::unsupported, "shift_terminal"},
      });
}

}  // namespace
}  // namespace orrery
