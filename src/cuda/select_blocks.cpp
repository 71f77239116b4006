#include "cuda/select_blocks.h"

#include <algorithm>
#include <numbers>

#include "base/error.h"
#include "cuda/kernels.h"
#include "cuda/kernels/sm90_select.h"

namespace orrery::cuda {

namespace {

// Cell products, at most this much at a time.
constexpr int64_t kMaxPartBytes = int64_t{128} << 20;

int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

TopBlocks top_of(const SelectBlocksArgs& call) {
  const BlockSelection& selection = call.selection;
  TopBlocks top;
  top.grid = selection.grid(call.q.dim(0), call.k.dim(0));
  top.budget = selection.budget(top.grid.candidates());
  top.mass = float(selection.mass * double(selection.heads_per_list));
  return top;
}

bool has_dense_heads(const View& x) { return x.dim(1) <= 1 || x.stride(1) == x.dim(2); }

}  // namespace

BlockSelector::BlockSelector(Context& context, Gemm& gemm)
    : context_(context),
      gemm_(gemm),
      q_cells_(context),
      k_cells_(context),
      products_(context),
      scores_(context),
      ranks_(context),
      list_("select_blocks",
            {{"native", [this](const SelectBlocksArgs& c) { return native(c); }},
             {"gemm", [this](const SelectBlocksArgs& c) { return this->gemm(c); }}}) {}

Answer BlockSelector::native(const SelectBlocksArgs& call) {
  const auto& [indices, counts, q, k, selection, scores] = call;
  if (q.dtype != DType::bf16 || k.dtype != DType::bf16) return decline("takes bf16 only");
  if (!indices.contiguous() || !counts.contiguous() || (scores && !scores.contiguous()))
    return decline("takes contiguous lists and scores");
  if (!has_dense_heads(q) || !has_dense_heads(k))
    return decline("takes heads next to each other in a row");
  const TopBlocks top = top_of(call);
  Sm90SelectParams p;
  p.q = q.data;
  p.k = k.data;
  p.sq = q.dim(0);
  p.skv = k.dim(0);
  p.hq = int(q.dim(1));
  p.hkv = int(k.dim(1));
  p.head_dim = int(q.dim(2));
  p.q_stride = q.stride(0);
  p.k_stride = k.stride(0);
  p.scale = selection.scale;
  p.block_q = int(selection.block_q);
  p.block_k = int(selection.block_k);
  p.heads_per_list = int(selection.heads_per_list);
  p.head_end = int(top.grid.head_end);
  p.tail_begin = int(top.grid.tail_begin);
  p.budget = int(top.budget);
  p.mass = top.mass;
  p.dense_head_end = int(top.grid.dense_head_end);
  p.dense_tail_begin = int(top.grid.dense_tail_begin);
  p.indices = indices.as<int32_t>();
  p.counts = counts.as<int32_t>();
  p.capacity = int(indices.dim(2));
  p.scores = scores ? scores.as<float>() : nullptr;
  if (const char* reason = sm90_select_supports(p)) return decline(reason);
  p.workspace = q_cells_.get(sm90_select_workspace(p));
  const char* problem = sm90_select(p, context_.stream());
  require(problem == nullptr, ErrorKind::device, "select_blocks: native: ", problem ? problem : "");
  return {};
}

// Means of 16-token cells, and how many of them a block has.
struct BlockSelector::Cells {
  MutView q, k;  // [heads, cells, D]
  int64_t per_row, per_block;
};

Answer BlockSelector::gemm(const SelectBlocksArgs& call) {
  const BlockSelection& selection = call.selection;
  const int64_t cell = selection.cells(), d = call.q.dim(2);
  const int64_t q_count = ceil_div(call.q.dim(0), cell), k_count = ceil_div(call.k.dim(0), cell);
  const TopBlocks top = top_of(call);
  const bool keeps_all = selection.keeps_all(top.grid), needs_ranks = call.scores || !keeps_all;
  Cells cells{{}, {}, selection.block_q / cell, selection.block_k / cell};
  if (needs_ranks) {
    cells.q = q_cells_.tensor({call.q.dim(1), q_count, d}, call.q.dtype);
    cells.k = k_cells_.tensor({call.k.dim(1), k_count, d}, call.k.dtype);
    // In base 2, so that the exponential of a product is the weight of a cell pair.
    pool_cells(context_.stream(), cells.q, call.q, selection.scale * std::numbers::log2e_v<float>);
    pool_cells(context_.stream(), cells.k, call.k, 1.0f);
  }
  const int64_t rows = top.grid.rows, blocks = top.grid.blocks;
  const int64_t row_bytes = cells.per_row * std::max<int64_t>(1, k_count) * int64_t(sizeof(float));
  const int64_t step = std::clamp<int64_t>(kMaxPartBytes / row_bytes, 1, rows);
  for (int64_t list = 0; list < call.indices.dim(0); ++list) {
    for (int64_t begin = 0; begin < rows; begin += step) {
      const int64_t size = std::min(step, rows - begin);
      MutView ranks;
      if (needs_ranks) {
        ranks = call.scores ? call.scores.select(0, list).slice(0, begin, size)
                            : ranks_.tensor({size, blocks}, DType::f32);
        rank(call, cells, list, begin, ranks);
      }
      TopBlocks here = top;
      here.first_row = begin;
      top_blocks(context_.stream(), call.indices.select(0, list).slice(0, begin, size),
                 call.counts.select(0, list).slice(0, begin, size), keeps_all ? View{} : ranks,
                 here);
    }
  }
  return {};
}

void BlockSelector::rank(const SelectBlocksArgs& call, const Cells& cells, int64_t list,
                         int64_t begin, MutView ranks) {
  const int64_t sharing = call.selection.heads_per_list, group = cells.q.dim(0) / cells.k.dim(0);
  const int64_t first = begin * cells.per_row, k_count = cells.k.dim(1);
  const int64_t count = std::min(cells.q.dim(1) - first, ranks.dim(0) * cells.per_row);
  const bool by_share = call.selection.ranks_by_share();
  const MutView of_head = by_share ? scores_.tensor(ranks.shape, DType::f32) : ranks;
  for (int64_t head = list * sharing; head < (list + 1) * sharing; ++head) {
    const MutView products = products_.tensor({count, k_count}, DType::f32);
    gemm_.run({products, cells.q.select(0, head).slice(0, first, count),
               cells.k.select(0, head / group)});
    score_blocks(context_.stream(), of_head, products, cells.per_row, cells.per_block);
    if (by_share) add_shares(context_.stream(), ranks, of_head, head == list * sharing);
  }
}

}  // namespace orrery::cuda
