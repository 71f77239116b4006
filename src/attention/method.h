// What an attention method is: given one call, it says which key blocks each query block sees.
// Backends run the plan; methods never compute attention.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "attention/selection_cache.h"
#include "attention/sequence.h"
#include "attention/strategy.h"
#include "backend/backend.h"

namespace orrery {

// One call as a method sees it, with whole sequences and this rank's heads:
// q [Sq, H, D], k [text + Sq, KV, D].
struct AttentionCall {
  AttentionSite site;
  AttentionMoment moment;
  int64_t text = 0;  // leading keys that belong to the text
  float scale = 0;
  View q, k;
  const Sequence& sequence;
  Backend& backend;
  Arena& arena;                // lists that live for one call
  SelectionCache& selections;  // lists that live longer
  int pass = 0;                // of an evaluation that attends its controls one by one
};

struct PlannedAttention {
  AttentionPlan plan;  // plan.mask stays null; `mask` says it, so that the struct can be moved
  std::optional<BlockMask> mask;
  // (query block, key block) pairs over all heads; 0 of 0 when the method knows no blocks. None
  // when only the lists' lengths say how many are kept: see kept_blocks_of().
  std::optional<int64_t> kept_blocks = 0;
  int64_t all_blocks = 0;
  double seconds = 0;  // of the backend's selection of blocks; 0 unless it profiles
};

// kept_blocks, or else the sum of the lists' lengths over `heads` query heads, which are read back.
int64_t kept_blocks_of(const PlannedAttention& planned, int64_t heads, Backend& backend);

// Immutable: what a request must remember lives in its SelectionCache. A plan is valid until the
// arena scope of the call ends.
class AttentionMethod {
 public:
  virtual ~AttentionMethod() = default;
  // One line: "dense (FLASH_ATTN)", "block_topk 64x64, target sparsity 0.75 (FLASH_ATTN)".
  virtual std::string description() const = 0;
  // True when it reads every key: only such a method may serve a causal site.
  virtual bool is_dense() const { return false; }
  // Longest run of steps that share one selection; 1 when each call selects anew.
  virtual int reuse_steps() const { return 1; }
  // True when query heads of one key/value head choose together, so that no two ranks may share the
  // head.
  virtual bool needs_whole_groups() const { return false; }
  // True when how many blocks it keeps follows from the data: kept_blocks_of() reads it back.
  virtual bool keeps_by_data() const { return false; }
  virtual PlannedAttention plan(const AttentionCall& call) const = 0;
};

// The kernel a preset asked for, and the implementation name that backends know it by (empty: the
// backend's best exact one).
struct KernelChoice {
  std::string provider = "best exact kernel";
  std::string implementation;
};

// What all block-sparse methods have in common.
struct BlockSparseOptions {
  int64_t block_q = 64;
  int64_t block_k = 64;
  int reuse_steps = 1;
  bool share_kv_group = false;  // one list for the query heads of a key/value head
  KernelChoice kernel;

  // "<method> 64x64, <detail>[, one list per key/value head][, selection reused for n steps]
  // (provider)".
  std::string describe(const std::string& method, const std::string& detail) const;
};

std::unique_ptr<AttentionMethod> make_dense(KernelChoice kernel);
// Keeps the blocks that score best, a fixed share of them (SubBlock; BlockSelection).
std::unique_ptr<AttentionMethod> make_block_topk(BlockSparseOptions options,
                                                 double target_sparsity);
// Keeps a window of tiles of the token order around each query's tile; with raster order the tile
// is a frame. The window keeps its size at the borders. Extents are odd.
std::unique_ptr<AttentionMethod> make_sliding_tile(BlockSparseOptions options,
                                                   std::array<int64_t, 3> window);
// Keeps the fewest blocks whose estimated share of the softmax reaches `mass` in (0, 1].
std::unique_ptr<AttentionMethod> make_threshold(BlockSparseOptions options, double mass);

}  // namespace orrery
