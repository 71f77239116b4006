#include <cmath>
#include <map>

#include "base/error.h"
#include "bench/measurements.h"

namespace orrery {

namespace {

constexpr double kLongestReference = 2e11;  // flops; the naive kernels take minutes beyond

struct Problem {
  int64_t sq = 0, skv = 0, heads = 0, kv_heads = 0, d = 0;

  double flops() const {
    return 4.0 * static_cast<double>(sq) * static_cast<double>(skv) *
           static_cast<double>(heads * d);
  }
};

Problem problem_of(const BenchRank& rank) {
  const BenchOptions& options = rank.options;
  const auto or_else = [](int64_t given, int64_t otherwise) {
    return given > 0 ? given : otherwise;
  };
  require(options.sparsity > 0 && options.sparsity < 1, "bench attention: sparsity ",
          options.sparsity, " is not between 0 and 1");
  Problem p;
  p.sq = or_else(options.query_tokens, rank.sequence().size());
  p.skv = or_else(options.key_tokens, p.sq + options.text_tokens);
  p.heads = or_else(options.heads, rank.config.num_attention_heads);
  p.kv_heads = or_else(options.kv_heads, rank.config.num_key_value_heads);
  p.d = or_else(options.head_dim, rank.config.head_dim);
  return p;
}

// Seconds of every implementation that does this call, one line each; "native" beside the first
// other one. `floor`: seconds.
void time_each(BenchRank& rank, const std::string& size, const char* kind, double flops,
               double floor, AttentionPlan plan, const std::function<void(AttentionPlan&)>& call) {
  std::map<std::string, double> times;
  for (const char* name : {"cudnn", "gemm", "reference", "native"}) {
    if (name == std::string("reference") && flops > kLongestReference) continue;
    plan.implementation = name;
    try {
      times[name] = rank.best_seconds([&] { call(plan); });
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::unsupported && error.kind() != ErrorKind::invalid_argument)
        throw;
      continue;  // it does not do this
    }
    Measurement m{concat(kind, ", ", name), times[name] * 1e3, "ms", floor * 1e3, "", 0};
    if (name == std::string("native")) {
      for (const char* other : {"cudnn", "gemm", "reference"}) {
        if (!times.contains(other) || !m.peer.empty()) continue;
        m.peer = other;
        m.peer_value = times[other] * 1e3;
      }
    }
    rank.report(size, m);
  }
}

}  // namespace

void measure_attention(BenchRank& rank) {
  const Problem p = problem_of(rank);
  Backend& backend = *rank.backend;
  const std::string size = concat(p.sq, " x ", p.skv, " tokens, ", p.heads, "/", p.kv_heads,
                                  " heads of ", p.d, ", ", name_of(rank.dtype));
  const auto random = [&](const Shape& shape, int64_t seed) {
    const Tensor exact = rank.normals(shape, seed);
    Tensor out = backend.allocate_tensor(shape, rank.dtype);
    backend.copy(out.view, exact.view);
    return out;
  };
  const Tensor q = random({p.sq, p.heads, p.d}, 1), k = random({p.skv, p.kv_heads, p.d}, 2),
               v = random({p.skv, p.kv_heads, p.d}, 3);
  const Tensor out = backend.allocate_tensor(q.view.shape, rank.dtype);
  AttentionPlan dense;
  dense.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.d)));

  BlockSelection rule;
  rule.target_sparsity = rank.options.sparsity;
  rule.protected_keys = p.skv - std::min(p.sq, p.skv);
  rule.scale = dense.scale;
  const BlockGrid grid = rule.grid(p.sq, p.skv);
  const Shape lists{p.heads, grid.rows, grid.blocks};
  const Tensor indices = backend.allocate_tensor(lists, DType::i32);
  const Tensor counts = backend.allocate_tensor({lists[0], lists[1]}, DType::i32);
  const auto select = [&] {
    backend.select_blocks(indices.view, counts.view, q.view, k.view, rule);
  };
  select();
  const BlockMask mask{rule.block_q, rule.block_k, indices.view, counts.view};
  const double kept = static_cast<double>(grid.head_end + rule.budget(grid.candidates())) /
                      static_cast<double>(grid.blocks);

  const double flops = p.flops(), floor = flops / rank.gemm_rate();
  const auto call = [&](AttentionPlan& plan) {
    backend.attention(out.view, q.view, k.view, v.view, plan);
  };
  time_each(rank, size, "dense attention", flops, floor, dense, call);
  rank.report(size, {"block selection", rank.best_seconds(select) * 1e3, "ms", 0, "", 0});
  AttentionPlan sparse = dense;
  sparse.mask = &mask;
  time_each(rank, size, "block-sparse attention", flops, floor * kept, sparse, call);
}

}  // namespace orrery
