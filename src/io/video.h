// Video files by FFmpeg's libav* libraries.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/image.h"
#include "orrery/media.h"
#include "orrery/output.h"

namespace orrery {

struct VideoOptions {
  int64_t height = 0;
  int64_t width = 0;  // even sizes are needed by yuv420p: odd ones are refused by name
  double fps = 24;    // written as an exact rational (24000/1001 for 23.976)
  int crf = 18;       // 1 (best) to 51; 0 would switch H.264 to a lossless profile few players know
  std::map<std::string, std::string> metadata;  // container tags ("comment", "title", ...)
  // Stereo or mono float samples in [-1, 1], planar [channels][samples]; empty: no sound. AAC.
  std::vector<std::vector<float>> audio;
  int sample_rate = 48000;
};

// Encodes frames as they come, into memory. finish() completes the file and reads it back far
// enough to see that it holds every frame in the format meant (for H.264: High profile, yuv420p,
// BT.709). The same frames and options give the same bytes.
class VideoEncoder {
 public:
  // The extension of `name` chooses the container; messages begin with it.
  VideoEncoder(const std::string& name, const VideoOptions& options);
  ~VideoEncoder();
  VideoEncoder(const VideoEncoder&) = delete;
  VideoEncoder& operator=(const VideoEncoder&) = delete;
  void write(const uint8_t* rgb);  // one frame [height, width, 3]
  // The whole file. Refuses when no frame was written.
  std::vector<uint8_t> finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The same into an output file, which appears at finish().
class VideoWriter {
 public:
  VideoWriter(const std::filesystem::path& file, const VideoOptions& options);
  void write(const uint8_t* rgb) { encoder_.write(rgb); }
  void finish();

 private:
  OutputFile file_;
  VideoEncoder encoder_;
};

// True for .mp4, .mov, .mkv (H.264 and AAC) and .webm (VP9 and Opus), any case.
bool is_video_extension(const std::filesystem::path& file);
// Throws unless a file of this extension can be written by this build; call before generation
// starts. Never changes the container: the message offers those that can be written. `sample_rate`:
// of sound that goes into it; 0: none.
void require_video_output(const std::filesystem::path& file, int sample_rate = 0);

struct Video {
  int64_t height = 0;
  int64_t width = 0;
  double fps = 0;                            // 0: one frame and no rate given
  std::vector<std::vector<uint8_t>> frames;  // each [height, width, 3]
};

// Decodes the frames that `limits` ask for, upright, progressive and in BT.709: frames are turned
// as the container's display matrix says, interlaced ones deinterlaced, PQ and HLG brought to
// standard dynamic range. Each is brought to the size asked for as it is decoded, so that memory
// holds the frames kept at that size and no more. Frames of varying duration are brought to the
// most usual rate by repeating and leaving out frames. Damaged or truncated files are errors,
// unless the frames kept end before the damage.
Video read_video(const std::filesystem::path& file, const ClipLimits& limits = {});
// The same from memory; messages begin with `name`.
Video decode_video(std::span<const uint8_t> bytes, const ClipLimits& limits,
                   const std::string& name);

}  // namespace orrery
