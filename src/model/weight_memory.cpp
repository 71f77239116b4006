#include "model/weight_memory.h"

#include "base/error.h"

namespace orrery {

void WeightStore::release() {
  buffers_.clear();
  files_.reset();
  bytes_ = 0;
}

WeightMemory::Room WeightMemory::make(const WeightRoom& room) {
  const auto bytes = static_cast<size_t>(room.bytes());
  if (block_ == nullptr) {
    Buffer buffer = backend_.allocate(bytes);
    const MutOperand made = room.at(static_cast<std::byte*>(buffer.data()), backend_.device());
    store_->keep(std::move(buffer));
    store_->count(room.bytes());
    return {made, made};
  }
  WeightBlock& block = *block_;
  require(block.used + bytes <= block.capacity, "weights: a block of ", block.capacity,
          " bytes has no room for ", room.shape, " behind ", block.used);
  const auto at = [&](std::byte* base, DeviceKind device) {
    return room.at(base == nullptr ? nullptr : base + block.used, device);
  };
  const Room made{at(block.write, block.write_device), at(block.read, block.read_device)};
  block.used += bytes;
  return made;
}

}  // namespace orrery
