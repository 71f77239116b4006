#include "io/orientation.h"

#include <cstddef>
#include <utility>

namespace orrery {
namespace {

// Little- or big-endian numbers of a TIFF block; 0 beyond its end.
class TiffBytes {
 public:
  TiffBytes(std::span<const uint8_t> bytes, bool big_endian)
      : bytes_(bytes), big_endian_(big_endian) {}
  uint64_t read(uint64_t offset, uint64_t size) const {
    if (offset > bytes_.size() || size > bytes_.size() - offset) return 0;
    uint64_t value = 0;
    for (uint64_t i = 0; i < size; ++i) {
      value = value << 8 | bytes_[offset + (big_endian_ ? i : size - 1 - i)];
    }
    return value;
  }

 private:
  std::span<const uint8_t> bytes_;
  bool big_endian_;
};

}  // namespace

Orientation exif_orientation(std::span<const uint8_t> exif) {
  if (exif.size() < 8 || exif[0] != exif[1] || (exif[0] != 'I' && exif[0] != 'M')) return {};
  const TiffBytes tiff(exif, exif[0] == 'M');
  if (tiff.read(2, 2) != 42) return {};
  const uint64_t directory = tiff.read(4, 4);
  const uint64_t entries = tiff.read(directory, 2);
  constexpr uint64_t kEntryBytes = 12, kOrientationTag = 0x0112, kShort = 3;
  for (uint64_t i = 0; i < entries; ++i) {
    const uint64_t entry = directory + 2 + i * kEntryBytes;
    if (tiff.read(entry, 2) != kOrientationTag) continue;
    if (tiff.read(entry + 2, 2) != kShort) return {};
    switch (tiff.read(entry + 8, 2)) {
      case 2: return {.flip_x = true};
      case 3: return {.flip_x = true, .flip_y = true};
      case 4: return {.flip_y = true};
      case 5: return {.transpose = true};
      case 6: return {.transpose = true, .flip_x = true};
      case 7: return {.transpose = true, .flip_x = true, .flip_y = true};
      case 8: return {.transpose = true, .flip_y = true};
      default: return {};
    }
  }
  return {};
}

std::optional<Orientation> matrix_orientation(const std::array<int32_t, 9>& matrix) {
  // Shown x = a x + c y, shown y = b x + d y.
  const int32_t a = matrix[0], b = matrix[1], c = matrix[3], d = matrix[4];
  if (b == 0 && c == 0 && a != 0 && d != 0) return Orientation{false, a < 0, d < 0};
  if (a == 0 && d == 0 && b != 0 && c != 0) return Orientation{true, c < 0, b < 0};
  return std::nullopt;
}

Image upright(Image image, Orientation orientation) {
  if (orientation == Orientation{}) return image;
  Image out{image.height, image.width, {}};
  if (orientation.transpose) std::swap(out.height, out.width);
  out.rgb.resize(image.rgb.size());
  uint8_t* to = out.rgb.data();
  for (int64_t y = 0; y < out.height; ++y) {
    const int64_t from_y = orientation.flip_y ? out.height - 1 - y : y;
    for (int64_t x = 0; x < out.width; ++x) {
      const int64_t from_x = orientation.flip_x ? out.width - 1 - x : x;
      const int64_t pixel =
          orientation.transpose ? from_x * image.width + from_y : from_y * image.width + from_x;
      for (int64_t c = 0; c < 3; ++c) *to++ = image.rgb[size_t(pixel * 3 + c)];
    }
  }
  return out;
}

}  // namespace orrery
