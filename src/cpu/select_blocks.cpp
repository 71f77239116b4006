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

// One call: what its tasks share, and memory for each thread.
class Selector {
 public:
  Selector(Context& context, const SelectBlocksArgs& call)
      : context_(context),
        call_(call),
        sharing_(call.selection.heads_per_list),
        lists_(call.q.dim(1) / sharing_),
        d_(call.q.dim(2)),
        grid_(call.selection.grid(call.q.dim(0), call.k.dim(0))),
        choice_{grid_, call.selection.budget(grid_.candidates()),
                call.selection.mass * double(sharing_)},
        keeps_all_(call.selection.keeps_all(grid_)),
        q_cells_(ceil_div(call.q.dim(0), call.selection.cells())),
        k_cells_(ceil_div(call.k.dim(0), call.selection.cells())),
        cells_a_row_(call.selection.block_q / call.selection.cells()),
        cells_a_block_(call.selection.block_k / call.selection.cells()),
        panels_(context.kernels, k_cells_) {}

  void run() {
    if (keeps_all_ && !call_.scores) {
      for (int64_t i = 0; i < lists_ * grid_.rows; ++i) keep_all(i / grid_.rows, i % grid_.rows);
      return;
    }
    pool_and_pack();
    // A task takes as many query blocks as fill the row tiles; wide blocks go through in pieces of
    // cells.
    const int64_t rows_a_task = std::max<int64_t>(1, kRowStep / cells_a_row_);
    padded_rows_ = ceil_div(rows_a_task * cells_a_row_, kRowStep) * kRowStep;
    context_.per_thread.need_each(
        context_.threads,
        padded_rows_ * panels_.padded() + cells_a_block_ + (rows_a_task + 2) * grid_.blocks);
    const auto threads = static_cast<size_t>(context_.threads);
    orders_.resize(threads);
    for (auto& order : orders_) order.reserve(size_t(grid_.candidates()));
    pointers_.assign(threads, std::vector<const float*>(size_t(padded_rows_)));
    const int64_t tasks = ceil_div(grid_.rows, rows_a_task);
    parallel_tasks(context_, lists_ * tasks, [&](int64_t task, int thread) {
      const int64_t list = task / tasks, first = task % tasks * rows_a_task;
      const int64_t last = std::min(grid_.rows, first + rows_a_task);
      const float* ranks = rank(list, first, last, thread);
      for (int64_t row = first; row < last; ++row, ranks += grid_.blocks) {
        write(list, row, ranks, orders_[size_t(thread)]);
      }
    });
  }

 private:
  int32_t* ids_of(int64_t list, int64_t row) const {
    const MutView& ids = call_.indices;
    return ids.as<int32_t>() + list * ids.stride(0) + row * ids.stride(1);
  }
  int32_t& count(int64_t list, int64_t row) const {
    const MutView& counts = call_.counts;
    return counts.as<int32_t>()[list * counts.stride(0) + row * counts.stride(1)];
  }
  void keep_all(int64_t list, int64_t row) const {
    std::iota(ids_of(list, row), ids_of(list, row) + grid_.blocks, 0);
    count(list, row) = int32_t(grid_.blocks);
  }

  // Pooled queries and keys, and the keys packed.
  void pool_and_pack() {
    const int64_t heads = call_.q.dim(1), kv_heads = call_.k.dim(1);
    const int64_t cell = call_.selection.cells();
    packed_floats_ = panels_.padded() * d_;
    pooled_q_ = context_.shared.need(heads * q_cells_ * d_ + kv_heads * k_cells_ * d_);
    float* pooled_k = pooled_q_ + heads * q_cells_ * d_;
    packed_ = context_.values.need(kv_heads * packed_floats_);
    pool(context_, pooled_q_, call_.q, cell, call_.selection.scale * std::numbers::log2e_v<float>);
    pool(context_, pooled_k, call_.k, cell, 1.0f);
    parallel_tasks(context_, kv_heads * panels_.count(), [&](int64_t task, int) {
      const int64_t head = task / panels_.count(), panel = task % panels_.count();
      pack_columns(context_.kernels, packed_ + head * packed_floats_ + panels_.offset(panel, d_),
                   panels_.width(panel), pooled_k, DType::f32,
                   (head * k_cells_ + panels_.begin(panel)) * d_, d_, panels_.columns(panel), d_);
    });
  }

  // Ranks [last - first, blocks] of rows of one list, in the thread's memory.
  const float* rank(int64_t list, int64_t first, int64_t last, int thread) {
    const Kernels& kernels = context_.kernels;
    const int64_t group = call_.q.dim(1) / call_.k.dim(1), blocks = grid_.blocks;
    const int64_t pitch = panels_.padded();
    const int64_t cells = std::min((last - first) * cells_a_row_, q_cells_ - first * cells_a_row_);
    float* t = context_.per_thread.of(thread);
    float* buffer = t + padded_rows_ * pitch;
    float* row_scores = buffer + cells_a_block_;
    float* weights = row_scores + blocks;
    float* ranks = weights + blocks;
    auto& row = pointers_[size_t(thread)];
    for (int64_t head = list * sharing_; head < (list + 1) * sharing_; ++head) {
      for (int64_t i = 0; i < padded_rows_; ++i) {
        row[size_t(i)] =
            pooled_q_ + (head * q_cells_ + first * cells_a_row_ + std::min(i, cells - 1)) * d_;
      }
      multiply(kernels, t, pitch, row.data(), cells, packed_ + head / group * packed_floats_, d_,
               panels_, 0, panels_.count(), 0, d_, false);
      for (int64_t r = 0; r < last - first; ++r) {
        float* of_row = ranks + r * blocks;
        float* to = call_.selection.ranks_by_share() ? row_scores : of_row;
        score_row(to, t + r * cells_a_row_ * pitch,
                  std::min(cells_a_row_, cells - r * cells_a_row_), buffer);
        if (to != of_row)
          add_shares(kernels, of_row, row_scores, weights, blocks, head == list * sharing_);
      }
    }
    return ranks;
  }

  // Scores of one row of blocks from the products t of its cells.
  void score_row(float* scores, const float* t, int64_t cells, float* buffer) const {
    for (int64_t b = 0; b < grid_.blocks; ++b) {
      const int64_t begin = b * cells_a_block_;
      scores[b] = log_sum(context_.kernels, t + begin, panels_.padded(), cells,
                          std::min(cells_a_block_, k_cells_ - begin), buffer);
    }
  }

  void write(int64_t list, int64_t row, const float* ranks, std::vector<int32_t>& order) const {
    const MutView& scores = call_.scores;
    if (scores)
      finish_row(context_.kernels, ranks, scores.mut(), scores.dtype,
                 list * scores.stride(0) + row * scores.stride(1), grid_.blocks, scores.stride(2));
    if (keeps_all_ || grid_.is_dense(row))
      keep_all(list, row);
    else
      count(list, row) = choose(ids_of(list, row), order, ranks, choice_);
  }

  Context& context_;
  const SelectBlocksArgs& call_;
  int64_t sharing_, lists_, d_;
  BlockGrid grid_;
  Choice choice_;
  bool keeps_all_;
  int64_t q_cells_, k_cells_, cells_a_row_, cells_a_block_;
  Panels panels_;
  float *pooled_q_ = nullptr, *packed_ = nullptr;
  int64_t packed_floats_ = 0, padded_rows_ = 0;
  std::vector<std::vector<int32_t>> orders_;         // by thread
  std::vector<std::vector<const float*>> pointers_;  // by thread: rows of pooled queries
};

}  // namespace

Implementations<SelectBlocksArgs> select_blocks_implementations(Context& context) {
  const auto native = [&context](const SelectBlocksArgs& call) {
    Selector(context, call).run();
    return Answer{};
  };
  return {"select_blocks", {{"native", native}}};
}

}  // namespace orrery::cpu
