// The two halves of the VAE as functions over chunks of frames, with the frames each causal
// convolution remembers from one chunk to the next. Activations are [frames, H, W, C].
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "dist/communicator.h"
#include "model/vae_weights.h"
#include "tensor/tensor.h"

namespace orrery {

// The last input frames of one convolution, which the next chunk's input follows.
struct FrameCache {
  MutView frames;  // [2 or 1, H, W, C]
  bool empty = true;
};

// "Double every pixel, then convolve 3x3" as one convolution of the picture as it is. Of the four
// pixels that one becomes, each sees only 2x2 different ones: taps that meet the same pixel are
// summed beforehand, 16 products in place of 36. Place 2 b + d holds the channels of row b, column
// d of a cell; see VaePass::upsample.
struct DoublingWeights {
  Tensor weight;  // [4 C, Cin, 1, 2, 2]
  Tensor bias;    // [4 C]
};

// Sums are made in f32 and rounded to `dtype` once.
DoublingWeights make_doubling(Backend& backend, const ConvWeights& conv, DType dtype);

// Which rows of `rows` rank `rank` of `ranks` works on: every rank one or more, the first ones the
// most.
RowRange rows_of_rank(int64_t rows, int ranks, int rank);

// One stretch of video through one half of the network: feed the first frame alone, then chunks of
// any number of latent frames. Caches lie in the arena for the life of the pass, scratch only for
// the life of a call.
class VaePass {
 public:
  enum class Half { encoder, decoder };

  // H, W: size of the half's input (patchified pixels, or latents). `chunks`: how many are coming;
  // with one, nothing is remembered. `doubling`: of the decoder's levels, empty for those that do
  // not resample. `ranks` (decoder; null: this one): they make a picture together, each its rows
  // from the first level on. Every convolution then sees the rows beside them, which come from the
  // neighbours: no seams. All ranks run the same chunks. `upsample_bytes`: as VaeOptions has it.
  VaePass(Backend& backend, Arena& arena, DType dtype, const HalfWeights& weights, Half half,
          int64_t height, int64_t width, int64_t chunks,
          std::span<const DoublingWeights> doubling = {}, Communicator* ranks = nullptr,
          int64_t upsample_bytes = 0);

  // Allocates nothing that outlives the call: `out` is the caller's, [frames', H', W', C'] as
  // output_shape() says. `write_input` fills the input frames [frames, H, W, in].
  void run(MutView out, int64_t frames, const std::function<void(MutView input)>& write_input);
  Shape output_shape(int64_t frames) const;  // of the chunk that comes next, this rank's rows

 private:
  struct Input;
  FrameCache& take_cache() { return caches_[next_cache_++]; }
  Input open(FrameCache& cache, Shape frames_shape, int64_t halo, MutView room = {}, int place = 0);
  void conv(MutView out, const Input& input, const ConvWeights& weights, View residual = {});
  void keep(const Input& input);
  void fill_halo(MutView rows);

  void norm_silu(MutView out, View x, View gamma);
  void resnet(MutView out, View x, const ResnetWeights& weights, const Input* spent = nullptr,
              MutView room = {});
  void attention(MutView x, const ImageAttentionWeights& weights);
  void middle(MutView x);
  void level_down(MutView out, View x, const LevelWeights& level);
  void level_up(MutView out, View x, const LevelWeights& level, const DoublingWeights* doubling,
                const Input* spent);
  void resnets(MutView out, View x, const LevelWeights& level, const Input* spent = nullptr);
  void downsample(MutView out, View x, const LevelWeights& level);
  void upsample(MutView out, std::initializer_list<View> parts, View x, const LevelWeights& level,
                const DoublingWeights& doubling);
  void upsample_frames(MutView out, View part, View x, const LevelWeights& level,
                       const DoublingWeights& doubling, int64_t a);
  void add_averages(MutView out, View x, const LevelWeights& level);
  Shape level_shape(const Shape& in, const LevelWeights& level) const;
  bool spends_input(size_t level) const;
  void make_caches();

  Backend& backend_;
  Arena& arena_;
  DType dtype_;
  const HalfWeights& weights_;
  Half half_;
  int64_t height_, width_;
  int64_t chunks_left_;
  std::span<const DoublingWeights> doubling_;
  Communicator* ranks_;  // null: this one alone
  int64_t upsample_bytes_;
  RowRange share_;    // of the rows of latents
  int64_t halo_ = 0;  // rows on either side that convolutions find in their input
  bool first_ = true;
  std::vector<FrameCache> caches_;  // in the order they are taken
  size_t next_cache_ = 0;
};

}  // namespace orrery
