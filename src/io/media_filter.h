// What some decoded frames go through before they become RGB. Only for the .cpp files that use
// libav.
#pragma once

#include <string>

extern "C" {
#include <libavfilter/avfilter.h>
}

#include "io/av.h"

namespace orrery::av {

using FilterGraph = std::unique_ptr<AVFilterGraph, Deleter<avfilter_graph_free>>;

// Interlaced frames are deinterlaced (bwdif, one frame for each stored one); PQ and HLG are brought
// to BT.709 with 203 cd/m2, the reference white of ITU-R BT.2408, as white, and what is brighter is
// compressed (mobius).
class FrameFilter {
 public:
  // Whether frames like this must go through one.
  static bool is_needed(const AVFrame& frame);
  // For frames like `first`. Refuses by name what this build of FFmpeg cannot do.
  FrameFilter(const AVFrame& first, AVRational time_base, const std::string& name);
  // A frame, whose references it takes, or null at the end.
  void send(AVFrame* frame);
  // False when it wants another frame, or is done. Times are in time_base().
  bool receive(AVFrame* frame);
  AVRational time_base() const;

 private:
  std::string name_;
  FilterGraph graph_;
  AVFilterContext* source_ = nullptr;
  AVFilterContext* sink_ = nullptr;
};

}  // namespace orrery::av
