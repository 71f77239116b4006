#include "engine/stop.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace orrery {

bool StopWish::together() const {
  const uint8_t mine = token_.stop_requested() ? 1 : 0;
  if (ranks_ == nullptr) return mine != 0;
  std::vector<uint8_t> all(static_cast<size_t>(ranks_->size()));
  ranks_->all_gather(make_mut_view(all.data(), {ranks_->size(), 1}, DType::u8),
                     make_view(&mine, {1}, DType::u8));
  return std::any_of(all.begin(), all.end(), [](uint8_t wish) { return wish != 0; });
}

}  // namespace orrery
