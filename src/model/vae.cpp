#include "model/vae.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/error.h"
#include "model/vae_network.h"
#include "model/vae_tiling.h"
#include "model/vae_weights.h"

namespace orrery {

namespace {

// Size of a chunk's widest activation beyond which more frames at a time gain nothing: on the CPU
// they leave its caches, on an accelerator all of it is busy.
constexpr int64_t chunk_bytes(DeviceKind device) {
  return device == DeviceKind::cpu ? int64_t{8} << 20 : int64_t{1} << 30;
}

// Latent frames a chunk, `bytes` each, of `total`; never 0.
int64_t chunk_size(int64_t asked, int64_t bytes, int64_t total, DeviceKind device) {
  if (asked > 0) return asked;
  return std::clamp<int64_t>(chunk_bytes(device) / bytes, 1, std::max<int64_t>(1, total - 1));
}

void check_size(const char* op, const char* name, int64_t value, int64_t factor) {
  const int64_t down = value / factor * factor;
  require(value > 0 && value % factor == 0, op, ": ", name, " ", value, " is not a multiple of ",
          factor, "; use ", down > 0 ? concat(down, " or ") : std::string(), down + factor);
}

void check_tiling(const VaeTiling& tiling, int64_t factor) {
  require(tiling.tile > 0 && tiling.stride > 0 && tiling.stride <= tiling.tile &&
              tiling.tile % factor == 0 && tiling.stride % factor == 0,
          "vae: tiles of ", tiling.tile, " with stride ", tiling.stride,
          ": both must be positive multiples of ", factor,
          " and the stride no larger than the tile");
}

// The frames of a stretch of `total` that chunks of 1, then `size` cut it into.
template <typename Fn>
void for_each_chunk(int64_t total, int64_t size, const Fn& fn) {
  for (int64_t begin = 0; begin < total;) {
    const int64_t frames = begin == 0 ? 1 : std::min(size, total - begin);
    fn(begin, frames);
    begin += frames;
  }
}

int64_t count_chunks(int64_t total, int64_t size) { return 1 + (total - 1 + size - 1) / size; }

// The whole picture [frames, rows * scale, W, C]; `mine` is what this rank has made of it.
MutView join_rows(Backend& backend, Arena& arena, View mine, int64_t rows, int64_t scale,
                  Communicator& ranks) {
  const auto range = [&](int rank) { return rows_of_rank(rows, ranks.size(), rank); };
  const int64_t frames = mine.dim(0), width = mine.dim(2), channels = mine.dim(3);
  const MutView whole = arena.make({frames, rows * scale, width, channels}, mine.dtype);
  Arena::Scope scope(arena);
  const MutView all =
      arena.make({ranks.size(), frames, range(0).count * scale, width, channels}, mine.dtype);
  const MutView block = all.select(0, ranks.rank());
  backend.fill(block.slice(1, mine.dim(1), block.dim(1) - mine.dim(1)), 0.0f);
  backend.copy(block.slice(1, 0, mine.dim(1)), mine);
  if (!backend.is_dry()) ranks.all_gather(all, block);
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const auto [begin, count] = range(rank);
    backend.copy(whole.slice(1, begin * scale, count * scale),
                 all.select(0, rank).slice(1, 0, count * scale));
  }
  return whole;
}

}  // namespace

Vae::Vae(Backend& backend, VaeConfig config, const VaeOptions& options)
    : backend_(backend),
      config_(std::move(config)),
      options_(options),
      weights_(std::make_unique<VaeWeights>(vae_structure(config_))),
      one_(backend.allocate_tensor({1}, DType::f32)) {
  require(options_.dtype == DType::f32 || options_.dtype == DType::bf16, "vae: dtype ",
          name_of(options_.dtype), " is not f32 or bf16");
  require(options_.decode_chunk >= 0 && options_.encode_chunk >= 0, "vae: chunks of ",
          options_.decode_chunk, " and ", options_.encode_chunk, " latent frames; 0 or more are");
  const float one = 1.0f;
  backend_.upload(one_.view, make_view(&one, {1}, DType::f32));
}

Vae::~Vae() = default;

void Vae::visit(WeightVisitor& visitor) { orrery::visit(*weights_, config_, visitor); }

// latents[c] = (mean[c] - M[c]) * (1 / S[c]), the reciprocal rounded as in the reference.
void Vae::normalise(MutView latents, View mean) {
  const View one = one_.view.reshape({1, 1, 1})
                       .expand(0, mean.dim(0))
                       .expand(1, mean.dim(1))
                       .expand(2, mean.dim(2));
  for (int64_t c = 0; c < config_.z_dim; ++c) {
    const auto i = static_cast<size_t>(c);
    const float inverse = 1.0f / config_.latents_std[i];
    backend_.lincomb(latents.select(0, c),
                     {{inverse, mean.select(3, c)}, {-config_.latents_mean[i] * inverse, one}});
  }
}

// z[c] = latents[c] / (1 / S[c]) + M[c]
void Vae::denormalise(MutView z, View latents) {
  const View one =
      one_.view.reshape({1, 1, 1}).expand(0, z.dim(0)).expand(1, z.dim(1)).expand(2, z.dim(2));
  for (int64_t c = 0; c < config_.z_dim; ++c) {
    const auto i = static_cast<size_t>(c);
    const float inverse = 1.0f / config_.latents_std[i];
    backend_.lincomb(z.select(3, c),
                     {{1.0f / inverse, latents.select(0, c)}, {config_.latents_mean[i], one}});
  }
}

void Vae::check_finite(View latents, const char* what) {
  if (backend_.all_finite(latents)) return;
  Tensor host = allocate_host_tensor(latents.shape, DType::f32);
  backend_.download(host.view, latents);
  const float* values = host.view.as<float>();
  const int64_t area = latents.dim(2) * latents.dim(3);
  for (int64_t i = 0; i < latents.numel(); ++i) {
    require(std::isfinite(values[i]), ErrorKind::numeric, what, ": latent channel ",
            i / (area * latents.dim(1)), ", frame ", i / area % latents.dim(1), " holds ",
            values[i], " at row ", i % area / latents.dim(3), ", column ", i % latents.dim(3),
            "; the picture would be black");
  }
}

// --- one stretch of frames ----------------------------------------------------------------------

void Vae::encode_frames(Arena& arena, View pixels, const ChunkSink& done) {
  const int64_t patch = config_.patch_size;
  const int64_t height = pixels.dim(2) / patch, width = pixels.dim(3) / patch;
  const int64_t step = config_.scale_factor_temporal;
  const int64_t total = config_.latent_frames(pixels.dim(1));
  const int64_t bytes = step * height * width * config_.base_dim * size_of(options_.dtype);
  const int64_t chunk = chunk_size(options_.encode_chunk, bytes, total, backend_.device());
  Arena::Scope scope(arena);
  VaePass pass(backend_, arena, options_.dtype, weights_->encoder, VaePass::Half::encoder, height,
               width, count_chunks(total, chunk));
  for_each_chunk(total, chunk, [&](int64_t begin, int64_t latents) {
    Arena::Scope chunk_scope(arena);
    const int64_t first = begin == 0 ? 0 : 1 + (begin - 1) * step;
    const int64_t frames = begin == 0 ? 1 : latents * step;
    MutView moments = arena.make(pass.output_shape(frames), options_.dtype);
    pass.run(moments, frames, [&](MutView input) {
      // Channels: colour slowest, then the column of the patch, then its row.
      const View part = pixels.slice(1, first, frames);
      backend_.copy(
          input.reshape({frames, height, width, 3, patch, patch}),
          part.reshape({3, frames, height, patch, width, patch}).permute({1, 2, 4, 0, 5, 3}));
    });
    // The other half of the rows makes the logarithm of the variance, which nothing uses.
    const int64_t z = config_.z_dim;
    MutView mean = arena.make({latents, moments.dim(1), moments.dim(2), z}, options_.dtype);
    backend_.linear(mean.reshape({-1, z}), moments.reshape({-1, 2 * z}),
                    weights_->quant.weight.reshape({2 * z, 2 * z}).slice(0, 0, z),
                    {.bias = weights_->quant.bias.slice(0, 0, z)});
    done(mean);
  });
}

void Vae::make_doublings() {
  if (!doubling_.empty()) return;
  for (const LevelWeights& level : weights_->decoder.levels) {
    doubling_.push_back(level.resamples ? make_doubling(backend_, level.resample, options_.dtype)
                                        : DoublingWeights{});
  }
}

void Vae::decode_frames(Arena& arena, View z, Communicator* ranks, const ChunkSink& done) {
  const int64_t total = z.dim(0), rows = z.dim(1), channels = z.dim(3);
  const int64_t scale = config_.scale_factor_spatial / config_.patch_size;
  // Of the rank with the most rows: all must agree.
  const int64_t most = ranks != nullptr ? rows_of_rank(rows, ranks->size(), 0).count : rows;
  const int64_t bytes = config_.scale_factor_temporal * most * z.dim(2) * scale * scale *
                        config_.decoder_base_dim * size_of(options_.dtype);
  const int64_t chunk = chunk_size(options_.decode_chunk, bytes, total, backend_.device());
  Arena::Scope scope(arena);
  make_doublings();
  VaePass pass(backend_, arena, options_.dtype, weights_->decoder, VaePass::Half::decoder, rows,
               z.dim(2), count_chunks(total, chunk), doubling_, ranks, options_.upsample_bytes);
  for_each_chunk(total, chunk, [&](int64_t begin, int64_t latents) {
    Arena::Scope chunk_scope(arena);
    MutView frames = arena.make(pass.output_shape(latents), options_.dtype);
    pass.run(frames, latents, [&](MutView input) {
      backend_.linear(input.reshape({-1, channels}),
                      z.slice(0, begin, latents).reshape({-1, channels}),
                      weights_->post_quant.weight.reshape({channels, channels}),
                      {.bias = weights_->post_quant.bias});
    });
    done(ranks != nullptr ? join_rows(backend_, arena, frames, rows, scale, *ranks) : frames);
  });
}

// --- tiles ---------------------------------------------------------------------------------------

void Vae::encode_tiles(Arena& arena, View pixels, const VaeTiling& tiling, const ChunkSink& done,
                       const Pause& pause) {
  const int64_t patch = config_.patch_size, factor = config_.scale_factor_spatial;
  const int64_t to_latent = factor / patch;
  const auto rows = tile_spans(pixels.dim(2) / patch, tiling.tile, tiling.stride);
  const auto columns = tile_spans(pixels.dim(3) / patch, tiling.tile, tiling.stride);
  const int64_t total = config_.latent_frames(pixels.dim(1));
  Arena::Scope scope(arena);
  Mosaic mosaic(backend_, arena,
                {total, pixels.dim(2) / factor, pixels.dim(3) / factor, config_.z_dim},
                options_.dtype, tiling.tile / to_latent, tiling.stride / to_latent,
                static_cast<int64_t>(columns.size()));
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t j = 0; j < columns.size(); ++j) {
      Arena::Scope tile_scope(arena);
      MutView tile =
          arena.make({total, rows[i].size / to_latent, columns[j].size / to_latent, config_.z_dim},
                     options_.dtype);
      int64_t at = 0;
      const View part = pixels.slice(2, rows[i].begin * patch, rows[i].size * patch)
                            .slice(3, columns[j].begin * patch, columns[j].size * patch);
      encode_frames(arena, part, [&](MutView chunk) {
        backend_.copy(tile.slice(0, at, chunk.dim(0)), chunk);
        at += chunk.dim(0);
        if (pause) pause();
      });
      mosaic.place(static_cast<int64_t>(i), static_cast<int64_t>(j), tile);
    }
  }
  done(mosaic.picture());
}

void Vae::decode_tiles(Arena& arena, View z, const VaeTiling& tiling, const ChunkSink& done,
                       const Pause& pause) {
  const int64_t factor = config_.scale_factor_spatial, from_latent = factor / config_.patch_size;
  const auto rows = tile_spans(z.dim(1), tiling.tile / factor, tiling.stride / factor);
  const auto columns = tile_spans(z.dim(2), tiling.tile / factor, tiling.stride / factor);
  const int64_t total = config_.decoded_frames(z.dim(0));
  Arena::Scope scope(arena);
  Mosaic mosaic(backend_, arena,
                {total, z.dim(1) * from_latent, z.dim(2) * from_latent, config_.out_channels},
                options_.dtype, tiling.tile / config_.patch_size,
                tiling.stride / config_.patch_size, static_cast<int64_t>(columns.size()));
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t j = 0; j < columns.size(); ++j) {
      Arena::Scope tile_scope(arena);
      MutView part =
          arena.make({z.dim(0), rows[i].size, columns[j].size, z.dim(3)}, options_.dtype);
      backend_.copy(
          part,
          z.slice(1, rows[i].begin, rows[i].size).slice(2, columns[j].begin, columns[j].size));
      MutView tile = arena.make(
          {total, rows[i].size * from_latent, columns[j].size * from_latent, config_.out_channels},
          options_.dtype);
      int64_t at = 0;
      decode_frames(arena, part, nullptr, [&](MutView chunk) {
        backend_.copy(tile.slice(0, at, chunk.dim(0)), chunk);
        at += chunk.dim(0);
        if (pause) pause();
      });
      mosaic.place(static_cast<int64_t>(i), static_cast<int64_t>(j), tile);
    }
  }
  done(mosaic.picture());
}

// --- whole calls ---------------------------------------------------------------------------------

void Vae::encode(Arena& arena, MutView latents, View pixels, const VaeTiling& tiling, bool raw,
                 const Pause& pause) {
  constexpr const char* kOp = "vae encode";
  require(pixels.rank() == 4 && pixels.dim(0) == 3 && pixels.dtype == DType::f32, kOp,
          ": pixels are ", pixels.shape, " ", name_of(pixels.dtype),
          ", expected [3, frames, height, width] f32");
  const int64_t step = config_.scale_factor_temporal, factor = config_.scale_factor_spatial;
  const int64_t total = pixels.dim(1);
  const int64_t below = std::max<int64_t>(0, total - 1) / step * step + 1;
  require(total > 0 && (total - 1) % step == 0, kOp, ": ", total, " frames, expected ", step,
          "n + 1: use ", below, total > 0 ? concat(" or ", below + step) : std::string());
  check_size(kOp, "height", pixels.dim(2), factor);
  check_size(kOp, "width", pixels.dim(3), factor);
  const Shape expected{config_.z_dim, config_.latent_frames(total), pixels.dim(2) / factor,
                       pixels.dim(3) / factor};
  require(latents.shape == expected && latents.dtype == DType::f32 && latents.contiguous(), kOp,
          ": latents are ", latents.shape, " ", name_of(latents.dtype), ", expected contiguous ",
          expected, " f32");
  if (tiling.enabled) check_tiling(tiling, factor);
  const bool tiled = tiling.enabled && (pixels.dim(2) > tiling.tile || pixels.dim(3) > tiling.tile);
  int64_t at = 0;
  const auto store = [&](MutView mean) {
    MutView to = latents.slice(1, at, mean.dim(0));
    at += mean.dim(0);
    if (raw) {
      backend_.copy(to, mean.permute({3, 0, 1, 2}));
    } else {
      normalise(to, mean);
    }
  };
  if (tiled) {
    encode_tiles(arena, pixels, tiling, store, pause);
  } else {
    encode_frames(arena, pixels, [&](MutView mean) {
      store(mean);
      if (pause) pause();
    });
  }
  check_finite(latents, kOp);
}

bool Vae::cuts_decode(int64_t height, int64_t width, const VaeTiling& tiling) const {
  const int64_t limit = tiling.tile / config_.scale_factor_spatial;
  return tiling.enabled && (height > limit || width > limit);
}

bool Vae::shares_decode(int64_t height, int64_t width, const VaeTiling& tiling,
                        const Communicator* ranks) const {
  return ranks != nullptr && ranks->size() > 1 && height >= ranks->size() &&
         !cuts_decode(height, width, tiling);
}

void Vae::decode(Arena& arena, View latents, const VaeTiling& tiling, const FrameSink& sink,
                 Communicator* ranks, const Pause& pause) {
  constexpr const char* kOp = "vae decode";
  require(latents.rank() == 4 && latents.dim(0) == config_.z_dim && latents.numel() > 0 &&
              latents.dtype == DType::f32 && latents.contiguous(),
          kOp, ": latents are ", latents.shape, " ", name_of(latents.dtype),
          ", expected contiguous [", config_.z_dim, ", frames, height, width] f32");
  const int64_t factor = config_.scale_factor_spatial, patch = config_.patch_size;
  if (tiling.enabled) check_tiling(tiling, factor);
  const bool tiled = cuts_decode(latents.dim(2), latents.dim(3), tiling);
  if (!shares_decode(latents.dim(2), latents.dim(3), tiling, ranks)) ranks = nullptr;
  const bool only_helps = ranks != nullptr && !sink && !backend_.is_dry();
  check_finite(latents, kOp);

  Arena::Scope scope(arena);
  MutView z =
      arena.make({latents.dim(1), latents.dim(2), latents.dim(3), config_.z_dim}, options_.dtype);
  denormalise(z, latents);
  int64_t at = 0;
  const auto deliver = [&](MutView chunk) {
    if (only_helps) return;
    Arena::Scope chunk_scope(arena);
    const int64_t frames = chunk.dim(0), height = chunk.dim(1), width = chunk.dim(2);
    MutView pixels = arena.make({frames, height * patch, width * patch, 3}, DType::f32);
    backend_.copy(
        pixels.reshape({frames, height, patch, width, patch, 3}),
        chunk.reshape({frames, height, width, 3, patch, patch}).permute({0, 1, 5, 2, 4, 3}));
    if (!backend_.all_finite(pixels)) {
      int64_t frame = 0;
      while (backend_.all_finite(pixels.slice(0, frame, 1))) ++frame;
      fail(
          ErrorKind::numeric, kOp, ": frame ", at + frame,
          " is not finite although its latents are; ",
          options_.dtype == DType::bf16 ? "decode in f32" : "the weights do not fit these latents");
    }
    backend_.clamp(pixels, -1, 1);
    const MutView bytes = arena.make(pixels.shape, DType::u8);
    backend_.to_bytes(bytes, pixels);
    if (backend_.is_dry()) return;
    at += frames;
    sink({pixels, bytes});
  };
  if (tiled) {
    // All frames of the picture at once are too many for one conversion buffer.
    decode_tiles(
        arena, z, tiling,
        [&](MutView picture) {
          for_each_chunk(
              picture.dim(0), config_.scale_factor_temporal,
              [&](int64_t begin, int64_t frames) { deliver(picture.slice(0, begin, frames)); });
        },
        pause);
  } else {
    decode_frames(arena, z, ranks, [&](MutView chunk) {
      deliver(chunk);
      if (pause) pause();
    });
  }
}

}  // namespace orrery
