// Owners for libav objects and its errors as sentences. Only for the .cpp files that use libav.
#pragma once

extern "C" {
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libavutil/display.h>
#include <libavutil/imgutils.h>
#include <libavutil/opt.h>
#include <libswscale/swscale.h>
}

#include <cstring>
#include <memory>
#include <string>

#include "base/error.h"

namespace orrery::av {

template <auto Release>
struct Deleter {
  template <typename T>
  void operator()(T* object) const {
    Release(&object);
  }
};
struct SwsDeleter {
  void operator()(SwsContext* context) const { sws_freeContext(context); }
};
using Codec = std::unique_ptr<AVCodecContext, Deleter<avcodec_free_context>>;
using Packet = std::unique_ptr<AVPacket, Deleter<av_packet_free>>;
using Frame = std::unique_ptr<AVFrame, Deleter<av_frame_free>>;
using Scaler = std::unique_ptr<SwsContext, SwsDeleter>;

// An AVDictionary that frees itself.
class Options {
 public:
  Options() = default;
  ~Options() { av_dict_free(&options_); }
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;
  void set(const std::string& key, const std::string& value) {
    av_dict_set(&options_, key.c_str(), value.c_str(), 0);
  }
  AVDictionary** address() { return &options_; }

 private:
  AVDictionary* options_ = nullptr;
};

// Files can put numbers into these fields that C++ does not allow an enumeration to hold.
template <typename Enum>
int number_of(const Enum& field) {
  int number = 0;
  static_assert(sizeof(field) == sizeof(number));
  std::memcpy(&number, &field, sizeof(number));
  return number;
}

inline std::string message(int code) {
  char text[AV_ERROR_MAX_STRING_SIZE] = {};
  av_strerror(code, text, sizeof(text));
  return text;
}

template <typename T>
T* checked(T* object, const std::string& name) {
  require(object != nullptr, ErrorKind::out_of_memory, name, ": no memory for the video library");
  return object;
}

// libav writes to standard error by itself, which a library must not.
inline void silence() { av_log_set_level(AV_LOG_QUIET); }

}  // namespace orrery::av
