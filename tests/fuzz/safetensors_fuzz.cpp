// Any bytes as a safetensors file: faults are reported, or every tensor lies inside the bytes and
// together they cover the data exactly.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "io/safetensors.h"

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // A copy of exactly this size, so that a read past its end is seen.
  const std::unique_ptr<std::byte[]> bytes(new std::byte[size]);
  if (size > 0) std::memcpy(bytes.get(), data, size);
  const std::byte* end = bytes.get() + size;

  orrery::FaultList faults;
  const auto contents = orrery::parse_safetensors({bytes.get(), size}, "fuzz: ", faults);
  if (faults.count() > 0) {
    try {
      faults.raise(orrery::ErrorKind::corrupt, "fuzz");
      check(false);
    } catch (const orrery::Error&) {
    }
    return 0;
  }
  check(contents.header_read);
  size_t total = 0;
  for (const orrery::StoredTensor& tensor : contents.tensors) {
    check(tensor.data >= bytes.get() && tensor.data <= end);
    check(tensor.bytes <= static_cast<size_t>(end - tensor.data));
    if (tensor.dtype) {
      const orrery::View view = orrery::make_view(tensor.data, tensor.shape, *tensor.dtype);
      check(view.contiguous() && view.bytes() == static_cast<int64_t>(tensor.bytes));
    }
    total += tensor.bytes;
  }
  uint64_t header = 0;
  for (size_t i = 0; i < 8; ++i) header |= std::to_integer<uint64_t>(bytes[i]) << (8 * i);
  check(8 + header + total == size);
  return 0;
}
