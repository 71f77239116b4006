// How ranks are arranged and which heads each holds. The only place with head arithmetic.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace orrery {

// Query and key/value heads [begin, begin + count) of the checkpoint.
struct HeadRange {
  int64_t q_begin = 0, q_count = 0;
  int64_t kv_begin = 0, kv_count = 0;
};

// Sizes of a checkpoint that a mesh must divide.
struct MeshLimits {
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  std::vector<int64_t> ffn_widths;  // cut by tp
};

// tp cuts weights and heads, cp the generation sequence, cfg the guidance branches. Ranks of one tp
// group are neighbours: rank = (cfg_index * cp + cp_index) * tp + tp_index.
struct Mesh {
  int tp = 1, cp = 1, cfg = 1;

  struct Place {
    int tp = 0, cp = 0, cfg = 0;
  };
  int world() const { return tp * cp * cfg; }
  Place place(int rank) const;
  int rank(const Place& place) const { return (place.cfg * cp + place.cp) * tp + place.tp; }
  // Ranks that differ from `rank` in one axis only, in the order of that axis.
  std::vector<int> tp_group(int rank) const;
  std::vector<int> cp_group(int rank) const;
  std::vector<int> cfg_group(int rank) const;

  // Refuses, before any collective, degrees that do not fit the checkpoint or `world` ranks; the
  // message names the degrees that would (B71, B72, B73).
  void check(const MeshLimits& limits, int world) const;
  // Heads whose weights `rank` holds: tp's cut.
  HeadRange heads(int64_t num_heads, int64_t num_kv_heads, int rank) const;
};

// The exchange of sequence for heads in a group of `ranks` that hold `heads` query and `kv_heads`
// key/value heads each: afterwards rank i has query heads [i * q_count, (i + 1) * q_count) and the
// key/value heads these read. A key/value head goes to every rank that reads it. Where a rank's
// query heads cut a group apart, the head is repeated so that the rank's own ratio is whole (28 and
// 7 heads over 2 ranks: 14 and 7).
class HeadExchange {
 public:
  // Refuses ranks that do not divide the query heads.
  HeadExchange(int64_t heads, int64_t kv_heads, int ranks);
  int64_t q_count() const { return heads_ / ranks_; }
  int64_t kv_count() const { return q_count() / per_kv_; }
  // The key/value head that is the j-th of `rank`.
  int64_t kv_head(int rank, int64_t j) const { return (rank * q_count() + j * per_kv_) / group_; }
  // True when each key/value head goes to exactly one rank, in order.
  bool splits_kv() const { return per_kv_ == group_; }

 private:
  int64_t heads_ = 0, ranks_ = 1;
  int64_t group_ = 1;   // query heads per key/value head
  int64_t per_kv_ = 1;  // query heads per key/value head after the exchange; divides group_
};

}  // namespace orrery
