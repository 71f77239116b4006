#include "engine/rank_state.h"

#include "attention/describe.h"
#include "base/error.h"
#include "engine/backends.h"
#include "engine/ranks.h"

namespace orrery {

ModelFiles::ModelFiles(const std::filesystem::path& model)
    : path(model),
      checkpoint(read_checkpoint(model)),
      tokenizer(Tokenizer::load(model / "text_tokenizer")) {}

RankState::RankState(std::shared_ptr<const ModelFiles> model, const EngineOptions& given,
                     World& world, int rank, int64_t host_memory)
    : files(std::move(model)),
      options(given),
      backend(make_backend(given)),
      dtype(activation_type(given, *backend)),
      strategy(strategy_of(checkpoint(), given.attention)),
      groups(connect(world, mesh_of(given), rank, *backend)) {
  use(std::move(strategy));
  load(host_memory);
}

void RankState::use(AttentionStrategy chosen) {
  // The built-in strategy needs no trial: what it runs is what every other is held against.
  if (chosen.source() != "default") {
    const TransformerConfig& config = checkpoint().transformer;
    require_presets(try_presets(chosen, *backend, config.num_attention_heads,
                                config.num_key_value_heads, config.head_dim, dtype));
  }
  std::string layouts;
  for (int i = 0; i < chosen.num_layouts(); ++i)
    layouts += (i > 0 ? ", " : "") + chosen.layout_name(i);
  notice(concat("attention strategy from: ", chosen.source(), "; layouts: ", layouts));
  strategy = std::move(chosen);
}

bool RankState::warms_up() const {
  if (options.warm_up != WarmUpMode::automatic) return options.warm_up == WarmUpMode::on;
  return backend->device() != DeviceKind::cpu && strategy.num_layouts() > 1;
}

void RankState::load(int64_t host_memory) {
  transformer = std::make_unique<Transformer>(*backend, checkpoint().transformer, dtype);
  vae = std::make_unique<Vae>(*backend, checkpoint().vae, vae_options(backend->device(), dtype));
  if (checkpoint().makes_sound())
    sound = std::make_unique<SoundDecoder>(*backend, *checkpoint().sound);

  // The CPU reads bf16 weights from the mapping; a device holds them in the type it computes in.
  LoadOptions of;
  if (backend->device() != DeviceKind::cpu) of.hold = dtype;
  const Quantisation& quantisation = checkpoint().transformer.quantisation;
  of.dialect = quantisation.dialect();
  of.ignored = [](std::string_view name) {
    return Transformer::is_unused(name) || Quantisation::is_unused(name);
  };
  require(options.lora.empty() || quantisation.method.empty(), ErrorKind::unsupported,
          "adapters are not merged into weights of 8 bits (", quantisation.method,
          "); use the checkpoint with bf16 weights");
  of.shard = {groups.place().tp, groups.mesh.tp, groups.tp.get()};
  // One rank for each slice looks at its numbers; a fault ends all.
  of.check_finite = groups.place().cp == 0 && groups.place().cfg == 0;
  ModelWeights::Options use;
  use.offload = offload();
  use.host_memory = host_memory;
  use.transformer = of;
  use.vae.hold = of.hold;
  use.vae.check_finite = groups.leads();
  for (const LoraFile& lora : options.lora) use.lora.push_back({lora.file, lora.scale});
  use.check_sound = groups.leads();
  weights = std::make_unique<ModelWeights>(*backend, ModelNetworks{*transformer, *vae, sound.get()},
                                           files->path, std::move(use));
  if (const std::string sentence = weights->notice(); !sentence.empty()) notice(sentence);
  if (options.offload != offload()) {
    notice(concat("offload ", name_of(options.offload),
                  " has nothing to do on the CPU, which reads weights in the mapped files"));
  }
}

Placement RankState::placement(const Request& request) const {
  return {backend->device(),
          backend->fuses_weights(),
          dtype,
          {request.vae_tiling},
          groups.mesh,
          groups.rank,
          offload(),
          options.resident,
          0};
}

}  // namespace orrery
