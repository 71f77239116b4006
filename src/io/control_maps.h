// Edge and blur controls made from the frames themselves (docs/modes.md, Transfer): what
// OpenCV's Canny, resize and bilateralFilter make of them, which the models were trained on.
#pragma once

#include <cstdint>
#include <string_view>

#include "io/image.h"

namespace orrery {

struct EdgeThresholds {
  int lower = 100, upper = 200;
};
// The frame is made `shrink` times smaller, smoothed, brought back, and then loses what a picture
// `coarse` times smaller cannot hold. 0 and 0: the frame itself.
struct BlurStrength {
  int64_t shrink = 2, coarse = 10;
};
// Presets by the public names: very_low, low, medium, high, very_high, none.
EdgeThresholds edge_preset(std::string_view name);
BlurStrength blur_preset(std::string_view name);

// White edges on black. Gradients by 3 x 3 Sobel over replicated borders, of each pixel's strongest
// channel; a pixel on a ridge is an edge above `upper`, or above `lower` when a chain of such
// pixels joins it to one.
Image edge_map(const Image& frame, EdgeThresholds thresholds);

// Sides must be multiples of `shrink`.
Image blur_map(const Image& frame, BlurStrength strength);

// The parts of blur_map().
// Mean of blocks of factor x factor pixels.
Image shrink_by_area(const Image& image, int64_t factor);
// Neither widens its filter when the picture gets smaller; borders are replicated.
enum class Interpolation { linear, cubic };
Image interpolate(const Image& image, int64_t height, int64_t width, Interpolation how);
// Mean of the pixels in a disc, weighted by a Gaussian of distance and one of the sum of the
// channels' differences. Borders are mirrored.
Image smooth_bilateral(const Image& image, int diameter, double sigma_color, double sigma_space);

}  // namespace orrery
