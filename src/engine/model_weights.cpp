#include "engine/model_weights.h"

#include <algorithm>

#include "base/error.h"
#include "engine/clock.h"
#include "model/weights.h"

namespace orrery {

namespace {

double gigabytes(int64_t bytes) { return static_cast<double>(bytes) * 1e-9; }

}  // namespace

Offload offload_on(DeviceKind device, Offload asked) {
  return device == DeviceKind::cpu ? Offload::none : asked;
}

PartSizes part_sizes(const ModelNetworks& networks, const LayoutRules& rules, const HoldRule& vae) {
  Transformer& transformer = networks.transformer;
  const auto bytes = [&](const VisitFunction& visit) { return weight_bytes(visit, rules); };
  PartSizes sizes;
  sizes.num_layers = static_cast<int>(transformer.config().num_hidden_layers);
  const auto tower = [&](Tower which, int64_t& all, int64_t& ends, int64_t& layer) {
    all = ends = bytes([&](WeightVisitor& v) { transformer.visit_ends(which, v); });
    for (int i = 0; i < sizes.num_layers; ++i) {
      const int64_t one = bytes([&](WeightVisitor& v) { transformer.visit_layer(which, i, v); });
      layer = std::max(layer, one);
      all += one;
    }
  };
  tower(Tower::und, sizes.text, sizes.text_ends, sizes.text_layer);
  tower(Tower::gen, sizes.generation, sizes.generation_ends, sizes.generation_layer);
  const auto whole = [&](const HoldRule& hold) { return LayoutRules{hold, {}, rules.fuses}; };
  sizes.vae = weight_bytes([&](WeightVisitor& v) { networks.vae.visit(v); }, whole(vae));
  if (networks.sound != nullptr) {
    sizes.sound = weight_bytes([&](WeightVisitor& v) { networks.sound->visit(v); },
                               whole(SoundDecoder::kWeightType));
  }
  return sizes;
}

int64_t Footprint::most() const { return std::max({resident, denoise, decode}); }

Footprint footprint_of(const PartSizes& sizes, Offload offload, DeviceKind device,
                       bool text_stays) {
  Footprint out;
  if (device == DeviceKind::cpu) {
    out.resident = out.denoise = out.decode = sizes.all();
    return out;
  }
  const int64_t turning =
      sizes.generation_ends + LayerStream::num_places(sizes.num_layers) * sizes.generation_layer;
  const bool goes = offload == Offload::model;
  out.resident = sizes.sound;
  if (offload == Offload::none) out.resident += sizes.generation + sizes.vae;
  if (offload == Offload::layer) {
    out.resident += turning + sizes.vae;
    out.pinned = sizes.generation - sizes.generation_ends;
  }
  // The text tower runs beside the first step; its embedding stays in the file.
  if (text_stays) out.resident += sizes.text_layers();
  out.denoise = out.resident + (text_stays ? 0 : sizes.text_layer) + (goes ? sizes.generation : 0);
  out.decode = out.resident + (goes ? sizes.vae : 0);
  return out;
}

bool keeps_text(Resident resident, const PartSizes& sizes, Offload offload, DeviceKind device,
                int64_t beside, int64_t budget) {
  if (device == DeviceKind::cpu || resident != Resident::automatic)
    return device != DeviceKind::cpu && resident == Resident::on;
  return offload == Offload::none &&
         footprint_of(sizes, offload, device, true).most() + beside <= budget;
}

ModelWeights::ModelWeights(Backend& backend, const ModelNetworks& networks,
                           const ModelFolder& model, Options options)
    : backend_(backend),
      networks_(networks),
      options_(std::move(options)),
      transformer_files_(Safetensors::open_folder(model.transformer.folder)),
      vae_files_(Safetensors::open_folder(model.vae.folder)) {
  const VisitFunction both = [&](WeightVisitor& v) {
    networks_.transformer.visit_und(v), networks_.transformer.visit_gen(v);
  };
  const auto start = Clock::now();
  adapters_ = std::make_unique<LoraAdapters>(options_.lora, both);
  unlikely_ = check_weights(transformer_files_, both, options_.transformer);
  note(check_weights(
      vae_files_, [&](WeightVisitor& v) { networks_.vae.visit(v); }, options_.vae));
  if (networks_.sound != nullptr) check_sound(model);
  load_time_.check_seconds = seconds_since(start);
  if (!adapters_->empty()) {
    options_.transformer.adapt = [this](const std::string& name, const View& stored) {
      return adapters_->merged(name, stored, networks_.transformer.dtype());
    };
    options_.transformer.adapted_type = [this](const std::string& name, DType stored) {
      return adapters_->merged_type(name, stored, networks_.transformer.dtype());
    };
  }
  sizes_ = part_sizes(networks_,
                      {hold_rule(transformer_files_, options_.transformer),
                       options_.transformer.shard, backend.fuses_weights()},
                      hold_rule(vae_files_, options_.vae));
  footprint_ = footprint_of(sizes_, options_.offload, backend.device(), options_.text_stays);
  require_room();
  for (Part part : {Part::text, Part::generation, Part::vae, Part::sound}) {
    // The text tower comes with the first prompt, whose layers run while the next ones are brought.
    const bool waits = part == Part::text && backend.device() != DeviceKind::cpu;
    if (stays(part) && !waits && (part != Part::sound || networks_.sound != nullptr))
      load(part, {});
  }
}

void ModelWeights::check_sound(const ModelFolder& model) {
  sound_files_ = Safetensors::open_folder(model.sound_tokenizer->folder);
  sound_loading_ = sound_loading(networks_.sound->config(), *sound_files_);
  sound_loading_.check_finite = options_.check_sound;
  note(check_weights(
      *sound_files_, [&](WeightVisitor& v) { networks_.sound->visit(v); }, sound_loading_));
}

void ModelWeights::note(std::vector<std::string> unlikely) {
  std::move(unlikely.begin(), unlikely.end(), std::back_inserter(unlikely_));
}

ModelWeights::~ModelWeights() {
  networks_.transformer.set_stream(Tower::und, nullptr);
  networks_.transformer.set_stream(Tower::gen, nullptr);
}

void ModelWeights::require_room() const {
  const MemoryState memory = backend_.memory();
  if (memory.total == 0) return;
  const auto most = [&](Offload offload) {
    return gigabytes(footprint_of(sizes_, offload, backend_.device()).most());
  };
  require(footprint_.most() <= memory.free, ErrorKind::out_of_memory, "the weights need ",
          gigabytes(footprint_.most()), " GB on the device, but ", gigabytes(memory.free), " of ",
          gigabytes(memory.total), " GB are free; they take ", most(Offload::model),
          " GB with --offload model and ", most(Offload::layer),
          " GB with --offload layer, less on several ranks (--tp-degree)");
  require(footprint_.pinned <= options_.host_memory, ErrorKind::out_of_memory,
          "--offload layer keeps ", gigabytes(footprint_.pinned),
          " GB of layers in host memory, but ", gigabytes(options_.host_memory),
          " GB are available there for this rank; use --offload model");
}

bool ModelWeights::stays(Part part) const {
  if (backend_.device() == DeviceKind::cpu || part == Part::sound) return true;
  return part == Part::text ? options_.text_stays : options_.offload != Offload::model;
}

void ModelWeights::keep_text(bool stays) {
  if (stays == options_.text_stays || backend_.device() == DeviceKind::cpu) return;
  options_.text_stays = stays;
  if (!stays) take_away(Part::text);
  footprint_ = footprint_of(sizes_, options_.offload, backend_.device(), stays);
}

int64_t ModelWeights::freed_by(bool text_stays) const {
  const bool is_there = options_.text_stays && has(Part::text);
  if (backend_.device() == DeviceKind::cpu || is_there == text_stays) return 0;
  return is_there ? sizes_.text_layers() : -sizes_.text_layers();
}

int64_t ModelWeights::resident_bytes() const {
  return footprint_.resident + freed_by(options_.text_stays);
}

void ModelWeights::bring(Part part, const Pause& pause) {
  if (!has(part)) load(part, pause);
}

void ModelWeights::take_away(Part part) {
  if (stays(part)) return;
  Place& place = places_[static_cast<size_t>(part)];
  if (part != Part::vae)
    networks_.transformer.set_stream(part == Part::text ? Tower::und : Tower::gen, nullptr);
  place = {};
}

LayerStream::VisitLayer ModelWeights::layers_of(Tower tower) {
  return [this, tower](int i, WeightVisitor& v) { networks_.transformer.visit_layer(tower, i, v); };
}

WeightStore ModelWeights::fill(const Safetensors& files, const VisitFunction& visit,
                               const LoadOptions& options) {
  WeightStore store = fill_weights(backend_, files, visit, options);
  if (backend_.device() != DeviceKind::cpu) load_time_.bytes += store.bytes();
  return store;
}

// As Transformer::visit_und() and visit_gen() do.
void ModelWeights::visit_tower(Tower tower, WeightVisitor& visitor, const Pause& pause) {
  if (tower == Tower::und) networks_.transformer.visit_ends(tower, visitor);
  for (int i = 0; i < sizes_.num_layers; ++i) {
    if (pause) pause();
    networks_.transformer.visit_layer(tower, i, visitor);
  }
  if (tower == Tower::gen) networks_.transformer.visit_ends(tower, visitor);
}

void ModelWeights::load(Part part, const Pause& pause) {
  const auto start = Clock::now();
  Place& place = places_[static_cast<size_t>(part)];
  const LoadOptions& of = options_.transformer;
  const bool in_turns =
      backend_.device() != DeviceKind::cpu &&
      (part == Part::text || (part == Part::generation && options_.offload == Offload::layer));
  if (part == Part::vae) {
    place.store = fill(
        vae_files_, [&](WeightVisitor& v) { networks_.vae.visit(v); }, options_.vae);
  } else if (part == Part::sound) {
    place.store = fill(
        *sound_files_, [&](WeightVisitor& v) { networks_.sound->visit(v); }, sound_loading_);
  } else {
    const Tower tower = part == Part::text ? Tower::und : Tower::gen;
    if (in_turns) {
      place.store = fill(
          transformer_files_, [&](WeightVisitor& v) { networks_.transformer.visit_ends(tower, v); },
          of);
      place.layers =
          part == Part::text
              ? LayerStream::mapped(
                    backend_, sizes_.num_layers, layers_of(tower), transformer_files_, of,
                    options_.text_stays ? LayerStream::Keep::all : LayerStream::Keep::one)
              : LayerStream::pinned(backend_, sizes_.num_layers, layers_of(tower),
                                    transformer_files_, of);
      load_time_.bytes += place.layers->host_bytes();
      networks_.transformer.set_stream(tower, place.layers.get());
    } else {
      place.store = fill(
          transformer_files_, [&](WeightVisitor& v) { visit_tower(tower, v, pause); }, of);
    }
  }
  backend_.synchronize();
  place.present = true;
  load_time_.seconds += seconds_since(start);
}

std::vector<std::string> ModelWeights::notices() const {
  std::vector<std::string> sentences;
  for (const std::string& clause : unlikely_)
    sentences.push_back(clause + "; the file may be damaged: see orrery inspect --verify");
  const std::unique_ptr<LayerStream>& layers =
      places_[static_cast<size_t>(Part::generation)].layers;
  if (const std::string slow = layers ? layers->notice() : ""; !slow.empty())
    sentences.push_back(slow);
  return sentences;
}

}  // namespace orrery
