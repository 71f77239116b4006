// Structural control (docs/modes.md, Transfer): which frames a chunk is made of, what it
// is conditioned on and how its guidance is put together. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/settings.h"

namespace orrery {

// What is recommended for the hints of a request: that of the hint if there is one, else the values
// most of them share.
struct TransferDefaults {
  double guidance = 3;
  double control_guidance = 1.5;
  double fps = 24;
  int64_t chunk = 0;  // frames made at once; 0: all
};
TransferDefaults transfer_defaults(const TransferRequest& transfer);
// Frames a second when the request names none.
double transfer_fps(const Request& request);

// What a control is read or computed from.
const Frames& control_source(const Request& request, const Control& control);
// How a control without a video of its own is computed.
ControlPreset preset_of(const Control& control);

void resolve_transfer(const Request& request, const Checkpoint& checkpoint, Settings& settings);

// How `total` frames fall into chunks of `wanted` (rounded up to temporal * n + 1) that overlap.
struct ChunkPlan {
  int64_t chunk = 0;
  int64_t stride = 0;
  int64_t count = 1;
};
ChunkPlan plan_chunks(int64_t total, int64_t wanted, int64_t overlap, int64_t temporal);

// Frame indexes of a clip of `length` frames made `padded` long by running back and forth; the
// frame at either turn is shown twice: 0 1 2 2 1 0 0 1 ...
std::vector<int64_t> back_and_forth(int64_t length, int64_t padded);

// The frames of control `hint` that chunk `index` sees.
std::vector<int64_t> control_frames(const Settings& settings, int64_t length, int64_t index);
// The same as the VAE reads them, planar [3, chunk, height, width] in [-1, 1]: those of the control
// that is `which` in the settings' order. On `threads` threads.
std::vector<float> control_pixels(const Request& request, const Settings& settings, size_t which,
                                  int64_t index, int threads);

// With `frames` pixel frames fixed at the start of `latent_frames`.
Conditioning condition_first(int64_t frames, int64_t latent_frames, const VaeConfig& vae);
// Of chunk `index`; that of the first is the settings' own.
Conditioning chunk_conditioning(const Settings& settings, int64_t index, const VaeConfig& vae);

// Factors of the three velocities at a timestep: with prompt and controls, with the prompt alone,
// with the negative prompt and controls. A factor of 0 needs no evaluation.
struct GuidanceFactors {
  double full = 1, plain = 0, negative = 0;
};
GuidanceFactors transfer_guidance(const Settings& settings, double timestep);

}  // namespace orrery
