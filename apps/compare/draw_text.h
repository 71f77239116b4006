// Letters on pictures, for labels: a fixed font of 5 x 7 dots, capitals only.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "io/image.h"

namespace orrery {

inline constexpr int64_t kGlyphWidth = 6;   // 5 dots and a gap
inline constexpr int64_t kGlyphHeight = 9;  // 7 dots and a gap

// Draws one line with its upper left corner at (x, y), each dot scale x scale pixels. Small letters
// become capitals; a character without a glyph, every byte beyond ASCII among them, is drawn as a
// box. What does not fit into the picture is cut off.
void draw_text(Image& image, int64_t x, int64_t y, int64_t scale, std::string_view text,
               std::array<uint8_t, 3> colour = {255, 255, 255});

}  // namespace orrery
