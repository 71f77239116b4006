// The denoising network: a text (understanding) tower that runs once per prompt and leaves its keys
// and values behind, and a generation tower that runs at every step (transformer specification).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "backend/backend.h"
#include "model/positions.h"
#include "model/transformer_config.h"
#include "model/weights.h"

namespace orrery {

class LayerStream;
struct TowerLayer;
struct TransformerWeights;

// Keys and values of one prompt for every layer, on the backend: what generation tokens read of the
// text.
struct UndCache {
  int64_t text = 0;
  std::vector<Tensor> k, v;  // per layer [text, KV heads of this rank, head_dim]
};

// cos and sin of one branch's generation tokens, f32 [rows, head_dim / 2], in stored order; `rows`
// are this rank's, with padding (Sequence::share).
struct GenRope {
  Tensor cos, sin;
};

// One vision item as the network reads it.
struct VisionItem {
  View latent;              // f32 [C, T, h, w]
  std::vector<bool> noisy;  // per latent frame; conditioned frames carry no timestep
};

struct GenInput {
  std::vector<VisionItem> controls;  // transfer: clean control videos, before the target
  VisionItem target;
  View sound;                      // f32 [sound_dim, Ts] or empty
  View action;                     // f32 [Ta, action_dim] or empty
  std::vector<bool> action_noisy;  // per action token
  int64_t action_domain = 0;
  float timestep = 0;  // the scheduler's, 0 .. 1000
};

// Velocities, f32, same shapes as the inputs. Conditioned frames and tokens are exactly 0.
struct GenOutput {
  MutView vision;
  MutView sound;
  MutView action;
};

enum class Tower : uint8_t { und, gen };

class Transformer {
 public:
  // Activations are `dtype` (f32 or bf16).
  Transformer(Backend& backend, TransformerConfig config, DType dtype);
  ~Transformer();

  const TransformerConfig& config() const { return config_; }
  DType dtype() const { return dtype_; }
  Backend& backend() const { return backend_; }

  // The tensor list. prefill() needs the text tower, velocity() the generation's only.
  void visit_und(WeightVisitor& visitor);
  void visit_gen(WeightVisitor& visitor);
  // The same in parts: one layer of a tower, and what is not in its layers.
  void visit_layer(Tower tower, int layer, WeightVisitor& visitor);
  void visit_ends(Tower tower, WeightVisitor& visitor);
  // Where a tower's layers come from when they are not all in place; null: they are. The stream
  // outlives its use.
  void set_stream(Tower tower, LayerStream* stream);
  // Brings a layer in place as a call that uses it would; for measurements.
  void bring_layer(Tower tower, int layer) { layer_of(tower, layer); }
  // Stored tensors that generation never reads.
  static bool is_unused(std::string_view name);

  // One prompt for the text tower; its cache is allocated by the backend.
  struct Prompt {
    int branch = 0;  // of the guidance
    std::span<const int64_t> ids;
    UndCache* cache = nullptr;
  };
  // The text tower's way through its layers, all prompts side by side. Holds memory of the arena.
  class TextPass {
   public:
    TextPass(Transformer& transformer, Arena& arena, std::span<const Prompt> prompts,
             Attention& attention);
    ~TextPass();
    // Up to and including this layer; its keys and values are there afterwards.
    void advance_to(int layer);

   private:
    struct State;
    std::unique_ptr<State> state_;
  };
  // All layers.
  void prefill(Arena& arena, std::span<const Prompt> prompts, Attention& attention);
  UndCache prefill(Arena& arena, std::span<const int64_t> ids, Attention& attention);

  // The generation stream of one request; sizes from latents [C, T, h, w].
  std::array<int64_t, 3> token_grid(int64_t frames, int64_t h, int64_t w) const;
  // `positions` of the whole sequence, raster order.
  GenRope make_rope(const Positions& positions, const Attention& attention);

  // One evaluation. `attention` knows the step and the sequence. In a group that shares the
  // sequence every rank brings the same inputs and gets the whole outputs.
  void velocity(Arena& arena, const GenOutput& out, const GenInput& in, const UndCache& und,
                const GenRope& rope, Attention& attention);
  // One of several evaluations of the same timestep.
  struct Evaluation {
    int branch = 0;  // of the guidance
    GenOutput out;
    GenInput in;
    const UndCache* und = nullptr;
    const GenRope* rope = nullptr;
    Attention* attention = nullptr;
  };
  // Whether velocities() stacks these: their rows lie below each other and go through projections
  // and MLP as one. For sequences too short to fill a device by themselves.
  bool stacks(std::span<const Evaluation> evaluations) const;
  // All of them, layer by layer; before_layer(i) comes ahead of layer i. `time` [H] as embed_time()
  // makes it, in place of the inputs' timestep: without before_layer no host memory is read, so
  // that a backend may replay it.
  void velocities(Arena& arena, std::span<const Evaluation> evaluations, View time,
                  const std::function<void(int layer)>& before_layer);
  // out [H], in the activations' type.
  void embed_time(Arena& arena, MutView out, float timestep);

  // Called after each layer with the tower's hidden states [tokens, H], of generation this rank's
  // rows with padding; for tests and for naming the layer where a value stopped being finite.
  using Probe = std::function<void(Tower, int layer, View hidden)>;
  void set_probe(Probe probe) { probe_ = std::move(probe); }

  // The timestep embedding [1, H] in f32 (section 4.1).
  void embed_timestep(Arena& arena, MutView out, float timestep);

 private:
  void embed(Arena& arena, MutView x, const GenInput& in, View time, const Sequence& sequence);
  void embed_share(Arena& arena, MutView x, const GenInput& in, View time,
                   const Attention& attention);
  void embed_vision(Arena& arena, MutView x, const VisionItem& item, View time);
  void read_heads(Arena& arena, const GenOutput& out, const GenInput& in, View x,
                  const Attention& attention);
  View head_rows(Arena& arena, const GenOutput& out, const GenInput& in, View x,
                 const Attention& attention);
  void gen_layer(Arena& arena, int layer, MutView x, std::span<const Evaluation> evaluations);
  struct Text;
  Text start_text(Arena& arena, const Prompt& prompt);
  void und_layer(Arena& arena, int layer, Text& text, Attention& attention);
  // The weights of a layer, in place for the calls that follow.
  const TowerLayer& layer_of(Tower tower, int layer);
  Norm norm() const;

  Backend& backend_;
  TransformerConfig config_;
  DType dtype_;
  std::unique_ptr<TransformerWeights> weights_;
  std::array<LayerStream*, 2> streams_{};  // by tower
  Probe probe_;
};

}  // namespace orrery
