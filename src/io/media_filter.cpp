#include "io/media_filter.h"

extern "C" {
#include <libavfilter/buffersink.h>
#include <libavfilter/buffersrc.h>
}

#include <algorithm>

namespace orrery::av {
namespace {

bool is_high_range(const AVFrame& frame) {
  const int curve = number_of(frame.color_trc);
  return curve == AVCOL_TRC_SMPTE2084 || curve == AVCOL_TRC_ARIB_STD_B67;
}

void check(int code, const std::string& name, const char* what) {
  if (code >= 0) return;
  fail(code == AVERROR(ENOMEM) ? ErrorKind::out_of_memory : ErrorKind::unsupported, name, ": ",
       what, " failed (", message(code), ")");
}

void require_filter(const char* filter, const std::string& name, const char* why) {
  require(avfilter_get_by_name(filter) != nullptr, ErrorKind::unsupported, name, ": ", why,
          ", for which this build of FFmpeg lacks the filter ", filter,
          "; convert the clip to progressive BT.709 first");
}

std::string description(const AVFrame& frame, const std::string& name) {
  std::string filters;
  if (frame.interlaced_frame) {
    require_filter("bwdif", name, "the clip is interlaced");
    filters += "bwdif=mode=send_frame:deint=interlaced,";
  }
  if (is_high_range(frame)) {
    require_filter("zscale", name, "the clip is of high dynamic range (PQ or HLG)");
    require_filter("tonemap", name, "the clip is of high dynamic range (PQ or HLG)");
    filters +=
        "zscale=transfer=linear:npl=203,format=gbrpf32le,zscale=primaries=bt709,"
        "tonemap=tonemap=mobius:desat=0,zscale=transfer=bt709:matrix=bt709:range=limited,"
        "format=yuv420p,";
  }
  filters.pop_back();
  return filters;
}

}  // namespace

bool FrameFilter::is_needed(const AVFrame& frame) {
  return frame.interlaced_frame != 0 || is_high_range(frame);
}

FrameFilter::FrameFilter(const AVFrame& first, AVRational time_base, const std::string& name)
    : name_(name), graph_(checked(avfilter_graph_alloc(), name)) {
  graph_->nb_threads = 1;
  const auto add = [&](const char* filter, const char* instance) {
    return checked(
        avfilter_graph_alloc_filter(graph_.get(), avfilter_get_by_name(filter), instance), name_);
  };
  source_ = add("buffer", "in");
  sink_ = add("buffersink", "out");
  const std::unique_ptr<AVBufferSrcParameters, decltype(&av_free)> from(
      checked(av_buffersrc_parameters_alloc(), name_), av_free);
  from->format = first.format;
  from->time_base = time_base;
  from->width = first.width;
  from->height = first.height;
  check(av_buffersrc_parameters_set(source_, from.get()), name_, "preparing a filter");
  check(avfilter_init_str(source_, nullptr), name_, "preparing a filter");
  check(avfilter_init_str(sink_, nullptr), name_, "preparing a filter");

  AVFilterInOut* inputs = nullptr;
  AVFilterInOut* outputs = nullptr;
  const int parsed =
      avfilter_graph_parse2(graph_.get(), description(first, name_).c_str(), &inputs, &outputs);
  if (parsed >= 0) {
    const int in = avfilter_link(source_, 0, inputs->filter_ctx, unsigned(inputs->pad_idx));
    const int out = avfilter_link(outputs->filter_ctx, unsigned(outputs->pad_idx), sink_, 0);
    avfilter_inout_free(&inputs);
    avfilter_inout_free(&outputs);
    check(std::min(in, out), name_, "joining filters");
  }
  check(parsed, name_, "preparing filters");
  check(avfilter_graph_config(graph_.get(), nullptr), name_, "preparing filters");
}

void FrameFilter::send(AVFrame* frame) {
  check(av_buffersrc_add_frame(source_, frame), name_, "filtering a frame");
}

bool FrameFilter::receive(AVFrame* frame) {
  av_frame_unref(frame);
  const int code = av_buffersink_get_frame(sink_, frame);
  if (code == AVERROR(EAGAIN) || code == AVERROR_EOF) return false;
  check(code, name_, "filtering a frame");
  return true;
}

AVRational FrameFilter::time_base() const { return av_buffersink_get_time_base(sink_); }

}  // namespace orrery::av
