// The eight ways a stored picture may have to be turned or mirrored to stand upright.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "io/image.h"

namespace orrery {

// Rows and columns are swapped first, then the result is mirrored.
struct Orientation {
  bool transpose = false;
  bool flip_x = false;
  bool flip_y = false;
  bool operator==(const Orientation&) const = default;
};

// Orientation tag of an EXIF block ("II" or "MM" TIFF header first); upright when it has none or is
// damaged.
Orientation exif_orientation(std::span<const uint8_t> exif);

// From a container's 3 x 3 display matrix; empty when it is not a turn by quarters.
std::optional<Orientation> matrix_orientation(const std::array<int32_t, 9>& matrix);

Image upright(Image image, Orientation orientation);

}  // namespace orrery
