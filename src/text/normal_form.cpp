#include "text/normal_form.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <vector>

#include "base/error.h"
#include "text/utf8.h"

namespace orrery {

namespace {

struct Range {
  char32_t first;
  char32_t last;
};

// The reference's tables are those of Unicode 9: marks that came later keep their place there and
// do not compose. These are the ones up to Unicode 15, of all that has a combining class or
// composes.
constexpr std::array kYoungerMarks = {
    Range{0x07FD, 0x07FD},   Range{0x0898, 0x089F},   Range{0x08CA, 0x08D3},
    Range{0x09FE, 0x09FE},   Range{0x0C3C, 0x0C3C},   Range{0x0D3B, 0x0D3C},
    Range{0x0EBA, 0x0EBA},   Range{0x1715, 0x1715},   Range{0x1ABF, 0x1ACE},
    Range{0x1DF6, 0x1DFA},   Range{0xA82C, 0xA82C},   Range{0x10D24, 0x10D27},
    Range{0x10EAB, 0x10EAC}, Range{0x10EFD, 0x10EFF}, Range{0x10F46, 0x10F50},
    Range{0x10F82, 0x10F85}, Range{0x11070, 0x11070}, Range{0x1133B, 0x1133B},
    Range{0x1145E, 0x1145E}, Range{0x11839, 0x1183A}, Range{0x11930, 0x11930},
    Range{0x11938, 0x11938}, Range{0x1193D, 0x1193E}, Range{0x11943, 0x11943},
    Range{0x119E0, 0x119E0}, Range{0x11A34, 0x11A34}, Range{0x11A47, 0x11A47},
    Range{0x11A99, 0x11A99}, Range{0x11D42, 0x11D42}, Range{0x11D44, 0x11D45},
    Range{0x11D97, 0x11D97}, Range{0x11F41, 0x11F42}, Range{0x16FF0, 0x16FF1},
    Range{0x1E08F, 0x1E08F}, Range{0x1E130, 0x1E136}, Range{0x1E2AE, 0x1E2AE},
    Range{0x1E2EC, 0x1E2EF}, Range{0x1E4EC, 0x1E4EF}};

bool is_younger_mark(char32_t c) {
  const auto range =
      std::lower_bound(kYoungerMarks.begin(), kYoungerMarks.end(), c,
                       [](const Range& r, char32_t wanted) { return r.last < wanted; });
  return range != kYoungerMarks.end() && range->first <= c;
}

int combining_class(char32_t c) {
  const int rank = utf8proc_get_property(static_cast<utf8proc_int32_t>(c))->combining_class;
  return rank != 0 && is_younger_mark(c) ? 0 : rank;
}

// True for a code point before which the text may be cut: it neither reorders with, nor composes
// onto, nor changes because of what stands before it. Some marks are safe too; taking them for
// unsafe costs time, not correctness. Conjoining jamo are letters that compose onto their
// neighbour.
bool starts_segment(char32_t c) {
  if (c < 0x300) return true;
  if (c >= 0x1160 && c <= 0x11FF) return false;
  const utf8proc_property_t* property = utf8proc_get_property(static_cast<utf8proc_int32_t>(c));
  const bool canonical_decomposition =
      property->decomp_seqindex != UINT16_MAX && property->decomp_type == 0;
  const bool safe = !canonical_decomposition && property->combining_class == 0 &&
                    property->category != UTF8PROC_CATEGORY_MN &&
                    property->category != UTF8PROC_CATEGORY_MC &&
                    property->category != UTF8PROC_CATEGORY_ME;
  return safe || is_younger_mark(c);
}

// utf8proc's own driver reorders marks by exchanging neighbours, which is quadratic in a long run;
// here it only decomposes and composes.
class Segment {
 public:
  void append(std::string_view text, std::string& out) {
    points_.clear();
    for (size_t i = 0; i < text.size();) decompose(next_code_point(text, i));
    reorder();
    const utf8proc_ssize_t length = utf8proc_normalize_utf32(
        points_.data(), static_cast<utf8proc_ssize_t>(points_.size()),
        static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    require(length >= 0, ErrorKind::corrupt, "unicode: ", utf8proc_errmsg(length));
    for (utf8proc_ssize_t i = 0; i < length; ++i) {
      append_utf8(out, static_cast<char32_t>(points_[static_cast<size_t>(i)]));
    }
  }

 private:
  void decompose(char32_t c) {
    std::array<utf8proc_int32_t, 32> parts;  // the longest canonical decomposition has 4
    int boundary = 0;
    const utf8proc_ssize_t count = utf8proc_decompose_char(
        static_cast<utf8proc_int32_t>(c), parts.data(), parts.size(),
        static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE), &boundary);
    require(count >= 0 && count <= static_cast<utf8proc_ssize_t>(parts.size()), ErrorKind::corrupt,
            "unicode: cannot decompose code point ", static_cast<uint32_t>(c));
    points_.insert(points_.end(), parts.begin(), parts.begin() + count);
  }

  void reorder() {
    const auto rank = [](utf8proc_int32_t c) { return combining_class(static_cast<char32_t>(c)); };
    for (auto begin = points_.begin(); begin != points_.end();) {
      if (rank(*begin) == 0) {
        ++begin;
        continue;
      }
      const auto end = std::find_if(begin, points_.end(), [&](auto c) { return rank(c) == 0; });
      std::stable_sort(begin, end, [&](auto a, auto b) { return rank(a) < rank(b); });
      begin = end;
    }
  }

  std::vector<utf8proc_int32_t> points_;
};

}  // namespace

std::string nfc(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  Segment segment;
  size_t begin = 0;      // of the segment being read
  bool altered = false;  // it holds more than its first code point
  const auto flush = [&](size_t end) {
    if (altered)
      segment.append(text.substr(begin, end - begin), out);
    else
      out.append(text, begin, end - begin);
  };
  for (size_t i = 0; i < text.size();) {
    const size_t at = i;
    const char32_t c = next_code_point(text, i);
    if (!starts_segment(c)) {
      altered = true;
      continue;
    }
    // Plain stretches are left to grow; only a changed segment ends where the next begins.
    size_t ahead = i;
    const bool plain_follows = i == text.size() || starts_segment(next_code_point(text, ahead));
    if (altered || !plain_follows) {
      flush(at);
      begin = at;
      altered = false;
    }
  }
  flush(text.size());
  return out;
}

}  // namespace orrery
