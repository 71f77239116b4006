#include "io/value_range.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/error.h"
#include "tensor/dtype.h"

namespace orrery {

namespace {

constexpr int64_t kBlock = 8192;  // values whose mean square is taken together

Shape position_of(int64_t index, const Shape& shape) {
  Shape position = shape;
  for (int d = shape.rank() - 1; d >= 0; --d) {
    position[d] = index % shape[d];
    index /= shape[d];
  }
  return position;
}

float value_of(int32_t bits) { return std::bit_cast<float>(bits); }
float value_of(bf16 stored) { return to_float(stored); }
float value_of(f16 stored) { return to_float(stored); }
float value_of(f8e4m3 stored) { return to_float(stored); }

// Bits: of one element as a signed integer; Stored: what value_of() takes.
template <typename Bits, typename Stored>
class Scan {
 public:
  Scan(const View& view, Bits infinity)
      : data_(static_cast<const std::byte*>(view.data)),
        shape_(view.shape),
        count_(view.numel()),
        infinity_(infinity) {}

  ValueRange run() const {
    ValueRange range;
    std::vector<float> means;
    Bits largest = 0;
    int64_t largest_block = 0;
    for (int64_t begin = 0; begin < count_; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, count_);
      const auto [magnitude, squares] = block(begin, end);
      if (magnitude >= infinity_) {
        range.fault = fault(begin);
        return range;
      }
      if (magnitude > largest) {
        largest = magnitude;
        largest_block = begin;
      }
      // A short rest says little beside whole blocks.
      if (end - begin == kBlock || means.empty())
        means.push_back(squares / static_cast<float>(end - begin));
    }
    if (count_ == 0) return range;
    const int64_t place = find(largest_block, largest);
    range.largest = double(value(largest));
    range.at = position_of(place, shape_);
    if (means.size() == 1) {
      range.typical = without(place);
    } else {
      const auto middle = means.begin() + (std::ssize(means) - 1) / 2;
      std::nth_element(means.begin(), middle, means.end());
      range.typical = std::sqrt(double(*middle));
    }
    return range;
  }

 private:
  struct Block {
    Bits magnitude;
    float squares;
  };

  Bits magnitude(int64_t i) const {
    Bits bits;
    std::memcpy(&bits, data_ + i * static_cast<int64_t>(sizeof bits), sizeof bits);
    return static_cast<Bits>(bits & std::numeric_limits<Bits>::max());  // all but the sign
  }
  static float value(Bits bits) { return value_of(std::bit_cast<Stored>(bits)); }

  // Sums in lanes and no early exit: the loop becomes vector code.
  Block block(int64_t begin, int64_t end) const {
    constexpr int64_t kLanes = 16;
    std::array<Bits, kLanes> largest{};
    std::array<float, kLanes> squares{};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const Bits bits = magnitude(i + lane);
        const float x = value(bits);
        largest[size_t(lane)] = std::max(largest[size_t(lane)], bits);
        squares[size_t(lane)] += x * x;
      }
    }
    for (; i < end; ++i) {
      const Bits bits = magnitude(i);
      largest[0] = std::max(largest[0], bits);
      squares[0] += value(bits) * value(bits);
    }
    float sum = 0;
    for (const float part : squares) sum += part;
    return {*std::max_element(largest.begin(), largest.end()), sum};
  }

  std::string fault(int64_t begin) const {
    int64_t i = begin;
    while (magnitude(i) < infinity_) ++i;
    return concat(magnitude(i) == infinity_ ? "Inf" : "NaN", " at ", position_of(i, shape_));
  }

  int64_t find(int64_t begin, Bits wanted) const {
    int64_t i = begin;
    while (magnitude(i) != wanted) ++i;
    return i;
  }

  // Root mean square of all values but one.
  double without(int64_t place) const {
    double sum = 0;
    for (int64_t i = 0; i < count_; ++i) {
      const auto x = double(value(magnitude(i)));
      if (i != place) sum += x * x;
    }
    return count_ > 1 ? std::sqrt(sum / double(count_ - 1)) : 0;
  }

  const std::byte* data_;
  Shape shape_;
  int64_t count_;
  Bits infinity_;
};

}  // namespace

std::string ValueRange::unlikely() const {
  return concat(largest, " at ", at, ", ", largest / typical, " times what is usual in it");
}

ValueRange value_range(const View& view) {
  require(view.device == DeviceKind::cpu && view.contiguous(),
          "value_range: the tensor is not contiguous in host memory");
  switch (view.dtype) {
    case DType::f32: return Scan<int32_t, int32_t>(view, 0x7f800000).run();
    case DType::bf16: return Scan<int16_t, bf16>(view, 0x7f80).run();
    case DType::f16: return Scan<int16_t, f16>(view, 0x7c00).run();
    case DType::f8e4m3: return Scan<int8_t, f8e4m3>(view, 0x7f).run();  // the one NaN
    case DType::i32:
    case DType::i64:
    case DType::i8:
    case DType::u8: return {};
  }
  return {};
}

std::optional<std::string> first_non_finite(const View& view) { return value_range(view).fault; }

}  // namespace orrery
