// What a caller is told while a request runs, and what it gets: plain data.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "orrery/export.h"
#include "orrery/request.h"

namespace ORRERY_API orrery {

// What one attention preset did in the generation tower of a run.
struct AttentionUse {
  std::string preset;
  std::string implementation;  // what the backend ran
  int64_t calls = 0;
  int64_t dense_calls = 0;  // of the calls: those that know no blocks and read every key
  int64_t kept_blocks = 0;  // of the other calls, over all heads
  int64_t all_blocks = 0;
  double seconds = 0;  // 0 unless the run was profiled
};
// Mean over the calls of the share of key blocks that were read; a dense call reads all of them.
double kept_share(const std::vector<AttentionUse>& uses);
// One line for people.
std::string to_text(const AttentionUse& use);

// What one stage took.
struct StageTime {
  std::string name;  // as in Progress
  int64_t chunk = 0;
  double seconds = 0;
  double processor_seconds = 0;  // of all threads of this process
  double flops = 0;
};

struct Times {
  double open_seconds = 0;           // of the engine
  std::vector<StageTime> stages;     // in the order in which they ran
  std::vector<double> step_seconds;  // denoising steps of all chunks
  // From the process's start to the end of the first denoising step.
  double first_step_after_start_seconds = 0;

  // The stages of this name, over all chunks.
  StageTime stage(std::string_view name) const;
  // Opening and all stages.
  double total_seconds() const;
};

// Bytes.
struct MemoryUse {
  int64_t weights = 0;           // of all parts
  int64_t resident_weights = 0;  // of them, on the device between requests
  bool text_stays = false;       // whether the text tower is among them (Resident)
  int64_t pinned = 0;            // host memory that layers are copied from
  int64_t arena = 0;             // activations
  int64_t peak_resident = 0;     // of this process
  // Of the device; 0 without one.
  int64_t device_peak = 0, device_free = 0, device_total = 0;
};

struct Result {
  Frames frames;
  double fps = 24;
  FloatTensor latents;                    // final, normalised, [1, C, T, h, w]
  std::vector<std::vector<float>> sound;  // planar [channels][samples]; empty without sound
  int64_t sampling_rate = 0;
  std::optional<FloatTensor> action;    // [chunk, raw width], model-normalised
  std::vector<AttentionUse> attention;  // one entry for each preset that ran
  Times times;
  MemoryUse memory;
  std::string report;  // JSON: settings, seed, versions, times, memory, dispatch
  std::map<std::string, std::string> metadata;  // what an output file should carry
};

// How far a request is. Told at the beginning of each stage (step 0), after each of its units, and
// once at its end (step == total).
struct Progress {
  // In their order: "guardrail", "prompt"; for each chunk "encode", "noise", "load", "warm-up",
  // "denoise", "decode"; "sound", "guardrail". Only those that the request has.
  std::string stage;
  int64_t step = 0;  // finished, of total: denoising steps, frames of a decode, else one
  int64_t total = 0;
  int64_t chunk = 0;  // from 0, of chunks
  int64_t chunks = 1;
  double seconds = 0;       // since the stage began
  double step_seconds = 0;  // what the step that finished last took; 0 before the first
  // Of the whole request, from the costs of what remains (a sparse step counts less than a dense
  // one; decoding counts) and the rates measured so far. None before a rate is known, which an
  // engine's earlier requests tell too. Loading and the guardrail count only once an earlier chunk
  // has shown what they take.
  std::optional<double> seconds_left;
};
using ProgressCallback = std::function<void(const Progress&)>;

// Frames [first, first + count) of the result, 8-bit RGB; valid during the call that tells them.
struct FrameSpan {
  int64_t first = 0, count = 0, height = 0, width = 0;
  const uint8_t* rgb = nullptr;
};

// What an engine calls while a request runs, on the thread of rank 0; each may be empty.
struct Events {
  ProgressCallback progress = {};
  // Every frame of the result once, in order, as soon as it is decoded; with a guardrail all at
  // once, after its approval.
  std::function<void(const FrameSpan&)> frames = {};
};

}  // namespace orrery
