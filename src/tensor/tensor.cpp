#include "tensor/tensor.h"

#include <cstdlib>
#include <limits>
#include <utility>

#include "base/error.h"

namespace orrery {

namespace {
constexpr size_t kHostAlignment = 256;  // not less than an arena promises
constexpr size_t kArenaAlignment = 256;
size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }
}  // namespace

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this == &other) return *this;
  reset();
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  device_ = other.device_;
  release_ = std::exchange(other.release_, nullptr);
  context_ = other.context_;
  return *this;
}

void Buffer::reset() {
  if (data_ && release_) release_(context_, data_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
  release_ = nullptr;
}

Buffer allocate_host(size_t bytes) {
  // No allocation is larger, and rounding up must not wrap.
  constexpr size_t kLargest = std::numeric_limits<size_t>::max() / 2;
  const size_t size = round_up(bytes ? bytes : 1, kHostAlignment);
  void* data = bytes <= kLargest ? std::aligned_alloc(kHostAlignment, size) : nullptr;
  require(data != nullptr, ErrorKind::out_of_memory, "host memory: cannot allocate ", bytes,
          " bytes");
  return Buffer(
      data, size, DeviceKind::cpu, [](void*, void* p, size_t) { std::free(p); }, nullptr);
}

Tensor allocate_host_tensor(Shape shape, DType dtype) {
  Tensor tensor;
  tensor.buffer = allocate_host(static_cast<size_t>(shape.numel() * size_of(dtype)));
  tensor.view = make_mut_view(tensor.buffer.data(), shape, dtype);
  return tensor;
}

Arena::Arena(Buffer buffer)
    : buffer_(std::move(buffer)),
      base_(static_cast<std::byte*>(buffer_.data())),
      capacity_(buffer_.bytes()),
      device_(buffer_.device()) {}

Arena Arena::measuring(DeviceKind device) {
  Arena arena;
  // Any non-null address will do: nothing reads or writes behind it.
  arena.base_ = reinterpret_cast<std::byte*>(uintptr_t{1} << 40);
  arena.capacity_ = std::numeric_limits<size_t>::max() / 2;
  arena.device_ = device;
  arena.measuring_ = true;
  return arena;
}

MutView Arena::make(Shape shape, DType dtype) {
  const size_t bytes =
      round_up(static_cast<size_t>(shape.numel() * size_of(dtype)), kArenaAlignment);
  require(bytes <= capacity_ - used_, ErrorKind::out_of_memory, "arena: ", shape, " ",
          name_of(dtype), " needs ", bytes, " bytes, but ", capacity_ - used_, " of ", capacity_,
          " are left");
  MutView view = make_mut_view(base_ + used_, shape, dtype, device_);
  used_ += bytes;
  if (used_ > peak_) peak_ = used_;
  return view;
}

}  // namespace orrery
