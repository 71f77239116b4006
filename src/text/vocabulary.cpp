#include "text/vocabulary.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <utility>

#include "base/error.h"
#include "text/utf8.h"

namespace orrery {

ByteAlphabet::ByteAlphabet() {
  byte_.fill(-1);
  char32_t next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    const char32_t code_point = printable ? static_cast<char32_t>(byte) : next++;
    append_utf8(symbol_[static_cast<size_t>(byte)], code_point);
    byte_[code_point] = static_cast<int16_t>(byte);
  }
}

std::optional<std::string> ByteAlphabet::bytes_of(std::string_view spelled) const {
  std::string bytes;
  for (size_t i = 0; i < spelled.size();) {
    const char32_t c = next_code_point(spelled, i);
    if (c >= byte_.size() || byte_[c] < 0) return std::nullopt;
    bytes += static_cast<char>(byte_[c]);
  }
  return bytes;
}

Vocabulary::Vocabulary(size_t expected) : slots_(std::bit_ceil(2 * expected + 2), -1) {
  spans_.reserve(expected);
}

void Vocabulary::add(std::string_view text, int64_t id, const std::string& origin) {
  require(id >= 0 && id <= kMaxId, ErrorKind::corrupt, origin, ": the id ", id, " of \"", text,
          "\" is not in 0..", kMaxId);
  if (static_cast<size_t>(id) >= spans_.size()) spans_.resize(static_cast<size_t>(id) + 1);
  Span& span = spans_[static_cast<size_t>(id)];
  require(!span.used, ErrorKind::corrupt, origin, ": the id ", id, " stands for both \"",
          span.used ? text_at(static_cast<int32_t>(id)) : "", "\" and \"", text, "\"");
  require(blob_.size() + text.size() <= UINT32_MAX, ErrorKind::corrupt, origin,
          ": the vocabulary has more than 4 GiB of text");
  if (2 * (count_ + 1) > slots_.size()) grow();
  const size_t slot = slot_of(text);
  require(slots_[slot] < 0, ErrorKind::corrupt, origin, ": \"", text, "\" has two ids, ",
          slots_[slot], " and ", id);
  span = {static_cast<uint32_t>(blob_.size()), static_cast<uint32_t>(text.size()), true};
  blob_ += text;
  slots_[slot] = static_cast<int32_t>(id);
  ++count_;
}

void Vocabulary::grow() {
  std::vector<int32_t> old = std::exchange(slots_, std::vector<int32_t>(2 * slots_.size(), -1));
  for (const int32_t id : old) {
    if (id >= 0) slots_[slot_of(text_at(id))] = id;
  }
}

size_t Vocabulary::slot_of(std::string_view text) const {
  const size_t mask = slots_.size() - 1;
  size_t at = std::hash<std::string_view>{}(text)&mask;
  while (slots_[at] >= 0 && text_at(slots_[at]) != text) at = (at + 1) & mask;
  return at;
}

std::string_view Vocabulary::text_at(int32_t id) const {
  const Span& span = spans_[static_cast<size_t>(id)];
  return std::string_view(blob_).substr(span.offset, span.length);
}

std::optional<int32_t> Vocabulary::find(std::string_view text) const {
  const int32_t id = slots_[slot_of(text)];
  if (id < 0) return std::nullopt;
  return id;
}

std::optional<std::string_view> Vocabulary::text(int64_t id) const {
  if (id < 0 || id >= size() || !spans_[static_cast<size_t>(id)].used) return std::nullopt;
  return text_at(static_cast<int32_t>(id));
}

AddedTokens::AddedTokens() : nodes_{{0, -1, -1, -1}} {}

int32_t AddedTokens::child_of(int32_t node, char byte) const {
  int32_t child = nodes_[static_cast<size_t>(node)].child;
  while (child >= 0 && nodes_[static_cast<size_t>(child)].byte != byte) {
    child = nodes_[static_cast<size_t>(child)].sibling;
  }
  return child;
}

void AddedTokens::add(std::string_view text, int32_t id) {
  int32_t node = 0;
  for (const char byte : text) {
    int32_t child = child_of(node, byte);
    if (child < 0) {
      child = static_cast<int32_t>(nodes_.size());
      nodes_.push_back({byte, -1, nodes_[static_cast<size_t>(node)].child, -1});
      nodes_[static_cast<size_t>(node)].child = child;
    }
    node = child;
  }
  nodes_[static_cast<size_t>(node)].id = id;
  first_[static_cast<unsigned char>(text.front())] = true;
  const std::pair<int32_t, std::string> entry{id, text};
  texts_.insert(std::upper_bound(texts_.begin(), texts_.end(), entry), entry);
}

AddedTokens::Match AddedTokens::find(std::string_view text, size_t from) const {
  for (size_t begin = from; begin < text.size(); ++begin) {
    if (!first_[static_cast<unsigned char>(text[begin])]) continue;
    Match longest;
    int32_t node = 0;
    for (size_t i = begin; i < text.size(); ++i) {
      node = child_of(node, text[i]);
      if (node < 0) break;
      if (const int32_t id = nodes_[static_cast<size_t>(node)].id; id >= 0)
        longest = {begin, i + 1, id};
    }
    if (longest.id >= 0) return longest;
  }
  return {text.size(), text.size(), -1};
}

const std::string* AddedTokens::text(int64_t id) const {
  const auto found =
      std::lower_bound(texts_.begin(), texts_.end(), id,
                       [](const auto& entry, int64_t wanted) { return entry.first < wanted; });
  return found != texts_.end() && found->first == id ? &found->second : nullptr;
}

}  // namespace orrery
