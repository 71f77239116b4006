// What a run sends through the VAE and the sound decoder.
#include <algorithm>

#include "base/error.h"
#include "engine/run.h"
#include "engine/transfer.h"

namespace orrery {

namespace {

// Takes the decoded frames of one chunk: as bytes to the caller, without those that repeat the
// chunk before and those past the end; the last ones as they are for the next chunk.
class ChunkFrames {
 public:
  ChunkFrames(Backend& backend, const Settings& settings, int64_t chunk, const RunHooks& hooks)
      : backend_(backend),
        hooks_(hooks),
        plane_(settings.height * settings.width),
        begin_(repeated_frames(settings, chunk)),
        end_(begin_ + fresh_frames(settings, chunk)) {}

  // Keeps what the causal encoder reads of the last `frames` of `decoded` ones.
  void keep(int64_t decoded, int64_t frames) {
    kept_begin_ = decoded - frames;
    kept_count_ = (frames - 1) / 4 * 4 + 1;
    kept_.resize(static_cast<size_t>(3 * kept_count_ * plane_));
  }

  void take(const FrameGroup& group) {
    const int64_t count = group.pixels.dim(0);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = taken_ + i - kept_begin_;
      if (at >= 0 && at < kept_count_) keep_frame(group.pixels.select(0, i), at);
    }
    const int64_t first = std::max(begin_, taken_), last = std::min(end_, taken_ + count);
    taken_ += count;
    if (!hooks_.frames || first >= last) return;
    host_.resize(static_cast<size_t>((last - first) * plane_ * 3));
    const View fresh = group.bytes.slice(0, first - (taken_ - count), last - first);
    backend_.download(make_mut_view(host_.data(), fresh.shape, DType::u8), fresh);
    hooks_.frames(host_.data(), last - first);
    if (hooks_.unit) hooks_.unit(last - begin_);
  }
  std::vector<float> kept() { return std::move(kept_); }

 private:
  // Frame [H, W, 3] to planar [3, kept, H, W].
  void keep_frame(View frame, int64_t at) {
    std::vector<float> pixels(static_cast<size_t>(frame.numel()));
    backend_.download(make_mut_view(pixels.data(), frame.shape, DType::f32), frame);
    for (int64_t p = 0; p < plane_; ++p) {
      for (int64_t c = 0; c < 3; ++c) {
        kept_[static_cast<size_t>((c * kept_count_ + at) * plane_ + p)] =
            pixels[static_cast<size_t>(p * 3 + c)];
      }
    }
  }

  Backend& backend_;
  const RunHooks& hooks_;
  int64_t plane_;
  int64_t begin_, end_;  // frames of the result
  int64_t taken_ = 0;
  int64_t kept_begin_ = 0, kept_count_ = 0;
  std::vector<uint8_t> host_;
  std::vector<float> kept_;
};

}  // namespace

// Latents of the whole canvas; `pixels` planar [3, frames, H, W], empty in a dry run.
Tensor Run::encode_clip(std::span<const float> pixels, int64_t frames) {
  const VaeConfig& vae = networks_.vae.config();
  const int64_t h = settings_.canvas_height, w = settings_.canvas_width;
  Tensor input = backend_.allocate_tensor({3, frames, h, w}, DType::f32);
  upload(input.view, pixels);
  Tensor canvas =
      backend_.allocate_tensor({vae.z_dim, vae.latent_frames(frames), h / vae.scale_factor_spatial,
                                w / vae.scale_factor_spatial},
                               DType::f32);
  networks_.vae.encode(arena_, canvas.view, input.view, options_.tiling, false,
                       [this] { pause(); });
  return canvas;
}

// Controls and what is fixed of a chunk: frames of the given image or video, or those carried over.
void Run::encode(int64_t chunk) {
  clean_ = {};
  if (settings_.transfer) {
    for (size_t i = 0; i < controls_.size(); ++i) {
      std::vector<float> pixels;
      if (request_ != nullptr)
        pixels = control_pixels(*request_, settings_, i, chunk, options_.num_threads);
      controls_[i] = encode_clip(pixels, settings_.transfer->chunk);
    }
    conditioning_ = chunk_conditioning(settings_, chunk, networks_.vae.config());
  }
  if (conditioning_.encoded_frames == 0) return;
  std::vector<float> pixels;
  if (chunk > 0)
    pixels = std::move(carried_);
  else if (request_ != nullptr)
    pixels = conditioning_pixels(*request_, settings_);
  const Tensor canvas = encode_clip(pixels, conditioning_.encoded_frames);
  const View& z = canvas.view;
  clean_ = backend_.allocate_tensor(
      {z.dim(0), z.dim(1), settings_.latent_height, settings_.latent_width}, DType::f32);
  backend_.copy(clean_.view,
                z.slice(2, 0, settings_.latent_height).slice(3, 0, settings_.latent_width));
}

bool Run::shares_decode() const {
  return networks_.vae.shares_decode(settings_.latent_height, settings_.latent_width,
                                     options_.tiling, everyone());
}

bool Run::continues(int64_t chunk) const {
  return settings_.transfer && settings_.transfer->conditional > 0 &&
         chunk + 1 < settings_.chunks();
}

void Run::decode(int64_t chunk, const RunHooks& hooks) {
  backend_.forget_replays();  // they hold on to the backend's scratch memory
  ChunkFrames made(backend_, settings_, chunk, hooks);
  if (continues(chunk)) made.keep(settings_.transfer->chunk, settings_.transfer->conditional);
  Vae::FrameSink sink;
  if (hooks.frames || continues(chunk)) sink = [&](const FrameGroup& group) { made.take(group); };
  networks_.vae.decode(arena_, vision_.sample.view, options_.tiling, sink, everyone(),
                       [this] { pause(); });
  carried_ = made.kept();
}

// [channels][samples]: whole latent frames of sound.
std::vector<std::vector<float>> Run::decode_sound() {
  const SoundConfig& config = networks_.sound->config();
  const int64_t samples = config.hop_size * settings_.sound_frames;
  std::vector<float> host(static_cast<size_t>(config.out_channels * samples));
  networks_.sound->decode(arena_,
                          make_mut_view(host.data(), {config.out_channels, samples}, DType::f32),
                          sound_.sample.view);
  std::vector<std::vector<float>> channels;
  for (int64_t c = 0; c < config.out_channels; ++c) {
    channels.emplace_back(host.begin() + c * samples, host.begin() + (c + 1) * samples);
  }
  return channels;
}

}  // namespace orrery
