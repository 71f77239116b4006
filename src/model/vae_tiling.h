// Cutting a picture into overlapping tiles and putting processed tiles together again, as the
// reference does: linear blending in place with the tile above, then with the one to the left.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "tensor/tensor.h"

namespace orrery {

struct TileSpan {
  int64_t begin = 0;
  int64_t size = 0;
};

// Tiles begin at 0, stride, 2 stride, ... while that is inside; the last ones may be short.
std::vector<TileSpan> tile_spans(int64_t size, int64_t tile, int64_t stride);

// Collects tiles [frames, h, w, C], row by row from the top left, into one picture [frames, H, W,
// C]. Keeps the edges of earlier tiles that later ones blend with; everything lies in the arena.
class Mosaic {
 public:
  // `tile` is the largest tile, `stride` how much of its top left each tile contributes, `columns`
  // the number of tiles in a row.
  Mosaic(Backend& backend, Arena& arena, Shape picture, DType dtype, int64_t tile, int64_t stride,
         int64_t columns);
  // Blends `tile` in place and copies its share into the picture.
  void place(int64_t row, int64_t column, MutView tile);
  MutView picture() const { return picture_; }

 private:
  // `axis` 1: rows, 2: columns. `before` ends where `tile` begins to overlap.
  void blend(MutView tile, View before, int axis);
  View keep_edge(MutView buffer, View tile, int axis);

  Backend& backend_;
  int64_t stride_, overlap_;
  MutView picture_;
  std::vector<MutView> edge_buffers_;  // bottom edge of each column, then the right edge
  std::vector<View> edges_;            // what of them the last tile filled
};

}  // namespace orrery
