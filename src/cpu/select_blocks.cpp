// Block selection. Cell means are packed like any matrix product; a task ranks the key blocks of
// some query blocks of one list, head by head, and picks at once, so that no score buffer is kept
// unless the caller wants the ranks.
#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <vector>

#include "cpu/ops.h"
#include "cpu/packed.h"

namespace orrery::cpu {

namespace {

// Means over cells of x [S, heads, D], times factor, rounded once to x's type: out [heads, cells,
// D].
void pool(const Context& context, float* out, const View& x, int64_t cell, float factor) {
  const Kernels& kernels = context.kernels;
  const int64_t d = x.dim(2), cells = ceil_div(x.dim(0), cell);
  parallel_ranges(context, x.dim(1) * cells, 64, [&](int64_t begin, int64_t end, int) {
    alignas(64) float buffer[kChunk];
    alignas(64) uint16_t half[kChunk];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % cells * cell, last = std::min(x.dim(0), first + cell);
      for (int64_t d0 = 0; d0 < d; d0 += kChunk) {
        const int64_t n = std::min(kChunk, d - d0);
        float* sum = out + i * d + d0;
        std::fill(sum, sum + n, 0.0f);
        for (int64_t s = first; s < last; ++s) {
          const int64_t element = s * x.stride(0) + i / cells * x.stride(1) + d0;
          kernels.add_scaled(sum, read_row(kernels, buffer, x.data, x.dtype, element, n), 1.0f, n);
        }
        // The mean first, then the factor: two f32 operations, as the contract has them.
        for (int64_t l = 0; l < n; ++l) sum[l] = sum[l] / float(last - first) * factor;
        if (x.dtype == DType::bf16) {
          kernels.to_bf16(half, sum, n);
          kernels.to_f32(sum, half, Stored::bf16, n);
        }
      }
    }
  });
}

// Natural logarithm of the sum of 2^t over rows x columns cell pairs.
float log_sum(const Kernels& kernels, const float* t, int64_t pitch, int64_t rows, int64_t columns,
              float* buffer) {
  constexpr auto kLn2 = std::numbers::ln2_v<float>;
  float top = kernels.max(t, columns);
  for (int64_t r = 1; r < rows; ++r) top = std::max(top, kernels.max(t + r * pitch, columns));
  float sum = 0;
  for (int64_t r = 0; r < rows; ++r) {
    std::copy(t + r * pitch, t + r * pitch + columns, buffer);
    sum += kernels.exp_sum(buffer, kLn2, top * kLn2, columns);
  }
  return top * kLn2 + std::log(sum);
}

// Equal scores go by the position of id times the golden ratio, modulo 1: any number of them is
// spread evenly over the video instead of taken from its start. The product is a bijection, so the
// order is total.
uint32_t spread(int32_t id) { return uint32_t(id) * 2654435769u; }

// ranks (+)= each block's share of the softmax that natural-log scores stand for. `weights` is
// scratch.
void add_shares(const Kernels& kernels, float* ranks, const float* scores, float* weights,
                int64_t blocks, bool first) {
  std::copy(scores, scores + blocks, weights);
  const float sum = kernels.exp_sum(weights, 1.0f, kernels.max(scores, blocks), blocks);
  if (first)
    kernels.scale(ranks, weights, 1.0f / sum, blocks);
  else
    kernels.add_scaled(ranks, weights, 1.0f / sum, blocks);
}

// What every row of lists has in common.
struct Choice {
  BlockGrid grid;
  int64_t budget;  // when no mass is wanted
  double mass;     // of the heads' shares together, or 0
};

// Writes one row's ascending ids and returns how many.
int32_t choose(int32_t* ids, std::vector<int32_t>& order, const float* ranks, const Choice& c) {
  const BlockGrid& grid = c.grid;
  order.resize(size_t(grid.candidates()));
  std::iota(order.begin(), order.end(), int32_t(grid.head_end));
  const bool finite = std::all_of(ranks + grid.head_end, ranks + grid.tail_begin,
                                  [](float rank) { return std::isfinite(rank); });
  const auto better = [&](int32_t a, int32_t b) {
    return ranks[a] != ranks[b] ? ranks[a] > ranks[b] : spread(a) < spread(b);
  };
  auto end = order.begin() + c.budget;
  if (c.mass > 0) {
    end = order.end();
    if (finite) {
      std::sort(order.begin(), order.end(), better);
      double held = std::accumulate(ranks, ranks + grid.head_end, 0.0);
      held = std::accumulate(ranks + grid.tail_begin, ranks + grid.blocks, held);
      for (end = order.begin(); end != order.end() && held < c.mass; ++end) held += ranks[*end];
    }
  } else if (finite && end != order.end()) {
    std::nth_element(order.begin(), end, order.end(), better);
  }
  std::sort(order.begin(), end);
  int32_t* next = ids;
  for (int64_t b = 0; b < grid.head_end; ++b) *next++ = int32_t(b);
  next = std::copy(order.begin(), end, next);
  for (int64_t b = grid.tail_begin; b < grid.blocks; ++b) *next++ = int32_t(b);
  return int32_t(next - ids);
}

}  // namespace

void select_blocks(Context& context, MutView indices, MutView counts, View q, View k,
                   const BlockSelection& selection, MutView scores) {
  const Kernels& kernels = context.kernels;
  const int64_t cell = selection.cells(), heads = q.dim(1), group = heads / k.dim(1), d = q.dim(2);
  const int64_t sharing = selection.heads_per_list, lists = heads / sharing;
  const BlockGrid grid = selection.grid(q.dim(0), k.dim(0));
  const int64_t rows = grid.rows, blocks = grid.blocks;
  const Choice choice{grid, selection.budget(grid.candidates()), selection.mass * double(sharing)};
  const bool keeps_all = selection.keeps_all(grid);

  const auto ids_of = [&](int64_t list, int64_t row) {
    return indices.as<int32_t>() + list * indices.stride(0) + row * indices.stride(1);
  };
  const auto count = [&](int64_t list, int64_t row) -> int32_t& {
    return counts.as<int32_t>()[list * counts.stride(0) + row * counts.stride(1)];
  };
  const auto keep_all = [&](int64_t list, int64_t row) {
    std::iota(ids_of(list, row), ids_of(list, row) + blocks, 0);
    count(list, row) = int32_t(blocks);
  };
  if (keeps_all && !scores) {
    for (int64_t i = 0; i < lists * rows; ++i) keep_all(i / rows, i % rows);
    return;
  }

  const int64_t q_cells = ceil_div(q.dim(0), cell), k_cells = ceil_div(k.dim(0), cell);
  const int64_t cells_a_row = selection.block_q / cell, cells_a_block = selection.block_k / cell;
  const Panels panels(kernels, k_cells);
  // Pooled queries, pooled keys, and the keys packed.
  const int64_t packed_floats = panels.padded() * d;
  float* pooled_q = context.shared.need(heads * q_cells * d + k.dim(1) * k_cells * d);
  float* pooled_k = pooled_q + heads * q_cells * d;
  float* packed = context.values.need(k.dim(1) * packed_floats);
  pool(context, pooled_q, q, cell, selection.scale * std::numbers::log2e_v<float>);
  pool(context, pooled_k, k, cell, 1.0f);
  parallel_tasks(context, k.dim(1) * panels.count(), [&](int64_t task, int) {
    const int64_t head = task / panels.count(), panel = task % panels.count();
    pack_columns(kernels, packed + head * packed_floats + panels.offset(panel, d),
                 panels.width(panel), pooled_k, DType::f32,
                 (head * k_cells + panels.begin(panel)) * d, d, panels.columns(panel), d);
  });

  // A task takes as many query blocks as fill the row tiles; wide blocks go through in pieces of
  // cells.
  const int64_t rows_a_task = std::max<int64_t>(1, kRowStep / cells_a_row);
  const int64_t cell_rows = rows_a_task * cells_a_row;
  const int64_t padded_rows = ceil_div(cell_rows, kRowStep) * kRowStep;
  const int64_t pitch = panels.padded();
  context.per_thread.need_each(context.threads,
                               padded_rows * pitch + cells_a_block + (rows_a_task + 2) * blocks);
  std::vector<std::vector<int32_t>> orders(static_cast<size_t>(context.threads));
  std::vector<std::vector<const float*>> pointers(static_cast<size_t>(context.threads),
                                                  std::vector<const float*>(size_t(padded_rows)));
  for (auto& order : orders) order.reserve(size_t(grid.candidates()));
  const int64_t tasks = ceil_div(rows, rows_a_task);
  parallel_tasks(context, lists * tasks, [&](int64_t task, int thread) {
    const int64_t list = task / tasks, first = task % tasks * rows_a_task;
    const int64_t cells = std::min(cell_rows, q_cells - first * cells_a_row);
    const int64_t last = std::min(rows, first + rows_a_task);
    float* t = context.per_thread.of(thread);
    float* buffer = t + padded_rows * pitch;
    float* row_scores = buffer + cells_a_block;
    float* weights = row_scores + blocks;
    float* ranks = weights + blocks;
    auto& row = pointers[size_t(thread)];
    for (int64_t head = list * sharing; head < (list + 1) * sharing; ++head) {
      for (int64_t i = 0; i < padded_rows; ++i) {
        row[size_t(i)] =
            pooled_q + (head * q_cells + first * cells_a_row + std::min(i, cells - 1)) * d;
      }
      multiply(kernels, t, pitch, row.data(), cells, packed + head / group * packed_floats, d,
               panels, 0, panels.count(), 0, d, false);
      for (int64_t r = 0; r < last - first; ++r) {
        const int64_t cell_begin = r * cells_a_row;
        const int64_t cell_count = std::min(cells_a_row, cells - cell_begin);
        float* of_row = ranks + r * blocks;
        float* to = selection.ranks_by_share() ? row_scores : of_row;
        for (int64_t b = 0; b < blocks; ++b) {
          const int64_t k_begin = b * cells_a_block,
                        k_count = std::min(cells_a_block, k_cells - k_begin);
          to[b] = log_sum(kernels, t + cell_begin * pitch + k_begin, pitch, cell_count, k_count,
                          buffer);
        }
        if (to != of_row) {
          add_shares(kernels, of_row, row_scores, weights, blocks, head == list * sharing);
        }
      }
    }
    for (int64_t r = first; r < last; ++r) {
      const float* of_row = ranks + (r - first) * blocks;
      if (scores)
        finish_row(kernels, of_row, scores.mut(), scores.dtype,
                   list * scores.stride(0) + r * scores.stride(1), blocks, scores.stride(2));
      if (keeps_all || grid.is_dense(r)) {
        keep_all(list, r);
      } else {
        count(list, r) = choose(ids_of(list, r), orders[size_t(thread)], of_row, choice);
      }
    }
  });
}

}  // namespace orrery::cpu
