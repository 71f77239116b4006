// Where the weights of an open model are at each moment (docs/cuda.md, "Weights and offload").
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "model/layer_stream.h"
#include "model/lora.h"
#include "model/sound.h"
#include "model/transformer.h"
#include "model/vae.h"
#include "model/weights.h"
#include "orrery/engine.h"

namespace orrery {

// The CPU reads weights in the mapping: always none there.
Offload offload_on(DeviceKind device, Offload asked);

// Bytes of weights, as one rank holds them.
struct PartSizes {
  int64_t text = 0, text_ends = 0,
          text_layer = 0;  // whole; what is not in layers; the largest layer
  int64_t generation = 0, generation_ends = 0, generation_layer = 0;
  int64_t vae = 0;
  int64_t sound = 0;  // 0 without a sound decoder
  int num_layers = 0;
  int64_t all() const { return text + generation + vae + sound; }
  int64_t text_layers() const { return text - text_ends; }  // what of the text tower can stay
};
// The networks of a model; what holds them outlives what is given this.
struct ModelNetworks {
  Transformer& transformer;
  Vae& vae;
  SoundDecoder* sound = nullptr;  // null when the model makes no sound
};
PartSizes part_sizes(const ModelNetworks& networks, const LayoutRules& transformer,
                     const HoldRule& vae);

// Bytes of weights in the memory of the device (on the CPU: the host's).
struct Footprint {
  int64_t resident = 0;             // between requests
  int64_t denoise = 0, decode = 0;  // in each phase of one, `resident` included
  int64_t pinned = 0;               // host memory beside the mapping
  int64_t most() const;
};
Footprint footprint_of(const PartSizes& sizes, Offload offload, DeviceKind device,
                       bool text_stays = false);
// Whether the text tower stays while a request needs `beside` bytes beside the weights and `budget`
// bytes hold both.
bool keeps_text(Resident resident, const PartSizes& sizes, Offload offload, DeviceKind device,
                int64_t beside, int64_t budget);

enum class Part : uint8_t { text, generation, vae, sound };

class ModelWeights {
 public:
  struct Options {
    Offload offload = Offload::none;
    bool text_stays = false;
    LoadOptions transformer, vae;
    bool check_sound = true;  // for values that are not finite
    std::vector<LoraAdapters::Source> lora;
    int64_t host_memory = std::numeric_limits<int64_t>::max();  // that layers may be pinned in
  };
  // Checks every tensor of `model`, refuses when what stays has no room on the device, loads what
  // stays. The networks and the backend outlive this.
  ModelWeights(Backend& backend, const ModelNetworks& networks, const ModelFolder& model,
               Options options);
  ~ModelWeights();

  // Whether a part is in place now.
  bool has(Part part) const { return places_[static_cast<size_t>(part)].present; }
  // Called between layers that are loaded. May throw: nothing has been brought then.
  using Pause = std::function<void()>;
  // A part is in place while a Use of it lives. Parts in use at once need room at once.
  class Use {
   public:
    Use(ModelWeights& weights, Part part, const Pause& pause = {})
        : weights_(weights), part_(part) {
      weights.bring(part, pause);
    }
    ~Use() { weights_.take_away(part_); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    ModelWeights& weights_;
    Part part_;
  };

  // What has been checked and brought to the device (bytes 0 on the CPU) so far. The layers that
  // take turns during a step are not counted, those of the text tower are part of the prompt's
  // time.
  struct LoadTime {
    double check_seconds = 0;
    double seconds = 0;
    int64_t bytes = 0;
  };
  const LoadTime& load_time() const { return load_time_; }
  const PartSizes& sizes() const { return sizes_; }
  const Footprint& footprint() const { return footprint_; }
  // From now on; a text tower that no longer stays goes at once. Between requests only.
  void keep_text(bool stays);
  // Bytes on the device that keep_text(stays) frees; negative where the next prompt takes them.
  int64_t freed_by(bool text_stays) const;
  // Bytes that are on the device between requests, now.
  int64_t resident_bytes() const;
  // Sentences about values that look damaged, and about what is slower than it should be.
  std::vector<std::string> notices() const;

 private:
  void bring(Part part, const Pause& pause);
  void take_away(Part part);
  bool stays(Part part) const;
  void load(Part part, const Pause& pause);
  void visit_tower(Tower tower, WeightVisitor& visitor, const Pause& pause);
  void check_sound(const ModelFolder& model);
  void note(std::vector<std::string> unlikely);
  void require_room() const;
  LayerStream::VisitLayer layers_of(Tower tower);
  WeightStore fill(const Safetensors& files, const VisitFunction& visit,
                   const LoadOptions& options);

  Backend& backend_;
  ModelNetworks networks_;
  Options options_;
  Safetensors transformer_files_, vae_files_;
  std::optional<Safetensors> sound_files_;
  LoadOptions sound_loading_;
  std::unique_ptr<LoraAdapters> adapters_;
  std::vector<std::string> unlikely_;  // clauses of check_weights()
  PartSizes sizes_;
  Footprint footprint_;
  LoadTime load_time_;
  struct Place {
    WeightStore store;
    std::unique_ptr<LayerStream> layers;
    bool present = false;
  };
  Place places_[4];  // by part
};

}  // namespace orrery
