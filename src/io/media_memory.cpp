#include "io/media_memory.h"

#include <algorithm>
#include <cstring>
#include <exception>

namespace orrery::av {

MemoryIo Memory::open(const std::string& name, bool to_write) {
  constexpr int kBufferBytes = 1 << 16;
  auto* buffer = static_cast<unsigned char*>(checked(av_malloc(kBufferBytes), name));
  AVIOContext* io = avio_alloc_context(buffer, kBufferBytes, to_write ? 1 : 0, this, read,
                                       to_write ? write : nullptr, seek);
  if (!io) av_free(buffer);
  return MemoryIo(checked(io, name));
}

int Memory::read(void* opaque, uint8_t* out, int size) {
  auto& memory = *static_cast<Memory*>(opaque);
  const int64_t count = std::min<int64_t>(size, std::ssize(memory.bytes()) - memory.at_);
  if (count <= 0) return AVERROR_EOF;
  std::memcpy(out, memory.bytes().data() + memory.at_, size_t(count));
  memory.at_ += count;
  return int(count);
}

// No allocation failure may throw through libav's frames.
int Memory::write(void* opaque, uint8_t* in, int size) {
  auto& memory = *static_cast<Memory*>(opaque);
  std::vector<uint8_t>& bytes = *memory.written_;
  const int64_t end = memory.at_ + size;
  try {
    if (end > std::ssize(bytes)) bytes.resize(size_t(end));
  } catch (const std::exception&) {
    return AVERROR(ENOMEM);
  }
  std::memcpy(bytes.data() + memory.at_, in, size_t(size));
  memory.at_ = end;
  return size;
}

int64_t Memory::seek(void* opaque, int64_t offset, int whence) {
  auto& memory = *static_cast<Memory*>(opaque);
  const int64_t size = std::ssize(memory.bytes());
  if (whence & AVSEEK_SIZE) return size;
  if ((whence & ~AVSEEK_FORCE) == SEEK_CUR) offset += memory.at_;
  if ((whence & ~AVSEEK_FORCE) == SEEK_END) offset += size;
  if (offset < 0 || offset > size) return AVERROR(EINVAL);
  memory.at_ = offset;
  return offset;
}

}  // namespace orrery::av
