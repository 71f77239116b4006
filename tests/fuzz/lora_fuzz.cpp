// Any bytes as an adapter of a network of two matrices: what fits, or an Error.
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "base/error.h"
#include "model/lora.h"

namespace {

// Adapters are mapped, so they need a file: one for each process, never on a disk where it matters.
const std::filesystem::path& scratch_file() {
  static const std::filesystem::path file =
      std::filesystem::temp_directory_path() / ("orrery-lora-fuzz-" + std::to_string(::getpid()));
  return file;
}

void write(const uint8_t* data, size_t size) {
  std::FILE* file = std::fopen(scratch_file().c_str(), "wb");
  if (file == nullptr || std::fwrite(data, 1, size, file) != size) std::abort();
  std::fclose(file);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  write(data, size);
  orrery::Linear q, out;
  const auto visit = [&](orrery::WeightVisitor& v) {
    v.linear(q, {"layers.0.self_attn.to_q", "layers.0.self_attn.to_k"}, {4, 2}, 4,
             orrery::Split::none, false);
    v.linear(out, {"layers.0.self_attn.to_out"}, {4}, 4, orrery::Split::none, false);
  };
  try {
    const orrery::LoraAdapters adapters({{scratch_file()}}, visit);
    const std::vector<float> zeros(16);
    const orrery::View stored = orrery::make_view(zeros.data(), {4, 4}, orrery::DType::f32);
    adapters.merged("layers.0.self_attn.to_q.weight", stored, orrery::DType::f32);
  } catch (const orrery::Error&) {
  }
  std::filesystem::remove(scratch_file());
  return 0;
}
