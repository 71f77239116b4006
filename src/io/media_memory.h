// Blocks of memory as files of libav. Only for the .cpp files that use libav.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/av.h"

namespace orrery::av {

inline void free_memory_io(AVIOContext** io) {
  if (*io) av_freep(&(*io)->buffer);
  avio_context_free(io);
}
using MemoryIo = std::unique_ptr<AVIOContext, Deleter<free_memory_io>>;

// A position in bytes that may be read and, where they are owned, written.
class Memory {
 public:
  // Both must outlive what open() returns.
  explicit Memory(std::span<const uint8_t> bytes) : read_(bytes) {}
  explicit Memory(std::vector<uint8_t>& bytes) : written_(&bytes) {}

  MemoryIo open(const std::string& name);

 private:
  std::span<const uint8_t> bytes() const { return written_ ? *written_ : read_; }
  static int read(void* opaque, uint8_t* out, int size);
  static int write(void* opaque, uint8_t* in, int size);
  static int64_t seek(void* opaque, int64_t offset, int whence);

  std::span<const uint8_t> read_;
  std::vector<uint8_t>* written_ = nullptr;
  int64_t at_ = 0;
};

}  // namespace orrery::av
