// Memory that the rooms of a WeightLayout are made in.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "backend/backend.h"
#include "io/safetensors.h"
#include "model/weight_layout.h"

namespace orrery {

// Keeps alive whatever the views of a loaded weights struct point into: mappings or buffers.
class WeightStore {
 public:
  int64_t bytes() const { return bytes_; }  // held in memory by this rank, mapped pages included
  void release();                           // the views into it dangle afterwards

  void keep(Buffer buffer) { buffers_.push_back(std::move(buffer)); }
  void keep(Safetensors files) { files_ = std::move(files); }
  void count(int64_t bytes) { bytes_ += bytes; }

 private:
  std::optional<Safetensors> files_;
  std::vector<Buffer> buffers_;
  int64_t bytes_ = 0;
};

// Memory that rooms are laid into one after another. What is written at `write` is read at `read`,
// the same places of two blocks, or of one.
struct WeightBlock {
  std::byte* write = nullptr;  // null: the rooms' places only
  std::byte* read = nullptr;
  DeviceKind write_device = DeviceKind::cpu, read_device = DeviceKind::cpu;
  size_t capacity = 0;
  size_t used = 0;
};

// Makes rooms in buffers of their own, which the store keeps, or in a block.
class WeightMemory {
 public:
  WeightMemory(Backend& backend, WeightStore& store) : backend_(backend), store_(&store) {}
  WeightMemory(Backend& backend, WeightBlock& block) : backend_(backend), block_(&block) {}

  struct Room {
    MutOperand write;  // empty where nothing is written
    Operand read;
  };
  Room make(const WeightRoom& room);
  // Whether the backend writes: else the calling thread does, and several may fill their blocks.
  bool on_backend() const { return block_ == nullptr || block_->write == block_->read; }
  // Whether a room may lie where it is found instead, in files or in host memory.
  bool is_block() const { return block_ != nullptr; }
  // Only without a block.
  WeightStore& store() const { return *store_; }

 private:
  Backend& backend_;
  WeightStore* store_ = nullptr;
  WeightBlock* block_ = nullptr;
};

}  // namespace orrery
