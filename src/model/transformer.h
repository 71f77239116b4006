// The denoising network: a text (understanding) tower that runs once per prompt and leaves its keys
// and values behind, and a generation tower that runs at every step
// (docs/internals/transformer.md).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "backend/backend.h"
#include "model/positions.h"
#include "model/transformer_config.h"
#include "model/weight_list.h"

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

  // The tensor list. A TextPass needs the text tower, a GenPass the generation's only.
  void visit_und(WeightVisitor& visitor);
  void visit_gen(WeightVisitor& visitor);
  // The same in parts: one layer of a tower, and what is not in its layers.
  void visit_layer(Tower tower, int layer, WeightVisitor& visitor);
  void visit_ends(Tower tower, WeightVisitor& visitor);
  // Where a tower's layers come from when they are not all in place; null: they are. The stream
  // outlives its use.
  void set_stream(Tower tower, LayerStream* stream);
  // How a tower's projections are computed from now on; only those of 8-bit weights differ.
  void set_precision(Tower tower, Precision precision);
  // Brings a layer in place as a call that uses it would; for measurements.
  void bring_layer(Tower tower, int layer) { layer_of(tower, layer); }
  // Stored tensors that generation never reads.
  static bool is_unused(std::string_view name);

  int last_layer() const { return static_cast<int>(config_.num_hidden_layers) - 1; }

  // One prompt for the text tower; its cache is allocated by the backend.
  struct Prompt {
    int branch = 0;  // index of the prompt
    std::span<const int64_t> ids;
    UndCache* cache = nullptr;
  };
  // Nothing reads the last text layer beyond its keys and values; checks want its states as well.
  enum class LastTextLayer : uint8_t { keys_and_values, whole };
  // The text tower's way through its layers, all prompts side by side. Its memory of the arena is
  // free again when it ends: passes over one arena end in the reverse order of their beginning.
  class TextPass {
   public:
    TextPass(Transformer& transformer, Arena& arena, std::span<const Prompt> prompts,
             Attention& attention, LastTextLayer last = LastTextLayer::keys_and_values);
    ~TextPass();
    // Up to and including this layer; its keys and values are there afterwards.
    void advance_to(int layer);
    // Hidden states [tokens, H] of a prompt after the layer that was last advanced to.
    View hidden(size_t prompt) const;

   private:
    struct State;
    std::unique_ptr<State> state_;
  };

  // The generation stream of one request; sizes from latents [C, T, h, w].
  std::array<int64_t, 3> token_grid(int64_t frames, int64_t h, int64_t w) const;
  // `positions` of the whole sequence, raster order.
  GenRope make_rope(const Positions& positions, const Attention& attention);

  // The timestep (0 to 1000) as the network reads it: out [H], f32 or the activations' type.
  // Computed in f32, whatever the type of the weights.
  void embed_time(Arena& arena, MutView out, float timestep);

  // One evaluation of the network for one step.
  struct Evaluation {
    int index = 0;  // of the guidance evaluation
    GenOutput out;
    GenInput in;
    const UndCache* und = nullptr;
    const GenRope* rope = nullptr;
    Attention* attention = nullptr;  // knows the step and the sequence
  };
  // Whether one GenPass takes these together: their rows lie below each other and go through
  // projections and MLP as one. For sequences too short to fill a device by themselves.
  bool stacks(std::span<const Evaluation> evaluations) const;

  // The generation tower's way through its layers, the twin of TextPass: one evaluation, or several
  // that stack. In a group that shares the sequence every rank brings the same inputs and gets the
  // whole outputs. No call reads host memory, so that a backend may replay the pass. Its memory of
  // the arena is free again when it ends, as that of a TextPass.
  class GenPass {
   public:
    // Embeds the inputs. `time` [H] as embed_time() makes it, in the activations' type. What the
    // evaluations name outlives the pass.
    GenPass(Transformer& transformer, Arena& arena, std::span<const Evaluation> evaluations,
            View time);
    ~GenPass();
    // Up to and including this layer, which needs the text's keys and values of the same layer.
    void advance_to(int layer);
    // Hidden states [padded rows of this rank, H] of an evaluation after the layer that was last
    // advanced to, before all layers those of the embedding.
    MutView hidden(size_t evaluation) const;
    // The final norm and the heads, applied to the hidden states as they are now: writes the
    // outputs of every evaluation.
    void finish();

   private:
    struct State;
    std::unique_ptr<State> state_;
  };

 private:
  void embed(Arena& arena, MutView x, const GenInput& in, View time, const Sequence& sequence);
  void embed_share(Arena& arena, MutView x, const GenInput& in, View time,
                   const Attention& attention);
  void embed_vision(Arena& arena, MutView x, const VisionItem& item, View time);
  void read_heads(Arena& arena, const GenOutput& out, const GenInput& in, View x,
                  const Attention& attention);
  View head_rows(Arena& arena, const GenOutput& out, const GenInput& in, View x,
                 const Attention& attention);
  // The weights of a layer, in place for the calls that follow.
  const TowerLayer& layer_of(Tower tower, int layer);
  Norm norm() const;

  Backend& backend_;
  TransformerConfig config_;
  DType dtype_;
  std::unique_ptr<TransformerWeights> weights_;
  std::array<LayerStream*, 2> streams_{};  // by tower
};

}  // namespace orrery
