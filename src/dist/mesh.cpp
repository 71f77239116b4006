#include "dist/mesh.h"

#include <numeric>

#include "base/error.h"

namespace orrery {

namespace {

constexpr int kMaxCfg = 2;  // conditional and unconditional

// "1, 2, 4": what divides `number`.
std::string divisors(int64_t number) {
  std::string text;
  for (int64_t d = 1; d <= number; ++d) {
    if (number % d == 0) text += concat(text.empty() ? "" : ", ", d);
  }
  return text;
}

}  // namespace

Mesh::Place Mesh::place(int rank) const {
  require(rank >= 0 && rank < world(), "mesh: rank ", rank, " of ", world());
  return {rank % tp, rank / tp % cp, rank / (tp * cp)};
}

std::vector<int> Mesh::tp_group(int rank) const {
  std::vector<int> ranks;
  Place at = place(rank);
  for (at.tp = 0; at.tp < tp; ++at.tp) ranks.push_back(this->rank(at));
  return ranks;
}

std::vector<int> Mesh::cp_group(int rank) const {
  std::vector<int> ranks;
  Place at = place(rank);
  for (at.cp = 0; at.cp < cp; ++at.cp) ranks.push_back(this->rank(at));
  return ranks;
}

std::vector<int> Mesh::cfg_group(int rank) const {
  std::vector<int> ranks;
  Place at = place(rank);
  for (at.cfg = 0; at.cfg < cfg; ++at.cfg) ranks.push_back(this->rank(at));
  return ranks;
}

void Mesh::check(const MeshLimits& limits, int ranks) const {
  require(tp >= 1, "tp degree ", tp, ": expected 1 or more");
  require(cp >= 1, "cp degree ", cp, ": expected 1 or more");
  require(cfg >= 1 && cfg <= kMaxCfg, "cfg degree ", cfg, ": expected 1 or ", kMaxCfg,
          ", one rank group per guidance branch");
  int64_t common = std::gcd(limits.num_heads, limits.num_kv_heads);
  std::string widths;
  for (int64_t width : limits.ffn_widths) {
    common = std::gcd(common, width);
    widths += concat(", ", width, " feed-forward columns");
  }
  require(common % tp == 0, "tp degree ", tp, " does not divide this checkpoint's ",
          limits.num_heads, " query heads, ", limits.num_kv_heads, " key/value heads", widths,
          "; degrees that do: ", divisors(common));
  const int64_t heads = limits.num_heads / tp;
  require(heads % cp == 0, "cp degree ", cp, " does not divide the ", heads,
          " query heads of a rank (", limits.num_heads, " over tp ", tp,
          "); degrees that do: ", divisors(heads));
  const int64_t needed = int64_t{tp} * cp * cfg;
  require(needed == ranks, "tp ", tp, " x cp ", cp, " x cfg ", cfg, " needs ", needed,
          " ranks, but ", ranks, ranks == 1 ? " runs" : " run");
}

HeadRange Mesh::heads(int64_t num_heads, int64_t num_kv_heads, int rank) const {
  require(num_heads % tp == 0 && num_kv_heads % tp == 0, "tp degree ", tp, " does not divide ",
          num_heads, " query heads and ", num_kv_heads,
          " key/value heads; degrees that do: ", divisors(std::gcd(num_heads, num_kv_heads)));
  const int64_t index = place(rank).tp;
  HeadRange range;
  range.q_count = num_heads / tp;
  range.kv_count = num_kv_heads / tp;
  range.q_begin = index * range.q_count;
  range.kv_begin = index * range.kv_count;
  return range;
}

HeadExchange::HeadExchange(int64_t heads, int64_t kv_heads, int ranks)
    : heads_(heads), ranks_(ranks) {
  require(kv_heads > 0 && heads % kv_heads == 0, "head exchange: ", heads,
          " query heads do not divide into ", kv_heads, " key/value heads");
  require(ranks > 0 && heads % ranks == 0, "cp degree ", ranks, " does not divide the ", heads,
          " query heads of a rank; degrees that do: ", divisors(heads));
  group_ = heads / kv_heads;
  per_kv_ = std::gcd(group_, q_count());
}

}  // namespace orrery
