// How far one clip lies from another.
#pragma once

#include <span>

#include "orrery/request.h"

namespace orrery {

// |x - reference| / |reference| in the Euclidean norm. Equal lengths; 0 when both are zero.
double relative_error(std::span<const float> x, std::span<const float> reference);

// Peak signal-to-noise ratio in dB over all 8-bit RGB values of all frames, peak 255. Infinite for
// equal clips.
double psnr(const Frames& x, const Frames& reference);

// Structural similarity (Wang et al. 2004) of luma (0.299 R + 0.587 G + 0.114 B): Gaussian window
// of 11 x 11 with standard deviation 1.5, K1 = 0.01, K2 = 0.03, range 255. The mean over all
// windows that lie wholly inside a frame, and over the frames. 1 for equal clips. Sides are at
// least 11.
double ssim(const Frames& x, const Frames& reference);

}  // namespace orrery
