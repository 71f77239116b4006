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

// A position in bytes. They, and this object, must outlive what it opens.
class Memory {
 public:
  explicit Memory(std::span<const uint8_t> bytes) : read_(bytes) {}
  // Another one may write them meanwhile.
  explicit Memory(std::vector<uint8_t>& bytes) : written_(&bytes) {}

  MemoryIo open_to_read(const std::string& name) { return open(name, false); }
  // Of a vector, which grows.
  MemoryIo open_to_write(const std::string& name) { return open(name, true); }

 private:
  MemoryIo open(const std::string& name, bool to_write);
  std::span<const uint8_t> bytes() const { return written_ ? *written_ : read_; }
  static int read(void* opaque, uint8_t* out, int size);
  static int write(void* opaque, uint8_t* in, int size);
  static int64_t seek(void* opaque, int64_t offset, int whence);

  std::span<const uint8_t> read_;
  std::vector<uint8_t>* written_ = nullptr;
  int64_t at_ = 0;
};

}  // namespace orrery::av
