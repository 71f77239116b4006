// The two resamplers of the reference (docs/internals/resampling.md) and the canvases built on
// them.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "io/image.h"

namespace orrery {

enum class Filter { triangle, cubic };

// PIL's 8-bit bilinear: fixed-point weights, rounded to 8 bits after each axis. Bit-exact.
Image resize_8bit(const Image& image, int64_t height, int64_t width);

// torch's antialiased resize of planar floats [channels, h, w] in its order of fp32 operations.
std::vector<float> resize_float(std::span<const float> planes, int64_t channels, int64_t h,
                                int64_t w, int64_t height, int64_t width, Filter filter);

// Scaled to cover the frame by the triangle filter, cropped at the centre, rounded to 8 bits.
Image cover_8bit(const Image& image, int64_t height, int64_t width);

// Conditioning image (6.1): cover_8bit(), to [-1, 1]. Planar [3, height, width].
std::vector<float> condition_image(const Image& image, int64_t height, int64_t width);

// Conditioning video frame (6.2): stretched by resize_8bit, to [-1, 1]. Planar [3, height, width].
std::vector<float> condition_frame(const Image& frame, int64_t height, int64_t width);
// Levels as the VAE reads them: planar, in [-1, 1].
std::vector<float> normalized(const Image& image);

// Action canvas (6.3): where frames of h x w land. h and w are rounded down to multiples of 16
// first.
struct ActionGeometry {
  int64_t height = 0, width = 0;                  // canvas, from the tier's bin closest to h / w
  int64_t content_height = 0, content_width = 0;  // what the frames cover after scaling
};
// Tiers: 256, 480, 704, 720.
ActionGeometry action_geometry(int64_t tier, int64_t h, int64_t w);

struct ActionCanvas {
  ActionGeometry geometry;
  int64_t frames = 0;
  std::vector<float>
      pixels;  // planar [3, frames, height, width] in about [-1, 1]: overshoot is kept
};
// Frames of one size; the last is held or the clip cut to num_frames.
ActionCanvas action_canvas(const std::vector<Image>& frames, int64_t num_frames, int64_t tier);

}  // namespace orrery
