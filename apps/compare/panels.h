// The pictures of a comparison of attention strategies.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "orrery/compare.h"

namespace orrery {

// Frame `index` of every strategy side by side, each under a label of its name, speed-up and kept
// blocks. At most `columns` panels a row. Sides are even.
Frames side_by_side(const std::vector<StrategyOutcome>& outcomes, int64_t index,
                    int64_t columns = 4);
// One row a strategy: its label and `columns` frames from the first to the last, panel_width wide
// or smaller.
Frames contact_sheet(const std::vector<StrategyOutcome>& outcomes, int64_t columns = 5,
                     int64_t panel_width = 160);
// The bytes of a video of all frames side by side, of the container that the extension of `name`
// names.
std::vector<uint8_t> encode_side_by_side(const std::vector<StrategyOutcome>& outcomes,
                                         const std::string& name, int crf = 18);

}  // namespace orrery
