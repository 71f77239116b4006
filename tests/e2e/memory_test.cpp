// What requests leave behind.
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "orrery/engine.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// B83: memory is flat after the first requests, also where shapes change and one is stopped
// half-way.
TEST(Memory, StaysFlatOverRequests) {
  EngineOptions options;
  options.num_threads = 1;
  Engine engine = Engine::open(source_dir() / "models/cosmos3-pico", options);
  Request request;
  request.prompt = "A small red circle moves left on a black background.";
  request.num_inference_steps = 1;
  const auto round = [&] {
    for (const auto& [height, width, frames] : {std::array{32, 32, 5}, {32, 64, 1}, {48, 32, 1}}) {
      request.height = height;
      request.width = width;
      request.num_frames = frames;
      engine.generate(request);
    }
    std::stop_source stop;
    const auto stop_at_denoising = [&](const Progress& progress) {
      if (progress.stage == "denoise") stop.request_stop();
    };
    EXPECT_THROW(engine.generate(request, {stop_at_denoising, {}}, stop.get_token()), Error);
  };
  for (int i = 0; i < 2; ++i) round();
  const int64_t before = resident_bytes();
  for (int i = 0; i < 6; ++i) round();
  // 24 requests of a few hundred kB of results and state each would show; allocators keep some
  // pages.
  EXPECT_LT(resident_bytes() - before, 4 << 20);
}

}  // namespace
}  // namespace orrery
