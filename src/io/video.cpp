#include "io/video.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <iterator>
#include <optional>
#include <utility>

#include "base/error.h"
#include "io/frame_reader.h"
#include "io/resize.h"

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

// Of rounded or missing timestamps the order is all there is: then 0.
double usual_rate(const std::vector<double>& times) {
  std::vector<double> intervals;
  for (size_t i = 1; i < times.size(); ++i) intervals.push_back(times[i] - times[i - 1]);
  const auto middle = intervals.begin() + std::ssize(intervals) / 2;
  std::nth_element(intervals.begin(), middle, intervals.end());
  return *middle > 0 ? 1 / *middle : 0;
}

// The frames kept so far, of either end.
class Kept {
 public:
  explicit Kept(const ClipLimits& limits) : limits_(limits) {}

  bool is_full() const {
    return limits_.keep == VideoKeep::first && limits_.max_frames > 0 &&
           std::ssize(frames_) >= limits_.max_frames;
  }
  bool keeps_last() const { return limits_.keep == VideoKeep::last && limits_.max_frames > 0; }
  int64_t most() const { return limits_.max_frames; }
  void add(std::vector<uint8_t> frame, const std::string& name) {
    bytes_ += std::ssize(frame);
    frames_.push_back(std::move(frame));
    if (limits_.max_frames > 0 && std::ssize(frames_) > limits_.max_frames) {
      bytes_ -= std::ssize(frames_.front());
      frames_.pop_front();
      cut_ = true;
    }
    require(bytes_ <= kMaxVideoBytes, ErrorKind::out_of_memory, name,
            ": the frames take more than ", kMaxVideoBytes >> 30, " GiB; give a shorter clip");
  }
  const std::vector<uint8_t>& back() const { return frames_.back(); }
  void replace_back(std::vector<uint8_t> frame) { frames_.back() = std::move(frame); }
  // Whether frames at the front were left out.
  bool is_cut() const { return cut_; }
  std::vector<std::vector<uint8_t>> take() {
    return {std::make_move_iterator(frames_.begin()), std::make_move_iterator(frames_.end())};
  }

 private:
  const ClipLimits& limits_;
  std::deque<std::vector<uint8_t>> frames_;
  int64_t bytes_ = 0;
  bool cut_ = false;
};

using Opener = std::function<std::unique_ptr<FrameReader>()>;

// Frames of one clip, each as `limits` ask for it.
class Source {
 public:
  Source(const Opener& open, const ClipLimits& limits, const std::string& name)
      : reader_(open()), limits_(limits), name_(name) {}

  std::optional<FrameReader::Frame> next() {
    auto frame = reader_->next();
    if (!frame) return frame;
    Image& image = frame->image;
    if (count_++ == 0) {
      height_ = image.height;
      width_ = image.width;
    }
    require(image.height == height_ && image.width == width_, ErrorKind::unsupported, name_,
            ": the size changes from ", width_, "x", height_, " to ", image.width, "x",
            image.height, " at frame ", count_ - 1);
    if (limits_.height > 0 && limits_.width > 0) {
      image = limits_.fit == VideoFit::cover ? cover_8bit(image, limits_.height, limits_.width)
                                             : resize_8bit(image, limits_.height, limits_.width);
    }
    return frame;
  }
  double frame_rate() const { return reader_->frame_rate(); }

 private:
  std::unique_ptr<FrameReader> reader_;
  const ClipLimits& limits_;
  const std::string& name_;
  int64_t count_ = 0, height_ = 0, width_ = 0;
};

// The frame shown at each tick of `rate`, from the first frame to the last.
class Ticks {
 public:
  Ticks(Kept& kept, double start, double rate) : kept_(kept), start_(start), rate_(rate) {}

  void add(std::vector<uint8_t> frame, double seconds, const std::string& name) {
    const double tick = std::round((seconds - start_) * rate_);
    // Of a long pause before the last frames no more is made than can be kept.
    if (kept_.keeps_last()) {
      made_ = std::max(made_, int64_t(std::min(tick, 1e15)) - kept_.most());
    }
    while (double(made_) < tick && made_ > 0 && !kept_.is_full()) put(kept_.back(), name);
    if (kept_.is_full()) return;
    if (double(made_) <= tick) {
      put(std::move(frame), name);
    } else {
      kept_.replace_back(std::move(frame));
    }
  }

 private:
  void put(std::vector<uint8_t> frame, const std::string& name) {
    kept_.add(std::move(frame), name);
    ++made_;
  }
  Kept& kept_;
  double start_, rate_;
  int64_t made_ = 0;
};

Video decode(const Opener& open, const ClipLimits& limits, const std::string& name) {
  require(limits.max_frames >= 0, name, ": cannot read ", limits.max_frames, " frames");
  Source source(open, limits, name);
  Kept kept(limits);
  Video video;
  std::vector<double> times;
  while (!kept.is_full()) {
    auto frame = source.next();
    if (!frame) break;
    video.height = frame->image.height;
    video.width = frame->image.width;
    times.push_back(frame->seconds);
    kept.add(std::move(frame->image.rgb), name);
  }
  require(!times.empty(), ErrorKind::corrupt, name, ": the video has no frames");
  video.fps = source.frame_rate();
  const double rate = is_constant_rate(times) ? 0 : usual_rate(times);
  if (rate == 0) {
    video.frames = kept.take();
    return video;
  }
  const double ticks = (times.back() - times.front()) * rate;
  const int64_t most =
      limits.max_frames > 0 ? limits.max_frames : kMaxVideoBytes / (video.height * video.width * 3);
  require(limits.max_frames > 0 || ticks < double(most), ErrorKind::out_of_memory, name,
          ": the frames lie too far apart in time: ", ticks, " frames at ", rate,
          " per second do not fit in memory; give a shorter clip");
  video.fps = rate;
  Kept even(limits);
  Ticks clock(even, times.front(), rate);
  if (kept.is_cut()) {  // the rate is known only now: decoded a second time
    Source again(open, limits, name);
    while (auto frame = again.next()) clock.add(std::move(frame->image.rgb), frame->seconds, name);
  } else {
    size_t i = 0;
    for (std::vector<uint8_t>& frame : kept.take()) clock.add(std::move(frame), times[i++], name);
  }
  video.frames = even.take();
  return video;
}

}  // namespace

VideoWriter::VideoWriter(const std::filesystem::path& file, const VideoOptions& options)
    : file_(file), encoder_(file.string(), options) {}

void VideoWriter::finish() {
  file_.write(encoder_.finish());
  file_.commit();
}

Video read_video(const std::filesystem::path& file, const ClipLimits& limits) {
  const auto open = [&] {
    return std::make_unique<FrameReader>(file, FrameReader::Contents::video);
  };
  return decode(open, limits, file.string());
}

Video decode_video(std::span<const uint8_t> bytes, const ClipLimits& limits,
                   const std::string& name) {
  const auto open = [&] {
    return std::make_unique<FrameReader>(bytes, name, FrameReader::Contents::video);
  };
  return decode(open, limits, name);
}

}  // namespace orrery
