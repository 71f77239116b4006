// Any bytes as a configuration of each component: sizes within their bounds, or an Error.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "base/json.h"
#include "model/scheduler.h"
#include "model/sound.h"
#include "model/transformer_config.h"
#include "model/vae.h"

namespace {

template <typename Read>
void try_read(const Read& read) {
  try {
    read();
  } catch (const orrery::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  orrery::Json json;
  try {
    json = orrery::Json::parse({reinterpret_cast<const char*>(data), size}, "config");
  } catch (const orrery::Error&) {
    return 0;
  }
  try_read([&] {
    const auto config = orrery::TransformerConfig::from_json(json);
    if (config.num_hidden_layers < 1 || config.patch_latent_dim < 1) std::abort();
  });
  try_read([&] {
    const auto config = orrery::VaeConfig::from_json(json);
    if (config.dim_mult.size() != config.temporal_downsample.size() + 1) std::abort();
  });
  try_read([&] { orrery::SoundConfig::from_json(json); });
  try_read([&] {
    const auto config = orrery::SchedulerConfig::from_json(json);
    orrery::make_schedule(config, 4);
  });
  return 0;
}
