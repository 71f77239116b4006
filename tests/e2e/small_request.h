// A request that the shipped checkpoint answers quickly.
#pragma once

#include "orrery/request.h"

namespace orrery::e2e {

// Two steps with guidance 3.
inline Request small_request(int64_t height, int64_t width, int64_t frames) {
  Request request;
  request.prompt = "A small red circle moves left on a black background.";
  request.height = height;
  request.width = width;
  request.num_frames = frames;
  request.num_inference_steps = 2;
  request.guidance_scale = 3;
  return request;
}

}  // namespace orrery::e2e
