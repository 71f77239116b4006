// The generation token stream of one request: what it is made of and in which order video tokens
// are stored. Positions travel with the tokens, so only attention sees the order.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace orrery {

// How video tokens lie in memory: raster (frame, row, column), or in 3-D tiles so that one
// attention block is a compact piece of space-time. A tile of {1, 1, 1} is raster. Tiles at the far
// borders are clipped to the grid; tiles follow one another in raster order, tokens within a tile
// likewise.
struct TokenOrder {
  std::array<int64_t, 3> tile{1, 1, 1};
  bool raster() const { return tile == std::array<int64_t, 3>{1, 1, 1}; }
};

// One rank's part of a sequence that a group shares: every rank has room for padded_rows, of which
// `rows` are real. Only the last ranks have fewer real rows than room.
struct SequenceShare {
  int64_t begin = 0;
  int64_t rows = 0;
  int64_t padded_rows = 0;
};

// [controls | video | sound | action], in this order, as one sequence. Text is not part of it: its
// keys and values stand in front of the generation's.
struct Sequence {
  int64_t control_tokens = 0;
  std::array<int64_t, 3> grid{0, 0, 0};  // target video: frames, rows, columns of tokens
  int64_t sound_tokens = 0;
  int64_t action_tokens = 0;
  TokenOrder order;

  int64_t video_tokens() const { return grid[0] * grid[1] * grid[2]; }
  int64_t tail_tokens() const { return sound_tokens + action_tokens; }
  int64_t size() const { return control_tokens + video_tokens() + tail_tokens(); }
  // permutation()[stored] = raster index within the video tokens; empty when the order is raster.
  std::vector<int64_t> permutation() const;
  // The inverse: inverse_permutation()[raster] = stored index.
  std::vector<int64_t> inverse_permutation() const;
  // Rows [begin, begin + rows) of size() belong to `rank` of `ranks`.
  SequenceShare share(int rank, int ranks) const;
};

}  // namespace orrery
