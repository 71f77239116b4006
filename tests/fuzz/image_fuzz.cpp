// Any bytes are a picture or an Error, never anything else.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "base/error.h"
#include "io/image.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const orrery::Image image = orrery::decode_image({data, size}, "fuzz");
    if (int64_t(image.rgb.size()) != image.height * image.width * 3) std::abort();
  } catch (const orrery::Error&) {
  }
  return 0;
}
