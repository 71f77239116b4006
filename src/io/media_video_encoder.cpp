#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "io/av.h"
#include "io/media_memory.h"
#include "io/video.h"

namespace orrery {
namespace {

struct Container {
  const char* extension;
  const char* muxer;
  const char* video_encoder;
  const char* audio_encoder;
  AVSampleFormat samples;
  bool is_mp4;  // of the MP4 family
};

constexpr Container kContainers[] = {
    {".mp4", "mp4", "libx264", "aac", AV_SAMPLE_FMT_FLTP, true},
    {".mov", "mov", "libx264", "aac", AV_SAMPLE_FMT_FLTP, true},
    {".mkv", "matroska", "libx264", "aac", AV_SAMPLE_FMT_FLTP, false},
    {".webm", "webm", "libvpx-vp9", "libopus", AV_SAMPLE_FMT_FLT, false},
};

// A count that does not follow the machine: the encoders' output depends on it.
constexpr int kEncoderThreads = 4;

const Container* find_container(const std::filesystem::path& file) {
  std::string extension = file.extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto* found = std::find_if(std::begin(kContainers), std::end(kContainers),
                                   [&](const Container& c) { return extension == c.extension; });
  return found == std::end(kContainers) ? nullptr : found;
}

bool is_available(const Container& container) {
  return avcodec_find_encoder_by_name(container.video_encoder) &&
         avcodec_find_encoder_by_name(container.audio_encoder) &&
         av_guess_format(container.muxer, nullptr, nullptr);
}

const Container& require_container(const std::filesystem::path& file) {
  av::silence();
  std::string offers;
  for (const Container& container : kContainers) {
    if (is_available(container)) offers += concat(offers.empty() ? "" : ", ", container.extension);
  }
  if (offers.empty()) offers = "none; write a .png";
  const Container* container = find_container(file);
  require(container != nullptr, ErrorKind::unsupported, file.string(),
          ": this is no video format that can be written; those that can: ", offers);
  require(is_available(*container), ErrorKind::unsupported, file.string(),
          ": this build of FFmpeg lacks ", container->video_encoder, " or ",
          container->audio_encoder, " for ", container->extension,
          "; formats that can be written: ", offers);
  return *container;
}

// 24 for 24.0, 24000/1001 for 23.976: exact, so that frame times never drift.
AVRational exact_rate(double fps) {
  const double whole = std::round(fps);
  if (std::abs(fps - whole) < 1e-6) return {static_cast<int>(whole), 1};
  for (const int ntsc : {24, 30, 48, 60, 120}) {
    if (std::abs(fps * 1.001 - ntsc) < 2e-4) return {ntsc * 1000, 1001};
  }
  return av_d2q(fps, 1001000);
}

void require_rate(const Container& container, int sample_rate, const std::string& name) {
  const int* rates = avcodec_find_encoder_by_name(container.audio_encoder)->supported_samplerates;
  const int* end = rates;
  while (end && *end != 0) ++end;
  require(!rates || std::find(rates, end, sample_rate) != end, name, ": ", container.audio_encoder,
          " cannot write sound of ", sample_rate, " samples per second; 48000 always works");
}

// Tags that MP4 and MOV have places for; others need the freely named kind, which fewer players
// show.
bool is_itunes_tag(const std::string& key) {
  constexpr std::array<std::string_view, 13> kTags = {
      "title", "artist",    "album_artist", "composer", "album",       "date",    "comment",
      "genre", "copyright", "grouping",     "lyrics",   "description", "synopsis"};
  return std::find(kTags.begin(), kTags.end(), key) != kTags.end();
}

void free_format(AVFormatContext** format) {
  avformat_free_context(*format);
  *format = nullptr;
}

}  // namespace

struct VideoEncoder::State {
  State(const std::string& given, const VideoOptions& chosen)
      : container(require_container(given)), name(given), options(chosen) {}

  const Container& container;
  std::string name;
  VideoOptions options;
  AVRational rate{};
  std::vector<uint8_t> bytes;
  av::Memory memory{bytes};
  av::MemoryIo io;
  std::unique_ptr<av::Memory> second;  // reads `bytes` while they are completed
  std::unique_ptr<AVFormatContext, av::Deleter<free_format>> format;
  AVStream* video_stream = nullptr;
  AVStream* audio_stream = nullptr;
  av::Codec video, audio;
  av::Frame picture, rgb;
  av::Packet packet;
  av::Scaler scaler;
  int64_t frames = 0;
  int64_t samples = 0;
  bool finished = false;

  void require_options() const;
  // Turns a libav error code into an Error that says what failed.
  void check(int code, std::string_view what) const;
  av::Codec new_encoder(const char* encoder) const;
  AVStream* new_stream(const AVCodecContext& codec) const;
  void open_format();
  void open_video();
  void open_audio();
  void open_pictures();
  void encode(AVCodecContext& codec, AVStream& stream, const AVFrame* frame);
  void encode_audio_until(double seconds);
  static int read_again(AVFormatContext* context, AVIOContext** io, const char* url, int flags,
                        AVDictionary** options);
  static int close_again(AVFormatContext* context, AVIOContext* io);
  void verify();
};

void VideoEncoder::State::check(int code, std::string_view what) const {
  if (code >= 0) return;
  fail(code == AVERROR(ENOMEM) ? ErrorKind::out_of_memory : ErrorKind::device, name, ": ", what,
       " failed (", av::message(code), ")");
}

void VideoEncoder::State::require_options() const {
  const std::string& file = name;
  constexpr int64_t kMaxSide = 16384;
  const std::pair<const char*, int64_t> sides[] = {{"width", options.width},
                                                   {"height", options.height}};
  for (const auto& [side, size] : sides) {
    require(size >= 2 && size <= kMaxSide, file, ": the video's ", side, " is ", size,
            "; it must be from 2 to ", kMaxSide);
    require(size % 2 == 0, file, ": the video's ", side, " is ", size,
            "; it must be even, because two pixels share a colour sample (yuv420p)");
  }
  require(options.fps >= 0.1 && options.fps <= 1000, file, ": the frame rate is ", options.fps,
          "; it must be from 0.1 to 1000");
  require(options.crf >= 1 && options.crf <= 51, file, ": crf is ", options.crf,
          "; it must be from 1 (best) to 51");
  const size_t channels = options.audio.size();
  if (channels == 0) return;
  require(channels <= 2, file, ": the sound has ", channels,
          " channels; one or two can be written");
  for (const std::vector<float>& channel : options.audio) {
    require(channel.size() == options.audio[0].size(), file,
            ": the channels of the sound differ in length (", options.audio[0].size(), " and ",
            channel.size(), " samples)");
    require(std::all_of(channel.begin(), channel.end(), [](float x) { return std::isfinite(x); }),
            ErrorKind::numeric, file, ": the sound holds NaN or infinite samples");
  }
}

av::Codec VideoEncoder::State::new_encoder(const char* encoder) const {
  av::Codec codec(av::checked(avcodec_alloc_context3(avcodec_find_encoder_by_name(encoder)), name));
  codec->flags |= AV_CODEC_FLAG_BITEXACT;
  if (format->oformat->flags & AVFMT_GLOBALHEADER) codec->flags |= AV_CODEC_FLAG_GLOBAL_HEADER;
  return codec;
}

AVStream* VideoEncoder::State::new_stream(const AVCodecContext& codec) const {
  AVStream* stream = av::checked(avformat_new_stream(format.get(), nullptr), name);
  stream->time_base = codec.time_base;
  check(avcodec_parameters_from_context(stream->codecpar, &codec), "describing a stream");
  return stream;
}

void VideoEncoder::State::open_video() {
  video = new_encoder(container.video_encoder);
  video->width = int(options.width);
  video->height = int(options.height);
  video->pix_fmt = AV_PIX_FMT_YUV420P;
  video->time_base = av_inv_q(rate);
  video->framerate = rate;
  video->sample_aspect_ratio = {1, 1};
  video->color_range = AVCOL_RANGE_MPEG;
  video->colorspace = AVCOL_SPC_BT709;
  video->color_primaries = AVCOL_PRI_BT709;
  video->color_trc = AVCOL_TRC_BT709;
  video->chroma_sample_location = AVCHROMA_LOC_LEFT;
  video->thread_count = kEncoderThreads;
  av::Options settings;
  settings.set("crf", std::to_string(options.crf));
  if (video->codec_id == AV_CODEC_ID_H264) {
    settings.set("profile", "high");
    settings.set("preset", "medium");
  } else {
    video->bit_rate = 0;  // makes crf the only rule for VP9
    settings.set("deadline", "good");
    settings.set("cpu-used", "4");
  }
  check(avcodec_open2(video.get(), nullptr, settings.address()), "opening the video encoder");
  video_stream = new_stream(*video);
  video_stream->avg_frame_rate = rate;
  video_stream->r_frame_rate = rate;
  video_stream->sample_aspect_ratio = {1, 1};
}

void VideoEncoder::State::open_audio() {
  audio = new_encoder(container.audio_encoder);
  require_rate(container, options.sample_rate, name);
  audio->sample_fmt = container.samples;
  audio->sample_rate = options.sample_rate;
  audio->time_base = {1, options.sample_rate};
  av_channel_layout_default(&audio->ch_layout, int(options.audio.size()));
  audio->bit_rate = 96000 * int64_t(options.audio.size());
  audio->thread_count = 1;
  check(avcodec_open2(audio.get(), nullptr, nullptr), "opening the sound encoder");
  audio_stream = new_stream(*audio);
}

void VideoEncoder::State::open_format() {
  AVFormatContext* context = nullptr;
  check(avformat_alloc_output_context2(&context, nullptr, container.muxer, ""),
        "preparing the file");
  format.reset(context);
  format->flags |= AVFMT_FLAG_BITEXACT;
  bool itunes_only = true;
  for (const auto& [key, value] : options.metadata) {
    itunes_only = itunes_only && is_itunes_tag(key);
    check(av_dict_set(&format->metadata, key.c_str(), value.c_str(), 0), "storing a tag");
  }
  open_video();
  if (!options.audio.empty()) open_audio();
  io = memory.open_to_write(name);
  format->pb = io.get();
  format->opaque = this;
  format->io_open = read_again;
  format->io_close2 = close_again;
  av::Options settings;
  if (container.is_mp4) {
    settings.set("movflags", itunes_only ? "+faststart" : "+faststart+use_metadata_tags");
  }
  check(avformat_write_header(format.get(), settings.address()), "writing the header");
}

void VideoEncoder::State::open_pictures() {
  packet.reset(av::checked(av_packet_alloc(), name));
  picture.reset(av::checked(av_frame_alloc(), name));
  rgb.reset(av::checked(av_frame_alloc(), name));
  picture->format = AV_PIX_FMT_YUV420P;
  rgb->format = AV_PIX_FMT_RGB24;
  for (AVFrame* frame : {picture.get(), rgb.get()}) {
    frame->width = int(options.width);
    frame->height = int(options.height);
    check(av_frame_get_buffer(frame, 64), "allocating a frame");
  }
  scaler.reset(
      av::checked(sws_getContext(rgb->width, rgb->height, AV_PIX_FMT_RGB24, rgb->width, rgb->height,
                                 AV_PIX_FMT_YUV420P,
                                 SWS_BICUBIC | SWS_ACCURATE_RND | SWS_FULL_CHR_H_INP | SWS_BITEXACT,
                                 nullptr, nullptr, nullptr),
                  name));
  // Full-range RGB to limited-range BT.709, as the stream is tagged.
  const int* bt709 = sws_getCoefficients(SWS_CS_ITU709);
  check(sws_setColorspaceDetails(scaler.get(), bt709, 1, bt709, 0, 0, 1 << 16, 1 << 16),
        "setting up the colour conversion");
}

void VideoEncoder::State::encode(AVCodecContext& codec, AVStream& stream, const AVFrame* frame) {
  check(avcodec_send_frame(&codec, frame), "encoding");
  for (;;) {
    const int code = avcodec_receive_packet(&codec, packet.get());
    if (code == AVERROR(EAGAIN) || code == AVERROR_EOF) return;
    check(code, "encoding");
    if (&codec == video.get()) packet->duration = 1;  // one tick of the frame rate
    packet->stream_index = stream.index;
    av_packet_rescale_ts(packet.get(), codec.time_base, stream.time_base);
    check(av_interleaved_write_frame(format.get(), packet.get()), "writing");
  }
}

// Sound goes in beside the frames it belongs to, so that players need not seek.
void VideoEncoder::State::encode_audio_until(double seconds) {
  if (!audio) return;
  const int64_t total = std::ssize(options.audio[0]);
  const int64_t step = audio->frame_size > 0 ? audio->frame_size : 1024;
  while (samples < total && double(samples) < seconds * options.sample_rate) {
    av::Frame block(av::checked(av_frame_alloc(), name));
    block->format = audio->sample_fmt;
    block->nb_samples = int(std::min(step, total - samples));
    block->sample_rate = audio->sample_rate;
    block->pts = samples;
    check(av_channel_layout_copy(&block->ch_layout, &audio->ch_layout), "describing the sound");
    check(av_frame_get_buffer(block.get(), 0), "allocating sound");
    const int64_t channels = std::ssize(options.audio);
    const bool planar = av_sample_fmt_is_planar(audio->sample_fmt) != 0;
    for (int64_t c = 0; c < channels; ++c) {
      const float* from = options.audio[size_t(c)].data() + samples;
      float* to = planar ? reinterpret_cast<float*>(block->data[c])
                         : reinterpret_cast<float*>(block->data[0]) + c;
      for (int64_t i = 0; i < block->nb_samples; ++i) to[planar ? i : i * channels] = from[i];
    }
    samples += block->nb_samples;
    encode(*audio, *audio_stream, block.get());
  }
}

// MP4 moves its index to the front at the end, for which it reads what it has written.
int VideoEncoder::State::read_again(AVFormatContext* context, AVIOContext** io, const char*, int,
                                    AVDictionary**) {
  auto& state = *static_cast<State*>(context->opaque);
  try {
    state.second = std::make_unique<av::Memory>(state.bytes);
    *io = state.second->open_to_read(state.name).release();
  } catch (const std::exception&) {
    return AVERROR(ENOMEM);
  }
  return 0;
}

int VideoEncoder::State::close_again(AVFormatContext*, AVIOContext* io) {
  av::free_memory_io(&io);
  return 0;
}

// Reads the finished file back as a player would see it.
void VideoEncoder::State::verify() {
  av::Memory source{std::span<const uint8_t>(bytes)};
  const av::MemoryIo reading = source.open_to_read(name);
  AVFormatContext* context = av::checked(avformat_alloc_context(), name);
  context->pb = reading.get();
  check(avformat_open_input(&context, nullptr, nullptr, nullptr), "reading the file back");
  const std::unique_ptr<AVFormatContext, av::Deleter<avformat_close_input>> written(context);
  check(avformat_find_stream_info(context, nullptr), "reading the file back");
  const int index = av_find_best_stream(context, AVMEDIA_TYPE_VIDEO, -1, -1, nullptr, 0);
  check(index, "finding the video in the finished file");
  const AVCodecParameters& stream = *context->streams[index]->codecpar;
  const bool playable =
      stream.format == AV_PIX_FMT_YUV420P && stream.width == options.width &&
      stream.height == options.height &&
      (stream.codec_id != AV_CODEC_ID_H264 || stream.profile == FF_PROFILE_H264_HIGH);
  require(playable, ErrorKind::device, name, ": the encoder wrote ", stream.width, "x",
          stream.height, " ", avcodec_get_name(stream.codec_id), " of profile ", stream.profile,
          ", which is not what was asked for");
  int64_t found = 0;
  while (av_read_frame(context, packet.get()) >= 0) {
    if (packet->stream_index == index) ++found;
    av_packet_unref(packet.get());
  }
  require(found == frames, ErrorKind::device, name, ": the finished file holds ", found, " of ",
          frames, " frames");
}

VideoEncoder::VideoEncoder(const std::string& name, const VideoOptions& options)
    : state_(std::make_unique<State>(name, options)) {
  state_->require_options();
  state_->rate = exact_rate(options.fps);
  state_->open_format();
  state_->open_pictures();
}

VideoEncoder::~VideoEncoder() = default;

void VideoEncoder::write(const uint8_t* rgb) {
  State& state = *state_;
  require(!state.finished, state.name, ": the video is finished; no frame can be added");
  const size_t row = size_t(state.options.width * 3);
  for (int64_t y = 0; y < state.options.height; ++y) {
    std::memcpy(state.rgb->data[0] + y * state.rgb->linesize[0], rgb + size_t(y) * row, row);
  }
  // The encoder may still hold the last frame's buffer.
  state.check(av_frame_make_writable(state.picture.get()), "allocating a frame");
  sws_scale(state.scaler.get(), state.rgb->data, state.rgb->linesize, 0, state.rgb->height,
            state.picture->data, state.picture->linesize);
  state.picture->pts = state.frames++;
  state.encode(*state.video, *state.video_stream, state.picture.get());
  state.encode_audio_until(double(state.frames) / av_q2d(state.rate));
}

std::vector<uint8_t> VideoEncoder::finish() {
  State& state = *state_;
  require(!state.finished, state.name, ": the video is already finished");
  require(state.frames > 0, state.name, ": the video has no frames, so no file is written");
  state.finished = true;
  state.encode_audio_until(INFINITY);
  state.encode(*state.video, *state.video_stream, nullptr);
  if (state.audio) state.encode(*state.audio, *state.audio_stream, nullptr);
  state.check(av_write_trailer(state.format.get()), "completing the file");
  avio_flush(state.io.get());
  state.check(state.io->error, "completing the file");
  state.verify();
  return std::move(state.bytes);
}

bool is_video_extension(const std::filesystem::path& file) {
  return find_container(file) != nullptr;
}

void require_video_output(const std::filesystem::path& file, int sample_rate) {
  const Container& container = require_container(file);
  if (sample_rate > 0) require_rate(container, sample_rate, file.string());
}

}  // namespace orrery
