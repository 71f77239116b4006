#include "model/vae_tiling.h"

#include <algorithm>

namespace orrery {

std::vector<TileSpan> tile_spans(int64_t size, int64_t tile, int64_t stride) {
  std::vector<TileSpan> spans;
  for (int64_t begin = 0; begin < size; begin += stride) {
    spans.push_back({begin, std::min(tile, size - begin)});
  }
  return spans;
}

Mosaic::Mosaic(Backend& backend, Arena& arena, Shape picture, DType dtype, int64_t tile,
               int64_t stride, int64_t columns)
    : backend_(backend),
      stride_(stride),
      overlap_(tile - stride),
      picture_(arena.make(picture, dtype)) {
  for (int64_t column = 0; column < columns; ++column) {
    edge_buffers_.push_back(arena.make({picture[0], overlap_, tile, picture[3]}, dtype));
  }
  edge_buffers_.push_back(arena.make({picture[0], tile, overlap_, picture[3]}, dtype));
  edges_.resize(edge_buffers_.size());
}

void Mosaic::blend(MutView tile, View before, int axis) {
  const int64_t extent = std::min({before.dim(axis), tile.dim(axis), overlap_});
  for (int64_t i = 0; i < extent; ++i) {
    const float share = static_cast<float>(i) / static_cast<float>(extent);
    MutView line = tile.slice(axis, i, 1);
    backend_.lincomb(line, {{1.0f - share, before.slice(axis, before.dim(axis) - extent + i, 1)},
                            {share, line}});
  }
}

View Mosaic::keep_edge(MutView buffer, View tile, int axis) {
  const int64_t extent = std::min(overlap_, tile.dim(axis)), across = 3 - axis;
  MutView edge = buffer.slice(axis, 0, extent)
                     .slice(static_cast<int>(across), 0, tile.dim(static_cast<int>(across)));
  backend_.copy(edge, tile.slice(axis, tile.dim(axis) - extent, extent));
  return edge;
}

void Mosaic::place(int64_t row, int64_t column, MutView tile) {
  const auto above = static_cast<size_t>(column);
  const size_t left = edges_.size() - 1;
  if (row > 0) blend(tile, edges_[above], 1);
  if (column > 0) blend(tile, edges_[left], 2);
  edges_[above] = keep_edge(edge_buffers_[above], tile, 1);
  edges_[left] = keep_edge(edge_buffers_[left], tile, 2);
  const int64_t height = std::min(stride_, tile.dim(1)), width = std::min(stride_, tile.dim(2));
  backend_.copy(picture_.slice(1, row * stride_, height).slice(2, column * stride_, width),
                tile.slice(1, 0, height).slice(2, 0, width));
}

}  // namespace orrery
