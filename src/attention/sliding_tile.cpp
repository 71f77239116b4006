#include <algorithm>
#include <utility>
#include <vector>

#include "attention/block_rule.h"
#include "base/error.h"

namespace orrery {

namespace {

// Tiles of the stored token order: each is one run of stored video tokens.
class Tiles {
 public:
  explicit Tiles(const Sequence& sequence) : grid_(sequence.grid) {
    const std::array<int64_t, 3> frame{1, sequence.grid[1], sequence.grid[2]};
    tile_ = sequence.order.raster() ? frame : sequence.order.tile;
    for (size_t a = 0; a < 3; ++a) count_[a] = (grid_[a] + tile_[a] - 1) / tile_[a];
    begin_.reserve(static_cast<size_t>(size()) + 1);
    begin_.push_back(0);
    for (int64_t t = 0; t < count_[0]; ++t) {
      for (int64_t h = 0; h < count_[1]; ++h) {
        for (int64_t w = 0; w < count_[2]; ++w) {
          begin_.push_back(begin_.back() + extent(0, t) * extent(1, h) * extent(2, w));
        }
      }
    }
  }

  int64_t size() const { return count_[0] * count_[1] * count_[2]; }
  int64_t begin(int64_t tile) const { return begin_[static_cast<size_t>(tile)]; }
  int64_t holding(int64_t token) const {
    return std::upper_bound(begin_.begin(), begin_.end(), token) - begin_.begin() - 1;
  }

  // visit(tile) for every tile of the window around `centre`, shifted inwards at the borders so
  // that it keeps its size.
  template <typename Visit>
  void window(int64_t centre, const std::array<int64_t, 3>& window, const Visit& visit) const {
    const std::array<int64_t, 3> at{centre / (count_[1] * count_[2]),
                                    centre / count_[2] % count_[1], centre % count_[2]};
    std::array<int64_t, 3> from{}, to{};
    for (size_t a = 0; a < 3; ++a) {
      const int64_t size = std::min(window[a], count_[a]);
      from[a] = std::clamp<int64_t>(at[a] - window[a] / 2, 0, count_[a] - size);
      to[a] = from[a] + size;
    }
    for (int64_t t = from[0]; t < to[0]; ++t) {
      for (int64_t h = from[1]; h < to[1]; ++h) {
        for (int64_t w = from[2]; w < to[2]; ++w) visit((t * count_[1] + h) * count_[2] + w);
      }
    }
  }

 private:
  int64_t extent(size_t axis, int64_t index) const {
    return std::min(tile_[axis], grid_[axis] - index * tile_[axis]);
  }

  std::array<int64_t, 3> grid_, tile_{}, count_{};
  std::vector<int64_t> begin_;  // stored video token where each tile starts, and the end
};

class SlidingTile final : public AttentionMethod {
 public:
  SlidingTile(BlockSparseOptions options, std::array<int64_t, 3> window)
      : options_(std::move(options)), window_(window) {}
  std::string description() const override {
    return options_.describe(
        "sliding_tile", concat("window ", window_[0], "x", window_[1], "x", window_[2], " tiles"));
  }

  PlannedAttention plan(const AttentionCall& call) const override {
    const BlockGrid grid = rule_of(call, options_).grid(call.q.dim(0), call.k.dim(0));
    PlannedAttention planned = plan_all(call, options_, grid);
    if (grid.candidates() == 0) return planned;

    // One list for all heads, the same at every layer and step.
    Selection& selection = call.selections.for_request(call, *this, {1, grid.rows, grid.blocks});
    if (selection.stale) select(call, grid, selection);
    planned.kept_blocks = selection.kept;
    if (selection.kept < planned.all_blocks) {
      planned.mask = selection.mask(options_.block_q, options_.block_k);
    }
    return planned;
  }

 private:
  void select(const AttentionCall& call, const BlockGrid& grid, Selection& selection) const {
    const Tiles tiles(call.sequence);
    const Tensor indices = allocate_host_tensor(selection.indices.shape, DType::i32);
    const Tensor counts = allocate_host_tensor(selection.counts.shape, DType::i32);
    std::fill_n(indices.view.as<int32_t>(), indices.view.numel(), 0);
    selection.kept = 0;
    for (int64_t row = 0; row < grid.rows; ++row) {
      const std::vector<bool> seen = blocks_of(call, grid, tiles, row);
      int32_t* list = indices.view.as<int32_t>() + row * grid.blocks;
      int32_t count = 0;
      for (int64_t block = 0; block < grid.blocks; ++block) {
        if (seen[static_cast<size_t>(block)]) list[count++] = static_cast<int32_t>(block);
      }
      counts.view.as<int32_t>()[row] = count;
      selection.kept += call.q.dim(1) * count;
    }
    call.backend.upload(selection.indices, indices.view);
    call.backend.upload(selection.counts, counts.view);
    selection.stale = false;
  }

  std::vector<bool> blocks_of(const AttentionCall& call, const BlockGrid& grid, const Tiles& tiles,
                              int64_t row) const {
    std::vector<bool> seen(static_cast<size_t>(grid.blocks));
    for (int64_t block = 0; block < grid.blocks; ++block) {
      seen[static_cast<size_t>(block)] = grid.is_dense(row) || grid.is_protected(block);
    }
    if (grid.is_dense(row)) return seen;
    // A row that is not dense holds video tokens only.
    const int64_t controls = call.sequence.control_tokens;
    const int64_t first = row * options_.block_q - controls;
    const int64_t last = std::min(first + options_.block_q, call.sequence.video_tokens()) - 1;
    for (int64_t tile = tiles.holding(first); tile <= tiles.holding(last); ++tile) {
      tiles.window(tile, window_, [&](int64_t neighbour) {
        const int64_t front = call.text + controls;
        const int64_t end = (front + tiles.begin(neighbour + 1) - 1) / options_.block_k;
        for (int64_t b = (front + tiles.begin(neighbour)) / options_.block_k; b <= end; ++b) {
          seen[static_cast<size_t>(b)] = true;
        }
      });
    }
    return seen;
  }

  BlockSparseOptions options_;
  std::array<int64_t, 3> window_;
};

}  // namespace

std::unique_ptr<AttentionMethod> make_sliding_tile(BlockSparseOptions options,
                                                   std::array<int64_t, 3> window) {
  return std::make_unique<SlidingTile>(std::move(options), window);
}

}  // namespace orrery
