// Opens a checkpoint and writes a clip: embed CHECKPOINT CLIP.mp4
#include <orrery/orrery.h>

#include <cstdio>

int main(int argc, char** argv) try {
  if (argc != 3) return std::fprintf(stderr, "usage: embed CHECKPOINT CLIP.mp4\n"), 2;
  orrery::Engine engine = orrery::Engine::open(argv[1]);
  orrery::Request request;
  request.prompt = "A small red circle moves left on a black background.";
  request.height = request.width = 64;
  request.num_frames = 5;
  request.num_inference_steps = 4;
  const orrery::Result result = engine.generate(request);
  orrery::save_output(argv[2], result);
} catch (const orrery::Error& error) {
  return std::fprintf(stderr, "embed: %s\n", error.what()), 1;
}
