// The two ends of the generation tower: latents, sound and actions to hidden states, and back to
// velocities.
#include <algorithm>

#include "base/error.h"
#include "model/tower_layer.h"

namespace orrery {

namespace {

// Calls fn(begin, count) for each run of equal `wanted` flags.
template <typename Fn>
void for_runs(const std::vector<bool>& flags, bool wanted, const Fn& fn) {
  for (size_t i = 0; i < flags.size();) {
    size_t end = i;
    while (end < flags.size() && flags[end] == flags[i]) ++end;
    if (flags[i] == wanted) fn(static_cast<int64_t>(i), static_cast<int64_t>(end - i));
    i = end;
  }
}

bool any(const std::vector<bool>& flags) {
  return std::find(flags.begin(), flags.end(), true) != flags.end();
}

// A latent [C, T, h, w] whose spatial sizes are multiples of p, as patches [T, Hp, Wp, p, p, C]:
// channel fastest, then column and row within the patch.
View patches_of(const View& latent, int64_t p) {
  const int64_t c = latent.dim(0), t = latent.dim(1), rows = latent.dim(2) / p,
                columns = latent.dim(3) / p;
  return latent.reshape({c, t, rows, p, columns, p}).permute({1, 2, 4, 3, 5, 0});
}

}  // namespace

// Writes the item's tokens, raster order, to x [T Hp Wp, H].
void Transformer::embed_vision(Arena& arena, MutView x, const VisionItem& item, View time) {
  Arena::Scope scope(arena);
  const View& latent = item.latent;
  const auto [frames, rows, columns] = token_grid(latent.dim(1), latent.dim(2), latent.dim(3));
  const int64_t p = config_.latent_patch_size, c = config_.latent_channel;
  require(latent.dim(0) == c, "transformer: the latent has ", latent.dim(0),
          " channels, the model ", c);
  require(static_cast<int64_t>(item.noisy.size()) == frames, "transformer: ", item.noisy.size(),
          " noise flags for ", frames, " latent frames");
  View padded = latent;
  if (rows * p != latent.dim(2) || columns * p != latent.dim(3)) {
    MutView whole = arena.make({c, frames, rows * p, columns * p}, DType::f32);
    backend_.fill(whole, 0);
    backend_.copy(whole.slice(2, 0, latent.dim(2)).slice(3, 0, latent.dim(3)), latent);
    padded = whole;
  }
  MutView patches = arena.make({frames * rows * columns, p * p * c}, dtype_);
  backend_.copy(patches.reshape({frames, rows, columns, p, p, c}), patches_of(padded, p));
  apply(backend_, x, patches, weights_->proj_in);
  const int64_t per_frame = rows * columns;
  for_runs(item.noisy, true, [&](int64_t begin, int64_t count) {
    backend_.add_row(x.slice(0, begin * per_frame, count * per_frame), time);
  });
}

void Transformer::embed(Arena& arena, MutView x, const GenInput& in, View time,
                        const Sequence& sequence) {
  Arena::Scope scope(arena);
  const int64_t h = config_.hidden_size;
  int64_t row = 0;
  for (const VisionItem& control : in.controls) {
    const auto [t, rows, columns] =
        token_grid(control.latent.dim(1), control.latent.dim(2), control.latent.dim(3));
    embed_vision(arena, x.slice(0, row, t * rows * columns), control, time);
    row += t * rows * columns;
  }
  MutView video = x.slice(0, row, sequence.video_tokens());
  if (sequence.order.raster()) {
    embed_vision(arena, video, in.target, time);
  } else {
    MutView raster = arena.make(video.shape, dtype_);
    embed_vision(arena, raster, in.target, time);
    backend_.gather_rows(video, raster, sequence.permutation());
  }
  row += sequence.video_tokens();

  if (in.sound) {
    const int64_t tokens = in.sound.dim(1);
    MutView part = x.slice(0, row, tokens);
    MutView features = arena.make({tokens, config_.sound_dim}, dtype_);
    backend_.copy(features, in.sound.permute({1, 0}));
    apply(backend_, part, features, weights_->sound_in);
    backend_.add_row(part, weights_->sound_modality);
    backend_.add_row(part, time);
    row += tokens;
  }
  if (in.action) {
    const int64_t tokens = in.action.dim(0), a = config_.action_dim;
    require(in.action_domain >= 0 && in.action_domain < config_.num_embodiment_domains,
            "transformer: action domain ", in.action_domain, " is outside [0, ",
            config_.num_embodiment_domains, ")");
    MutView part = x.slice(0, row, tokens);
    MutView features = arena.make({tokens, a}, dtype_);
    backend_.copy(features, in.action);
    // The stored matrix of a domain is [in, out]: the transpose of other projections.
    LinearOptions options;
    options.bias = weights_->action_in_bias.select(0, in.action_domain);
    backend_.linear(part, features,
                    weights_->action_in.select(0, in.action_domain).reshape({a, h}).permute({1, 0}),
                    options);
    backend_.add_row(part, weights_->action_modality);
    for_runs(in.action_noisy, true, [&](int64_t begin, int64_t count) {
      backend_.add_row(part.slice(0, begin, count), time);
    });
  }
}

// x: this rank's rows of the embedding, padding 0. All of it is computed: it costs little beside a
// layer.
void Transformer::embed_share(Arena& arena, MutView x, const GenInput& in, View time,
                              const Attention& attention) {
  const SequenceShare share = attention.share();
  const int64_t all = attention.sequence().size();
  if (share.rows == all) return embed(arena, x, in, time, attention.sequence());
  Arena::Scope scope(arena);
  MutView whole = arena.make({all, config_.hidden_size}, dtype_);
  embed(arena, whole, in, time, attention.sequence());
  backend_.copy(x.slice(0, 0, share.rows), whole.slice(0, share.begin, share.rows));
  backend_.fill(x.slice(0, share.rows, share.padded_rows - share.rows), 0);
}

// The output heads applied to this rank's rows, then gathered: [sequence, width of the widest
// head]. Each row has its modality's velocity in its first columns. Every modality ends in this one
// gather (B70).
View Transformer::head_rows(Arena& arena, const GenOutput& out, const GenInput& in, View x,
                            const Attention& attention) {
  const Sequence& sequence = attention.sequence();
  const SequenceShare share = attention.share();
  const int64_t h = config_.hidden_size, p = config_.latent_patch_size;
  const int64_t patch = p * p * config_.latent_channel, a = config_.action_dim;
  int64_t width = patch;
  if (in.sound) width = std::max(width, config_.sound_dim);
  if (in.action) width = std::max(width, a);
  MutView mine = arena.make({share.padded_rows, width}, dtype_);
  {
    Arena::Scope scope(arena);
    MutView normed = arena.make(x.shape, dtype_);
    backend_.rms_norm(normed, x, weights_->norm_gen, norm());
    // Calls head(out, x) for this rank's part of the next `tokens` rows of the sequence.
    int64_t row = sequence.control_tokens;
    const auto each = [&](int64_t tokens, int64_t columns, const auto& head) {
      const int64_t begin = std::max(row, share.begin);
      const int64_t end = std::min(row + tokens, share.begin + share.rows);
      row += tokens;
      if (begin >= end) return;
      head(mine.slice(0, begin - share.begin, end - begin).slice(1, 0, columns),
           normed.slice(0, begin - share.begin, end - begin));
    };
    const auto projection = [&](const Linear& linear) {
      return [&](MutView to, View from) { apply(backend_, to, from, linear); };
    };
    const bool moves = out.vision && any(in.target.noisy);
    each(sequence.video_tokens(), patch, [&](MutView to, View from) {
      if (moves) apply(backend_, to, from, weights_->proj_out);
    });
    if (in.sound) each(in.sound.dim(1), config_.sound_dim, projection(weights_->sound_out));
    if (in.action) {
      LinearOptions options;
      options.bias = weights_->action_out_bias.select(0, in.action_domain);
      const View matrix =
          weights_->action_out.select(0, in.action_domain).reshape({h, a}).permute({1, 0});
      each(in.action.dim(0), a,
           [&](MutView to, View from) { backend_.linear(to, from, matrix, options); });
    }
  }
  return attention.whole(arena, mine);
}

void Transformer::read_heads(Arena& arena, const GenOutput& out, const GenInput& in, View x,
                             const Attention& attention) {
  Arena::Scope scope(arena);
  const Sequence& sequence = attention.sequence();
  const int64_t p = config_.latent_patch_size, c = config_.latent_channel;
  const View velocities = head_rows(arena, out, in, x, attention);
  int64_t row = sequence.control_tokens;

  if (out.vision && any(in.target.noisy)) {
    const auto [frames, rows, columns] = sequence.grid;
    View patches = velocities.slice(0, row, sequence.video_tokens()).slice(1, 0, p * p * c);
    if (!sequence.order.raster()) {
      MutView raster = arena.make(patches.shape, dtype_);
      backend_.gather_rows(raster, patches, sequence.inverse_permutation());
      patches = raster;
    }
    MutView whole = out.vision;
    const bool cropped = rows * p != out.vision.dim(2) || columns * p != out.vision.dim(3);
    if (cropped) whole = arena.make({c, frames, rows * p, columns * p}, DType::f32);
    const View latent =
        patches.reshape({frames, rows, columns, p, p, c}).permute({5, 0, 1, 3, 2, 4});
    backend_.copy(whole.reshape({c, frames, rows, p, columns, p}), latent);
    if (cropped) {
      backend_.copy(out.vision,
                    whole.slice(2, 0, out.vision.dim(2)).slice(3, 0, out.vision.dim(3)));
    }
    for_runs(in.target.noisy, false, [&](int64_t begin, int64_t count) {
      backend_.fill(out.vision.slice(1, begin, count), 0);
    });
  } else if (out.vision) {
    backend_.fill(out.vision, 0);
  }
  row += sequence.video_tokens();

  if (in.sound) {
    const int64_t tokens = in.sound.dim(1);
    const View velocity = velocities.slice(0, row, tokens).slice(1, 0, config_.sound_dim);
    backend_.copy(out.sound, velocity.permute({1, 0}));
    row += tokens;
  }
  if (in.action) {
    backend_.copy(out.action,
                  velocities.slice(0, row, in.action.dim(0)).slice(1, 0, config_.action_dim));
    for_runs(in.action_noisy, false, [&](int64_t begin, int64_t count) {
      backend_.fill(out.action.slice(0, begin, count), 0);
    });
  }
}

}  // namespace orrery
