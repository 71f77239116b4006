// Who chooses key blocks on CUDA: our Hopper kernel, or pooling, products and ranking one after
// another.
#pragma once

#include "backend/implementations.h"
#include "cuda/context.h"
#include "cuda/gemm.h"

namespace orrery::cuda {

class BlockSelector {
 public:
  BlockSelector(Context& context, Gemm& gemm);

  // As Backend::select_blocks.
  Ran run(const SelectBlocksArgs& call) { return list_.run(call); }

 private:
  Answer native(const SelectBlocksArgs& call);
  Answer gemm(const SelectBlocksArgs& call);
  // Ranks [rows, blocks] of one list's rows of blocks from `begin` on, into `ranks`.
  struct Cells;
  void rank(const SelectBlocksArgs& call, const Cells& cells, int64_t list, int64_t begin,
            MutView ranks);

  Context& context_;
  Gemm& gemm_;
  Scratch q_cells_, k_cells_, products_, scores_, ranks_;
  Implementations<SelectBlocksArgs> list_;
};

}  // namespace orrery::cuda
