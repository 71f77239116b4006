#include "io/video.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "io/frame_reader.h"

namespace orrery {
namespace {

constexpr int64_t kMaxVideoBytes = int64_t{16} << 30;

// Whether no frame is shown twice as long as another: rounded timestamps of a constant rate stay
// below.
bool is_constant_rate(const std::vector<double>& times) {
  double shortest = INFINITY, longest = 0;
  for (size_t i = 1; i < times.size(); ++i) {
    shortest = std::min(shortest, times[i] - times[i - 1]);
    longest = std::max(longest, times[i] - times[i - 1]);
  }
  return longest < 1.75 * shortest;
}

// The frame shown at each tick of the usual (median) rate, from the first frame to the last.
void even_out(Video& video, const std::vector<double>& times, int64_t max_frames,
              const std::string& name) {
  std::vector<double> intervals;
  for (size_t i = 1; i < times.size(); ++i) intervals.push_back(times[i] - times[i - 1]);
  const auto middle = intervals.begin() + std::ssize(intervals) / 2;
  std::nth_element(intervals.begin(), middle, intervals.end());
  if (!(*middle > 0)) return;  // broken timestamps: the order is all there is
  video.fps = 1 / *middle;
  const double last = (times.back() - times.front()) * video.fps;
  const int64_t most = max_frames > 0 ? max_frames : kMaxVideoBytes / std::ssize(video.frames[0]);
  require(max_frames > 0 || last < double(most), ErrorKind::out_of_memory, name,
          ": the frames lie too far apart in time: ", last, " frames at ", video.fps,
          " per second do not fit in memory; give a shorter clip");
  std::vector<std::vector<uint8_t>> frames;
  for (size_t i = 0; i < times.size(); ++i) {
    const double tick = std::round((times[i] - times.front()) * video.fps);
    while (double(frames.size()) < tick && std::ssize(frames) < most) {
      frames.push_back(video.frames[i - 1]);
    }
    if (std::ssize(frames) == most) break;
    if (double(frames.size()) == tick)
      frames.push_back(video.frames[i]);
    else if (!frames.empty())
      frames.back() = video.frames[i];
  }
  video.frames = std::move(frames);
}

}  // namespace

Video read_video(const std::filesystem::path& file, int64_t max_frames) {
  require(max_frames >= 0, file.string(), ": cannot read ", max_frames, " frames");
  FrameReader reader(file, FrameReader::Contents::video);
  Video video;
  std::vector<double> times;
  int64_t bytes = 0;
  while (max_frames == 0 || std::ssize(video.frames) < max_frames) {
    auto frame = reader.next();
    if (!frame) break;
    if (video.frames.empty()) {
      video.height = frame->image.height;
      video.width = frame->image.width;
    }
    require(frame->image.height == video.height && frame->image.width == video.width,
            ErrorKind::unsupported, file.string(), ": the size changes from ", video.width, "x",
            video.height, " to ", frame->image.width, "x", frame->image.height, " at frame ",
            video.frames.size());
    bytes += std::ssize(frame->image.rgb);
    require(bytes <= kMaxVideoBytes, ErrorKind::out_of_memory, file.string(),
            ": the frames take more than ", kMaxVideoBytes >> 30, " GiB; give a shorter clip");
    times.push_back(frame->seconds);
    video.frames.push_back(std::move(frame->image.rgb));
  }
  require(!video.frames.empty(), ErrorKind::corrupt, file.string(), ": the video has no frames");
  video.fps = reader.frame_rate();
  if (!is_constant_rate(times)) even_out(video, times, max_frames, file.string());
  return video;
}

}  // namespace orrery
