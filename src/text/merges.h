// Byte-pair merging: the pair of lowest rank first, the leftmost of equals, until none is listed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace orrery {

// Immutable after construction.
class Merges {
 public:
  struct Rule {
    int32_t left;
    int32_t right;
    int32_t result;
  };

  Merges() = default;
  // Rules in rank order; of a pair listed twice the later rank counts, as in the reference.
  // `symbol` maps a byte to its id.
  Merges(const std::vector<Rule>& rules, const std::array<int32_t, 256>& symbol);

  // Appends the ids of one piece. Linear scans for short pieces, a heap for long ones.
  void encode(std::string_view piece, std::vector<int64_t>& out) const;

 private:
  struct Merge {
    uint32_t rank;
    int32_t result;
  };
  struct Slot {
    uint64_t key;
    Merge merge;
  };

  Merge find(int32_t left, int32_t right) const;
  void encode_short(std::string_view piece, std::vector<int64_t>& out) const;
  void encode_long(std::string_view piece, std::vector<int64_t>& out) const;

  std::array<int32_t, 256> symbol_{};
  std::vector<Slot> slots_;  // open addressing; the size is a power of two
  uint64_t mask_ = 0;
  int shift_ = 0;
};

}  // namespace orrery
