#include "attention/sequence.h"

#include <algorithm>

#include "base/error.h"

namespace orrery {

std::vector<int64_t> Sequence::permutation() const {
  if (order.raster()) return {};
  for (int64_t extent : order.tile) require(extent > 0, "token order: a tile extent is ", extent);
  std::vector<int64_t> stored;
  stored.reserve(static_cast<size_t>(video_tokens()));
  const auto [frames, rows, columns] = grid;
  const auto [tile_t, tile_h, tile_w] = order.tile;
  for (int64_t t0 = 0; t0 < frames; t0 += tile_t) {
    for (int64_t h0 = 0; h0 < rows; h0 += tile_h) {
      for (int64_t w0 = 0; w0 < columns; w0 += tile_w) {
        for (int64_t t = t0; t < std::min(t0 + tile_t, frames); ++t) {
          for (int64_t h = h0; h < std::min(h0 + tile_h, rows); ++h) {
            for (int64_t w = w0; w < std::min(w0 + tile_w, columns); ++w) {
              stored.push_back((t * rows + h) * columns + w);
            }
          }
        }
      }
    }
  }
  return stored;
}

std::vector<int64_t> Sequence::inverse_permutation() const {
  const std::vector<int64_t> stored = permutation();
  std::vector<int64_t> inverse(stored.size());
  for (size_t i = 0; i < stored.size(); ++i) {
    inverse[static_cast<size_t>(stored[i])] = static_cast<int64_t>(i);
  }
  return inverse;
}

SequenceShare Sequence::share(int rank, int ranks) const {
  require(ranks > 0 && rank >= 0 && rank < ranks, "sequence: rank ", rank, " of ", ranks);
  SequenceShare share;
  share.padded_rows = (size() + ranks - 1) / ranks;
  share.begin = std::min(rank * share.padded_rows, size());
  share.rows = std::min(share.padded_rows, size() - share.begin);
  return share;
}

}  // namespace orrery
