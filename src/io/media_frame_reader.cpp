#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "base/error.h"
#include "io/av.h"
#include "io/codecs.h"
#include "io/frame_reader.h"
#include "io/input_file.h"
#include "io/media_filter.h"
#include "io/media_memory.h"
#include "io/orientation.h"

namespace orrery {
namespace {

// Containers that hold their own pictures. Playlists (hls, dash, concat) and scripts are left out:
// they would make libav open whatever they name.
constexpr const char* kVideoFormats =
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,flv,asf,ogg,gif,apng,ivf,nut,h264,hevc,"
    "mpegvideo,m4v,dv,mxf,yuv4mpegpipe";
constexpr const char* kStillFormats =
    "webp_pipe,bmp_pipe,tiff_pipe,gif,gif_pipe,jpegxl_pipe,j2k_pipe,jpegls_pipe,jpeg_pipe,png_pipe,"
    "pam_pipe,pbm_pipe,pgm_pipe,ppm_pipe,qoi_pipe,psd_pipe,sgi_pipe,sunrast_pipe,xbm_pipe,exr_pipe,"
    "dds_pipe,pcx_pipe,pfm_pipe,hdr_pipe";

// Decoders hold up to 16 frames of what a file claims.
constexpr int64_t kMaxFramePixels = int64_t{1} << 26;

bool is_full_range(const AVFrame& frame) {
  switch (frame.format) {
    case AV_PIX_FMT_YUVJ420P:
    case AV_PIX_FMT_YUVJ422P:
    case AV_PIX_FMT_YUVJ444P:
    case AV_PIX_FMT_YUVJ440P:
    case AV_PIX_FMT_YUVJ411P: return true;
    default: return av::number_of(frame.color_range) == AVCOL_RANGE_JPEG;
  }
}

}  // namespace

struct FrameReader::State {
  std::string name;
  bool still = false;
  std::optional<av::Memory> memory;
  av::MemoryIo io;
  std::unique_ptr<AVFormatContext, av::Deleter<avformat_close_input>> format;
  AVStream* stream = nullptr;
  av::Codec codec;
  av::Packet packet;
  av::Frame decoded;
  av::Frame rgb;  // libswscale may write past the end of unpadded rows
  av::Scaler scaler;
  std::optional<av::FrameFilter> filter;
  bool filter_ended = false;
  Orientation orientation;
  int64_t packets = 0;
  int64_t frames = 0;
  bool at_end = false;
  int damage = 0;  // what ended the reading, told when the frames before it are out

  void open(const char* url, Contents contents);
  void open_codec();
  bool send_packet();
  int find_pictures() const;
  // The next decoded frame, filtered where it has to be, in `decoded`; false at the end.
  bool next_decoded();
  bool next_stored();
  Image to_image();
  [[noreturn]] void cannot_open(int code, std::string_view what) const;
  [[noreturn]] void damaged(int code) const;
};

void FrameReader::State::open(const char* url, Contents contents) {
  av::silence();
  still = contents == Contents::still;
  AVFormatContext* context = av::checked(avformat_alloc_context(), name);
  context->pb = io.get();
  av::Options options;
  options.set("format_whitelist", still ? kStillFormats : kVideoFormats);
  options.set("protocol_whitelist", "file");
  const int code = avformat_open_input(&context, url, nullptr, options.address());
  if (code < 0) cannot_open(code, still ? "picture" : "video");
  format.reset(context);
  const int found = avformat_find_stream_info(context, nullptr);
  if (found < 0) damaged(found);
  const int index = find_pictures();
  const bool cover =
      index >= 0 && (context->streams[index]->disposition & AV_DISPOSITION_ATTACHED_PIC) != 0;
  require(index >= 0 && !cover, ErrorKind::invalid_argument, name, ": the file holds no ",
          still ? "picture" : "video",
          cover ? ", only sound and a cover picture"
                : concat(" (", context->nb_streams, " streams of other kinds)"));
  stream = context->streams[index];
  for (unsigned i = 0; i < context->nb_streams; ++i) {
    if (context->streams[i] != stream) context->streams[i]->discard = AVDISCARD_ALL;
  }
  open_codec();
  packet.reset(av::checked(av_packet_alloc(), name));
  decoded.reset(av::checked(av_frame_alloc(), name));
  rgb.reset(av::checked(av_frame_alloc(), name));
}

// The track that libav prefers, unless it holds a single picture and another one holds more.
int FrameReader::State::find_pictures() const {
  const int best = av_find_best_stream(format.get(), AVMEDIA_TYPE_VIDEO, -1, -1, nullptr, 0);
  const auto pictures = [&](int index) {
    const AVStream* track = format->streams[index];
    if ((track->disposition & AV_DISPOSITION_ATTACHED_PIC) != 0) return int64_t{0};
    return std::max<int64_t>(track->nb_frames, avformat_index_get_entries_count(track));
  };
  if (best < 0 || pictures(best) > 1) return best;
  for (int i = 0; i < int(format->nb_streams); ++i) {
    const bool is_video = format->streams[i]->codecpar->codec_type == AVMEDIA_TYPE_VIDEO;
    if (is_video && pictures(i) > 1) return i;
  }
  return best;
}

void FrameReader::State::cannot_open(int code, std::string_view what) const {
  switch (code) {
    case AVERROR(ENOENT): fail(ErrorKind::not_found, name, ": there is no such file");
    case AVERROR(ENOMEM): fail(ErrorKind::out_of_memory, name, ": no memory to open the file");
    case AVERROR_INVALIDDATA:
    case AVERROR_EOF:
      fail(ErrorKind::corrupt, name, ": this is not a ", what,
           " that can be read, or it is damaged or truncated (", av::message(code), ")");
    case AVERROR(EINVAL):  // a format outside the list
      fail(ErrorKind::invalid_argument, name, ": this is not a ", what,
           " of a format that can be read");
    default:
      fail(ErrorKind::invalid_argument, name, ": cannot open the file (", av::message(code), ")");
  }
}

void FrameReader::State::open_codec() {
  const AVCodec* decoder = avcodec_find_decoder(stream->codecpar->codec_id);
  require(decoder != nullptr, ErrorKind::unsupported, name,
          ": this build of FFmpeg has no decoder for ",
          avcodec_get_name(stream->codecpar->codec_id));
  const int64_t height = std::max(1, stream->codecpar->height);
  const int64_t width = std::max(1, stream->codecpar->width);
  require_pixels(height, width, name);
  require(still || height * width <= kMaxFramePixels, ErrorKind::unsupported, name, ": ", width,
          "x", height, " is too large; the frames of a video may have up to ", kMaxFramePixels,
          " pixels");
  codec.reset(av::checked(avcodec_alloc_context3(decoder), name));
  int code = avcodec_parameters_to_context(codec.get(), stream->codecpar);
  if (code < 0) damaged(code);
  codec->pkt_timebase = stream->time_base;
  codec->max_pixels = still ? kMaxImagePixels : kMaxFramePixels;
  codec->thread_count = still ? 1 : 0;  // stills gain nothing from threads
  code = avcodec_open2(codec.get(), decoder, nullptr);
  if (code < 0) damaged(code);
  size_t size = 0;
  const uint8_t* side = av_stream_get_side_data(stream, AV_PKT_DATA_DISPLAYMATRIX, &size);
  if (!side || size < sizeof(std::array<int32_t, 9>)) return;
  std::array<int32_t, 9> matrix;
  std::memcpy(matrix.data(), side, sizeof(matrix));
  const std::optional<Orientation> turned = matrix_orientation(matrix);
  require(turned.has_value(), ErrorKind::unsupported, name, ": the video is to be shown turned by ",
          -av_display_rotation_get(matrix.data()), " degrees; only quarter turns are supported");
  orientation = *turned;
}

void FrameReader::State::damaged(int code) const {
  fail(code == AVERROR(ENOMEM) ? ErrorKind::out_of_memory : ErrorKind::corrupt, name,
       ": the file is damaged or truncated after frame ", frames, " (", av::message(code), ")");
}

// False when the decoder has been told of the end, or of damage as if it were the end.
bool FrameReader::State::send_packet() {
  int code = 0;
  do {
    code = av_read_frame(format.get(), packet.get());
    if (code == 0 && packet->stream_index == stream->index) {
      code = (packet->flags & AV_PKT_FLAG_CORRUPT) != 0
                 ? AVERROR_INVALIDDATA
                 : avcodec_send_packet(codec.get(), packet.get());
      av_packet_unref(packet.get());
      if (code == 0) {
        ++packets;
        return true;
      }
    }
    av_packet_unref(packet.get());
  } while (code == 0);
  // Containers with a full index say how many packets should have come.
  if (code != AVERROR_EOF) {
    damage = code;
  } else if (packets < avformat_index_get_entries_count(stream)) {
    damage = AVERROR_INVALIDDATA;
  }
  avcodec_send_packet(codec.get(), nullptr);
  return false;
}

Image FrameReader::State::to_image() {
  const AVFrame& from = *decoded;
  require_pixels(from.height, from.width, name);
  const auto pixel_format = static_cast<AVPixelFormat>(from.format);
  scaler.reset(sws_getCachedContext(
      scaler.release(), from.width, from.height, pixel_format, from.width, from.height,
      AV_PIX_FMT_RGB24, SWS_BICUBIC | SWS_ACCURATE_RND | SWS_FULL_CHR_H_INT | SWS_BITEXACT, nullptr,
      nullptr, nullptr));
  require(scaler != nullptr, ErrorKind::unsupported, name, ": pixels of the kind ",
          av_get_pix_fmt_name(pixel_format) ? av_get_pix_fmt_name(pixel_format) : "unknown",
          " cannot be converted to RGB");
  // Untagged video is taken as BT.601, as FFmpeg's own tools do.
  const int* matrix = sws_getCoefficients(av::number_of(from.colorspace));
  sws_setColorspaceDetails(scaler.get(), matrix, is_full_range(from),
                           sws_getCoefficients(SWS_CS_DEFAULT), 1, 0, 1 << 16, 1 << 16);
  if (rgb->width != from.width || rgb->height != from.height) {
    av_frame_unref(rgb.get());
    rgb->format = AV_PIX_FMT_RGB24;
    rgb->width = from.width;
    rgb->height = from.height;
    const int code = av_frame_get_buffer(rgb.get(), 64);
    if (code < 0) damaged(code);
  }
  const int rows =
      sws_scale(scaler.get(), from.data, from.linesize, 0, from.height, rgb->data, rgb->linesize);
  require(rows == from.height, ErrorKind::unsupported, name,
          ": a frame cannot be converted to RGB");
  Image image{from.height, from.width, {}};
  image.rgb.resize(size_t(image.height * image.width * 3));
  for (int64_t y = 0; y < image.height; ++y) {
    std::memcpy(image.rgb.data() + y * image.width * 3, rgb->data[0] + y * rgb->linesize[0],
                size_t(image.width * 3));
  }
  return upright(std::move(image), orientation);
}

FrameReader::FrameReader(const std::filesystem::path& file, Contents contents)
    : state_(std::make_unique<State>()) {
  state_->name = file.string();
  require_regular(file, "a video");
  // The prefix keeps names such as "http:x" from meaning anything but a file.
  state_->open(("file:" + state_->name).c_str(), contents);
}

FrameReader::FrameReader(std::span<const uint8_t> bytes, const std::string& name, Contents contents)
    : state_(std::make_unique<State>()) {
  state_->name = name;
  state_->memory.emplace(bytes);
  state_->io = state_->memory->open_to_read(name);
  state_->open(nullptr, contents);
}

FrameReader::~FrameReader() = default;

bool FrameReader::State::next_stored() {
  for (;;) {
    const int code = avcodec_receive_frame(codec.get(), decoded.get());
    if (code == AVERROR(EAGAIN) && !at_end) {
      at_end = !send_packet();
      continue;
    }
    if (code == AVERROR_EOF && damage == 0) return false;
    if (code < 0) damaged(code == AVERROR_EOF ? damage : code);
    if (decoded->decode_error_flags != 0 || (decoded->flags & AV_FRAME_FLAG_CORRUPT) != 0) {
      damaged(AVERROR_INVALIDDATA);
    }
    decoded->pts = decoded->best_effort_timestamp;
    return true;
  }
}

bool FrameReader::State::next_decoded() {
  while (!filter || !filter->receive(decoded.get())) {
    if (filter_ended) return false;
    const bool is_frame = next_stored();
    if (is_frame && !filter && av::FrameFilter::is_needed(*decoded)) {
      filter.emplace(*decoded, stream->time_base, name);
    }
    if (!filter) return is_frame;
    filter_ended = !is_frame;
    filter->send(is_frame ? decoded.get() : nullptr);
  }
  return true;
}

std::optional<FrameReader::Frame> FrameReader::next() {
  State& state = *state_;
  if (!state.next_decoded()) return std::nullopt;
  const AVFrame& decoded = *state.decoded;
  Frame frame{state.to_image(), 0};
  const double rate = frame_rate();
  const AVRational base = state.filter ? state.filter->time_base() : state.stream->time_base;
  frame.seconds = decoded.pts != AV_NOPTS_VALUE ? double(decoded.pts) * av_q2d(base)
                                                : double(state.frames) / (rate > 0 ? rate : 1);
  ++state.frames;
  return frame;
}

double FrameReader::frame_rate() const {
  const AVStream& stream = *state_->stream;
  for (const AVRational rate : {stream.avg_frame_rate, stream.r_frame_rate}) {
    if (rate.num > 0 && rate.den > 0) return av_q2d(rate);
  }
  return 0;
}

}  // namespace orrery
