#include "text/merges.h"

#include <bit>
#include <queue>

namespace orrery {

namespace {

constexpr uint64_t kEmpty = ~uint64_t{0};
constexpr uint32_t kNoRank = ~uint32_t{0};
constexpr size_t kShortPiece = 64;

uint64_t key_of(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

// Fibonacci hashing: ids are dense and small, the high bits of the product spread them.
uint64_t hash(uint64_t key) { return key * 0x9E3779B97F4A7C15u; }

}  // namespace

Merges::Merges(const std::vector<Rule>& rules, const std::array<int32_t, 256>& symbol)
    : symbol_(symbol) {
  // At most half full, so that a probe for an absent pair, the common case, ends at once.
  const uint64_t size = std::bit_ceil(uint64_t{2} * rules.size() + 2);
  slots_.assign(size, Slot{kEmpty, {kNoRank, 0}});
  mask_ = size - 1;
  shift_ = 64 - std::countr_zero(size);
  for (size_t rank = 0; rank < rules.size(); ++rank) {
    const uint64_t key = key_of(rules[rank].left, rules[rank].right);
    uint64_t at = hash(key) >> shift_;
    while (slots_[at].key != kEmpty && slots_[at].key != key) at = (at + 1) & mask_;
    slots_[at] = {key, {static_cast<uint32_t>(rank), rules[rank].result}};
  }
}

Merges::Merge Merges::find(int32_t left, int32_t right) const {
  const uint64_t key = key_of(left, right);
  uint64_t at = hash(key) >> shift_;
  while (slots_[at].key != key) {
    if (slots_[at].key == kEmpty) return {kNoRank, 0};
    at = (at + 1) & mask_;
  }
  return slots_[at].merge;
}

void Merges::encode(std::string_view piece, std::vector<int64_t>& out) const {
  if (piece.size() <= kShortPiece)
    encode_short(piece, out);
  else
    encode_long(piece, out);
}

void Merges::encode_short(std::string_view piece, std::vector<int64_t>& out) const {
  std::array<int32_t, kShortPiece> ids;
  std::array<Merge, kShortPiece> merges;  // [i] joins ids[i] and ids[i + 1]
  size_t count = piece.size();
  for (size_t i = 0; i < count; ++i) ids[i] = symbol_[static_cast<unsigned char>(piece[i])];
  for (size_t i = 0; i + 1 < count; ++i) merges[i] = find(ids[i], ids[i + 1]);
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; ++i) {
      if (merges[i].rank < merges[best].rank) best = i;
    }
    if (merges[best].rank == kNoRank) break;
    ids[best] = merges[best].result;
    --count;
    for (size_t i = best + 1; i < count; ++i) {
      ids[i] = ids[i + 1];
      merges[i - 1] = merges[i];
    }
    if (best > 0) merges[best - 1] = find(ids[best - 1], ids[best]);
    if (best + 1 < count) merges[best] = find(ids[best], ids[best + 1]);
  }
  out.insert(out.end(), ids.begin(), ids.begin() + static_cast<ptrdiff_t>(count));
}

void Merges::encode_long(std::string_view piece, std::vector<int64_t>& out) const {
  constexpr size_t kNone = ~size_t{0};
  constexpr int32_t kGone = -1;
  struct Node {
    int32_t id;
    size_t previous;
    size_t next;
  };
  struct Candidate {
    uint32_t rank;
    int32_t result;
    size_t at;
    int32_t left, right;  // what stood there when it was pushed: stale if it no longer does
    bool operator<(const Candidate& other) const {  // the queue's top is its greatest
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };
  std::vector<Node> nodes(piece.size());
  for (size_t i = 0; i < piece.size(); ++i) {
    nodes[i] = {symbol_[static_cast<unsigned char>(piece[i])], i == 0 ? kNone : i - 1,
                i + 1 == piece.size() ? kNone : i + 1};
  }
  std::priority_queue<Candidate> queue;
  const auto push = [&](size_t at) {
    if (at == kNone || nodes[at].next == kNone) return;
    const int32_t left = nodes[at].id;
    const int32_t right = nodes[nodes[at].next].id;
    const Merge merge = find(left, right);
    if (merge.rank != kNoRank) queue.push({merge.rank, merge.result, at, left, right});
  };
  for (size_t i = 0; i < nodes.size(); ++i) push(i);
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Node& node = nodes[top.at];
    if (node.id != top.left || node.next == kNone || nodes[node.next].id != top.right) continue;
    Node& absorbed = nodes[node.next];
    node.id = top.result;
    absorbed.id = kGone;
    node.next = absorbed.next;
    if (node.next != kNone) nodes[node.next].previous = top.at;
    push(node.previous);
    push(top.at);
  }
  for (size_t i = 0; i != kNone; i = nodes[i].next) out.push_back(nodes[i].id);
}

}  // namespace orrery
