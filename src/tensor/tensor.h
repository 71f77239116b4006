// Owners of tensor memory: Buffer, Tensor (a buffer with a shape) and Arena (bump allocation).
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/view.h"

namespace orrery {

// Move-only owner of bytes on one device. The release function and its context come from whoever
// allocated (a backend, which outlives its buffers).
class Buffer {
 public:
  using Release = void (*)(void* context, void* data, size_t bytes);
  Buffer() = default;
  Buffer(void* data, size_t bytes, DeviceKind device, Release release, void* context)
      : data_(data), bytes_(bytes), device_(device), release_(release), context_(context) {}
  Buffer(Buffer&& other) noexcept { *this = static_cast<Buffer&&>(other); }
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer() { reset(); }
  void reset();

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  DeviceKind device() const { return device_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  DeviceKind device_ = DeviceKind::cpu;
  Release release_ = nullptr;
  void* context_ = nullptr;
};

// A host buffer, 256-byte aligned. Throws Error{out_of_memory} naming the size.
Buffer allocate_host(size_t bytes);

struct Tensor {
  Buffer buffer;
  MutView view;
  explicit operator bool() const { return static_cast<bool>(view); }
};
Tensor allocate_host_tensor(Shape shape, DType dtype);

// Bump allocator for activations. Memory comes back when a Scope ends. An arena made with
// Arena::measuring() has no memory behind it: a dry run through it finds the peak that a real one
// of the same calls needs. One arena serves one stream of work; not thread-safe.
class Arena {
 public:
  explicit Arena(Buffer buffer);
  static Arena measuring(DeviceKind device);

  // 256-byte aligned, uninitialised. Throws Error{out_of_memory} naming need and capacity.
  MutView make(Shape shape, DType dtype);
  size_t peak() const { return peak_; }
  size_t used() const { return used_; }
  size_t capacity() const { return capacity_; }
  bool is_measuring() const { return measuring_; }

  class Scope {
   public:
    explicit Scope(Arena& arena) : arena_(arena), mark_(arena.used_) {}
    ~Scope() { arena_.used_ = mark_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Arena& arena_;
    size_t mark_;
  };

 private:
  Arena() = default;
  Buffer buffer_;
  std::byte* base_ = nullptr;
  size_t capacity_ = 0;
  size_t used_ = 0;
  size_t peak_ = 0;
  DeviceKind device_ = DeviceKind::cpu;
  bool measuring_ = false;
};

}  // namespace orrery
