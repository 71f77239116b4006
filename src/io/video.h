// Video files by FFmpeg's libav* libraries.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/image.h"

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

// Encodes frames as they come into a temporary file beside the target; finish() closes it, reads it
// back far enough to see that it holds every frame in the format meant (for H.264: High profile,
// yuv420p, BT.709), and renames it. Destroyed without finish(), it leaves nothing behind. The same
// frames and options give the same bytes.
class VideoWriter {
 public:
  VideoWriter(const std::filesystem::path& file, const VideoOptions& options);
  ~VideoWriter();
  VideoWriter(const VideoWriter&) = delete;
  VideoWriter& operator=(const VideoWriter&) = delete;
  void write(const uint8_t* rgb);  // one frame [height, width, 3]
  void finish();                   // refuses when no frame was written

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// True for .mp4, .mov, .mkv (H.264 and AAC) and .webm (VP9 and Opus), any case.
bool is_video_extension(const std::filesystem::path& file);
// Throws unless a file of this extension can be written by this build, here; call before generation
// starts. Never changes the container: the message offers those that can be written. `sample_rate`:
// of sound that goes into it; 0: none.
void require_video_output(const std::filesystem::path& file, int sample_rate = 0);

struct Video {
  int64_t height = 0;
  int64_t width = 0;
  double fps = 0;                            // 0: one frame and no rate given
  std::vector<std::vector<uint8_t>> frames;  // each [height, width, 3]
};

// Decodes at most max_frames frames (0: all), rotated as the container's display matrix says.
// Frames of varying duration are brought to the most usual rate by repeating and leaving out
// frames. Damaged or truncated files are errors, unless max_frames end before the damage.
Video read_video(const std::filesystem::path& file, int64_t max_frames = 0);

}  // namespace orrery
