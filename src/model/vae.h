// The Wan 2.2 type video autoencoder: encode to normalised latents, decode to pixels, in causal
// chunks with temporal caches, whole or in spatial tiles. docs/vae.md explains the network and its
// memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "base/json.h"
#include "dist/communicator.h"
#include "model/weight_list.h"

namespace orrery {

struct VaeConfig {
  int64_t base_dim = 96;
  int64_t decoder_base_dim = 96;
  int64_t z_dim = 16;
  std::vector<int64_t> dim_mult{1, 2, 4, 4};
  int64_t num_res_blocks = 2;
  std::vector<bool> temporal_downsample{false, true, true};
  int64_t in_channels = 3, out_channels = 3;  // after patchify: 3 * patch_size^2
  int64_t patch_size = 1;
  int64_t scale_factor_temporal = 4, scale_factor_spatial = 8;
  std::vector<float> latents_mean, latents_std;  // z_dim each

  // Refuses architecture values it does not know, and contradictions, by name. Keys that no
  // architecture value hides behind are ignored.
  static VaeConfig from_json(const Json& config);

  int64_t latent_frames(int64_t frames) const { return (frames - 1) / scale_factor_temporal + 1; }
  int64_t decoded_frames(int64_t latent_frames) const {
    return (latent_frames - 1) * scale_factor_temporal + 1;
  }
};

// Spatial tiles as the reference cuts and blends them. Both numbers are multiples of
// scale_factor_spatial, and stride <= tile. Sizes that a tile covers are not cut.
struct VaeTiling {
  bool enabled = false;
  int64_t tile = 256;    // decode: pixels; encode: patchified pixels, as in the reference
  int64_t stride = 192;  // likewise
};

struct VaeOptions {
  DType dtype = DType::f32;  // of activations and caches: f32 or bf16
  // Latent frames worked on at a time after the first, which always goes alone. 0: as many as keep
  // a chunk's activations small. Changes the result by no more than the order of summation does.
  int64_t decode_chunk = 0;
  int64_t encode_chunk = 0;
  // What upsampling makes before it is put in place, at most about this much at once, a frame at
  // least.
  int64_t upsample_bytes = int64_t{512} << 20;
};

// Decoded frames that follow each other, on the backend; the views are valid during the call that
// hands them over.
struct FrameGroup {
  View pixels;  // f32 [frames, H, W, 3], clamped to [-1, 1]
  View bytes;   // u8, the same in [0, 255]
};

struct VaeWeights;
struct DoublingWeights;

// Immutable after construction and loading; one per backend. Calls take an arena for activations
// and caches; the control flow of a call depends on shapes only, so a dry run sizes the arena
// exactly.
class Vae {
 public:
  Vae(Backend& backend, VaeConfig config, const VaeOptions& options = {});
  ~Vae();
  const VaeConfig& config() const { return config_; }
  void visit(WeightVisitor& visitor);  // lists encoder and decoder tensors

  // pixels [3, T, H, W] f32 in [-1, 1] on the backend (any strides), T = 4n + 1. latents
  // [z, n + 1, h, w] f32, contiguous: the posterior mean, normalised unless `raw`. Throws
  // Error{numeric} naming the latent that is not finite. `pause` as in decode().
  using Pause = std::function<void()>;
  void encode(Arena& arena, MutView latents, View pixels, const VaeTiling& tiling, bool raw = false,
              const Pause& pause = {});

  // latents [z, T, h, w] f32 normalised, contiguous, on the backend. Each finished group of frames
  // is handed to `sink` in order. A tiled decode hands over nothing before the last tile is done. A
  // dry run does not call `sink`. Throws Error{numeric} naming the latent or the frame that is not
  // finite.
  //
  // `ranks`: a group that decodes the same latents together, each rank some rows: every rank calls,
  // and one without a `sink` only helps. When shares_decode() says no, a call decodes by itself.
  //
  // `pause` is called after each group of frames, on every rank of the group at the same places. It
  // may throw: the call ends then.
  using FrameSink = std::function<void(const FrameGroup&)>;
  void decode(Arena& arena, View latents, const VaeTiling& tiling, const FrameSink& sink,
              Communicator* ranks = nullptr, const Pause& pause = {});
  // Whether latents of this size are decoded by all ranks: whole frames of as many rows or more.
  bool shares_decode(int64_t height, int64_t width, const VaeTiling& tiling,
                     const Communicator* ranks) const;

 private:
  // One pass of the network over whole frames; `done` gets each chunk's result, channels last.
  using ChunkSink = std::function<void(MutView chunk)>;
  void encode_frames(Arena& arena, View pixels, const ChunkSink& done);
  void decode_frames(Arena& arena, View z, Communicator* ranks, const ChunkSink& done);
  void encode_tiles(Arena& arena, View pixels, const VaeTiling& tiling, const ChunkSink& done,
                    const Pause& pause);
  void decode_tiles(Arena& arena, View z, const VaeTiling& tiling, const ChunkSink& done,
                    const Pause& pause);
  void normalise(MutView latents, View mean);
  void denormalise(MutView z, View latents);
  void make_doublings();
  void check_finite(View latents, const char* what);
  bool cuts_decode(int64_t height, int64_t width, const VaeTiling& tiling) const;

  Backend& backend_;
  VaeConfig config_;
  VaeOptions options_;
  std::unique_ptr<VaeWeights> weights_;
  std::vector<DoublingWeights> doubling_;  // made from weights_ at the first decode
  Tensor one_;                             // 1.0f, broadcast where a constant is added
};

}  // namespace orrery
