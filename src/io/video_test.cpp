#include "io/video.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <string>
#include <vector>

#include "expect_error.h"
#include "io/av.h"
#include "io/resize.h"
#include "scratch_folder.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

const std::filesystem::path kMedia = source_dir() / "tests/data/media";

constexpr int64_t kHeight = 48, kWidth = 64;

// Smooth colours that move with t.
std::vector<uint8_t> picture(int64_t t) {
  std::vector<uint8_t> rgb;
  for (int64_t y = 0; y < kHeight; ++y) {
    for (int64_t x = 0; x < kWidth; ++x) {
      rgb.push_back(uint8_t(3 * x + 8 * t));
      rgb.push_back(uint8_t(250 - 4 * y));
      rgb.push_back(uint8_t(40 + 2 * y + t));
    }
  }
  return rgb;
}

VideoOptions options() {
  VideoOptions chosen;
  chosen.height = kHeight;
  chosen.width = kWidth;
  return chosen;
}

void write_video(const std::filesystem::path& file, const VideoOptions& chosen, int64_t frames) {
  VideoWriter writer(file, chosen);
  for (int64_t t = 0; t < frames; ++t) writer.write(picture(t).data());
  writer.finish();
}

std::vector<std::vector<float>> tone(int64_t samples) {
  std::vector<std::vector<float>> sound(2);
  for (int64_t i = 0; i < samples; ++i) {
    sound[0].push_back(float(0.5 * std::sin(double(i) * 0.05)));
    sound[1].push_back(float(0.5 * std::sin(double(i) * 0.08)));
  }
  return sound;
}

double psnr(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::pow(double(a[i]) - double(b[i]), 2);
  return 10 * std::log10(255 * 255 * double(a.size()) / sum);
}

// What a player is told.
struct Probe {
  explicit Probe(const std::filesystem::path& file) {
    AVFormatContext* context = nullptr;
    if (avformat_open_input(&context, file.c_str(), nullptr, nullptr) < 0) return;
    avformat_find_stream_info(context, nullptr);
    for (unsigned i = 0; i < context->nb_streams; ++i) {
      const AVStream& stream = *context->streams[i];
      const double seconds = double(stream.duration) * av_q2d(stream.time_base);
      if (stream.codecpar->codec_type == AVMEDIA_TYPE_VIDEO) {
        codec = avcodec_get_name(stream.codecpar->codec_id);
        profile = stream.codecpar->profile;
        pixel_format = stream.codecpar->format;
        range = stream.codecpar->color_range;
        matrix = stream.codecpar->color_space;
        rate = stream.avg_frame_rate;
        frames = stream.nb_frames;
        video_seconds = seconds;
      } else {
        sound = avcodec_get_name(stream.codecpar->codec_id);
        channels = stream.codecpar->ch_layout.nb_channels;
        sample_rate = stream.codecpar->sample_rate;
        sound_seconds = seconds;
      }
    }
    for (const AVDictionaryEntry* tag = nullptr;
         (tag = av_dict_get(context->metadata, "", tag, AV_DICT_IGNORE_SUFFIX)) != nullptr;) {
      tags[tag->key] = tag->value;
    }
    avformat_close_input(&context);
  }
  std::string codec, sound;
  int profile = 0, pixel_format = -1, range = 0, matrix = 0, channels = 0, sample_rate = 0;
  AVRational rate{};
  int64_t frames = 0;
  double video_seconds = 0, sound_seconds = 0;
  std::map<std::string, std::string> tags;
};

// --- writing -------------------------------------------------------------------------------------

TEST(VideoWriter, RoundTrip) {
  const ScratchFolder folder;
  const auto file = folder.path() / "clip.mp4";
  VideoOptions chosen = options();
  chosen.crf = 4;
  write_video(file, chosen, 9);
  EXPECT_EQ(folder.file_count(), 1);
  const Video back = read_video(file);
  EXPECT_EQ(back.height, kHeight);
  EXPECT_EQ(back.width, kWidth);
  EXPECT_EQ(back.fps, 24);
  ASSERT_EQ(back.frames.size(), 9u);
  // Halved chroma and a fine quantiser; a wrong matrix or range costs 10 dB and more.
  for (int64_t t = 0; t < 9; ++t) EXPECT_GT(psnr(back.frames[size_t(t)], picture(t)), 38) << t;
}

TEST(VideoWriter, EveryQualityPlaysEverywhere) {  // B89
  const ScratchFolder folder;
  for (const int crf : {1, 10, 18, 30, 51}) {
    const auto file = folder.path() / concat("q", crf, ".mp4");
    VideoOptions chosen = options();
    chosen.crf = crf;
    write_video(file, chosen, 5);
    const Probe probe(file);
    EXPECT_EQ(probe.codec, "h264");
    EXPECT_EQ(probe.profile, FF_PROFILE_H264_HIGH);
    EXPECT_EQ(probe.pixel_format, AV_PIX_FMT_YUV420P);
    EXPECT_EQ(probe.range, AVCOL_RANGE_MPEG);
    EXPECT_EQ(probe.matrix, AVCOL_SPC_BT709);
    EXPECT_EQ(probe.frames, 5);
    // The frames are no black ones.
    EXPECT_GT(psnr(read_video(file).frames[2], picture(2)), 20);
  }
  EXPECT_GT(std::filesystem::file_size(folder.path() / "q1.mp4"),
            std::filesystem::file_size(folder.path() / "q51.mp4"));
  for (const int crf : {0, 52, -1}) {
    VideoOptions chosen = options();
    chosen.crf = crf;
    expect_error(ErrorKind::invalid_argument, {"crf", std::to_string(crf)},
                 [&] { VideoWriter writer(folder.path() / "x.mp4", chosen); });
  }
}

TEST(VideoWriter, RatesAreExact) {
  const ScratchFolder folder;
  struct Rate {
    double fps;
    AVRational exact;
  };
  for (const Rate& rate :
       {Rate{24, {24, 1}}, Rate{23.976, {24000, 1001}}, Rate{29.97, {30000, 1001}},
        Rate{59.94, {60000, 1001}}, Rate{12.5, {25, 2}}, Rate{5, {5, 1}}}) {
    const auto file = folder.path() / "rate.mp4";
    VideoOptions chosen = options();
    chosen.fps = rate.fps;
    write_video(file, chosen, 11);
    const Probe probe(file);
    EXPECT_EQ(av_cmp_q(probe.rate, rate.exact), 0)
        << rate.fps << ": " << probe.rate.num << '/' << probe.rate.den;
    EXPECT_EQ(probe.frames, 11);
    EXPECT_NEAR(probe.video_seconds, 11 / av_q2d(rate.exact), 1e-4);
    EXPECT_EQ(read_video(file).frames.size(), 11u);
  }
}

TEST(VideoWriter, SoundInSync) {
  const ScratchFolder folder;
  for (const char* extension : {".mp4", ".mov", ".mkv"}) {
    const auto file = folder.path() / (std::string("clip") + extension);
    VideoOptions chosen = options();
    chosen.audio = tone(48000);
    write_video(file, chosen, 24);
    const Probe probe(file);
    EXPECT_EQ(probe.sound, "aac");
    EXPECT_EQ(probe.channels, 2);
    EXPECT_EQ(probe.sample_rate, 48000);
    EXPECT_EQ(read_video(file).frames.size(), 24u);
    if (std::string(extension) == ".mkv") continue;  // keeps no length per stream
    EXPECT_NEAR(probe.video_seconds, 1, 1e-3);
    EXPECT_NEAR(probe.sound_seconds, probe.video_seconds, 1.0 / 24);
  }
}

TEST(VideoWriter, WebmAndMono) {
  const ScratchFolder folder;
  const auto file = folder.path() / "clip.webm";
  VideoOptions chosen = options();
  chosen.audio = {tone(24000)[0]};
  write_video(file, chosen, 12);
  const Probe probe(file);
  EXPECT_EQ(probe.codec, "vp9");
  EXPECT_EQ(probe.sound, "opus");
  EXPECT_EQ(probe.channels, 1);
  const Video back = read_video(file);
  ASSERT_EQ(back.frames.size(), 12u);
  EXPECT_GT(psnr(back.frames[7], picture(7)), 30);
}

TEST(VideoWriter, OneFrame) {
  const ScratchFolder folder;
  write_video(folder.path() / "one.mp4", options(), 1);
  EXPECT_EQ(read_video(folder.path() / "one.mp4").frames.size(), 1u);
}

TEST(VideoWriter, TagsAreReadBack) {
  const ScratchFolder folder;
  VideoOptions chosen = options();
  chosen.metadata = {{"title", "a title"}, {"comment", "{\"seed\": 7}"}};
  write_video(folder.path() / "a.mp4", chosen, 2);
  Probe known(folder.path() / "a.mp4");
  EXPECT_EQ(known.tags["title"], "a title");
  EXPECT_EQ(known.tags["comment"], "{\"seed\": 7}");
  chosen.metadata["orrery_seed"] = "7";
  write_video(folder.path() / "b.mp4", chosen, 2);
  Probe own(folder.path() / "b.mp4");
  EXPECT_EQ(own.tags["orrery_seed"], "7");
  EXPECT_EQ(own.tags["title"], "a title");
}

TEST(VideoWriter, SameFramesSameBytes) {  // B84
  const ScratchFolder folder;
  VideoOptions chosen = options();
  chosen.audio = tone(20000);
  chosen.metadata = {{"comment", "x"}};
  for (const char* extension : {".mp4", ".mkv"}) {
    const auto a = folder.path() / (std::string("a") + extension);
    const auto b = folder.path() / (std::string("b") + extension);
    write_video(a, chosen, 10);
    write_video(b, chosen, 10);
    EXPECT_EQ(ScratchFolder::read(a), ScratchFolder::read(b)) << extension;
  }
}

TEST(VideoWriter, MoovComesFirst) {
  const ScratchFolder folder;
  write_video(folder.path() / "a.mp4", options(), 5);
  const std::string bytes = ScratchFolder::read(folder.path() / "a.mp4");
  EXPECT_LT(bytes.find("moov"), bytes.find("mdat"));
}

TEST(VideoWriter, NoFramesNoFile) {  // B85
  const ScratchFolder folder;
  {
    VideoWriter writer(folder.path() / "a.mp4", options());
    expect_error(ErrorKind::invalid_argument, {"a.mp4", "no frames"}, [&] { writer.finish(); });
  }
  {
    VideoWriter writer(folder.path() / "b.mp4", options());
    writer.write(picture(0).data());
  }
  EXPECT_EQ(folder.file_count(), 0);
}

TEST(VideoWriter, FullDiskIsNamed) {  // B85, B91
  const ScratchFolder folder;
  // A limit on file sizes stands in for the full disk.
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{512, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  expect_error(ErrorKind::invalid_argument, {"full.mp4", "cannot write the file", "too large"},
               [&] { write_video(folder.path() / "full.mp4", options(), 30); });
  EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(folder.file_count(), 0);
}

TEST(VideoWriter, RefusesByName) {
  const ScratchFolder folder;
  const auto refuse = [&](VideoOptions chosen, std::initializer_list<std::string_view> parts,
                          ErrorKind kind = ErrorKind::invalid_argument) {
    expect_error(kind, parts, [&] { VideoWriter writer(folder.path() / "x.mp4", chosen); });
  };
  VideoOptions chosen = options();
  chosen.width = 63;
  refuse(chosen, {"x.mp4", "width is 63", "even"});
  chosen = options();
  chosen.height = 0;
  refuse(chosen, {"height is 0"});
  for (const double fps : {0.0, -1.0, double(NAN), 1e9}) {
    chosen = options();
    chosen.fps = fps;
    refuse(chosen, {"frame rate"});
  }
  chosen = options();
  chosen.audio = {{0}, {0}, {0}};
  refuse(chosen, {"3 channels"});
  chosen.audio = {{0, 0}, {0}};
  refuse(chosen, {"differ in length"});
  chosen.audio = {{NAN}};
  refuse(chosen, {"NaN"}, ErrorKind::numeric);
  chosen.audio = {{0}};
  chosen.sample_rate = 12345;
  refuse(chosen, {"12345"});
  EXPECT_EQ(folder.file_count(), 0);
}

TEST(RequireVideoOutput, SaysBeforehandWhatCannotBeWritten) {  // B91
  const ScratchFolder folder;
  for (const char* name : {"a.mp4", "a.MOV", "a.mkv", "a.webm"}) {
    EXPECT_TRUE(is_video_extension(name));
    require_video_output(folder.path() / name);
  }
  EXPECT_FALSE(is_video_extension("a.png"));
  require_video_output(folder.path() / "a.mp4", 48000);
  expect_error(ErrorKind::invalid_argument, {"a.mp4", "12345 samples per second"},
               [&] { require_video_output(folder.path() / "a.mp4", 12345); });
  expect_error(ErrorKind::unsupported, {"a.avi", ".mp4"},
               [&] { require_video_output(folder.path() / "a.avi"); });
  EXPECT_EQ(folder.file_count(), 0);
}

// --- reading -------------------------------------------------------------------------------------

using Rgb = std::array<int, 3>;
constexpr Rgb kRed{255, 0, 0}, kGreen{0, 255, 0}, kBlue{0, 0, 255}, kWhite{255, 255, 255};

// Fixtures show quadrants red, green / blue, white and a square of grey 40 t in the middle.
// `corners`: top left, top right, bottom left, bottom right as shown.
void expect_corners(const Video& video, const std::array<Rgb, 4>& corners, int tolerance) {
  const auto at = [&](int64_t t, int64_t y, int64_t x) {
    return video.frames[size_t(t)].data() + (y * video.width + x) * 3;
  };
  const int64_t bottom = video.height - 4, right = video.width - 4;
  const std::array<std::array<int64_t, 2>, 4> places{
      {{3, 3}, {3, right}, {bottom, 3}, {bottom, right}}};
  for (size_t t = 0; t < video.frames.size(); ++t) {
    for (size_t k = 0; k < 4; ++k) {
      for (size_t c = 0; c < 3; ++c) {
        EXPECT_NEAR(int(at(int64_t(t), places[k][0], places[k][1])[c]), corners[k][c], tolerance)
            << "frame " << t << " corner " << k;
      }
    }
  }
}

std::vector<int> centres(const Video& video) {
  std::vector<int> levels;
  for (const auto& frame : video.frames) {
    levels.push_back(frame[size_t((video.height / 2 * video.width + video.width / 2) * 3)]);
  }
  return levels;
}

constexpr std::array<Rgb, 4> kUpright{kRed, kGreen, kBlue, kWhite};

TEST(ReadVideo, Plain) {
  for (const char* name : {"plain.mp4", "fast.mp4"}) {
    const Video video = read_video(kMedia / name);
    EXPECT_EQ(video.height, 48);
    EXPECT_EQ(video.width, 64);
    EXPECT_EQ(video.fps, 10);
    ASSERT_EQ(video.frames.size(), 6u);
    expect_corners(video, kUpright, 6);
    for (int t = 0; t < 6; ++t) EXPECT_NEAR(centres(video)[size_t(t)], 40 * t, 6);
  }
}

TEST(ReadVideo, StopsAtMaxFrames) {
  EXPECT_EQ(read_video(kMedia / "plain.mp4", {.max_frames = 2}).frames.size(), 2u);
  EXPECT_EQ(read_video(kMedia / "plain.mp4", {.max_frames = 100}).frames.size(), 6u);
}

TEST(ReadVideo, RotationFlag) {
  const Video quarter = read_video(kMedia / "rotated90.mp4");
  EXPECT_EQ(quarter.height, 64);
  EXPECT_EQ(quarter.width, 48);
  expect_corners(quarter, {kGreen, kWhite, kRed, kBlue}, 6);
  expect_corners(read_video(kMedia / "rotated180.mp4"), {kWhite, kBlue, kGreen, kRed}, 6);
  expect_corners(read_video(kMedia / "rotated270.mp4"), {kBlue, kRed, kWhite, kGreen}, 6);
}

TEST(ReadVideo, OddSizesSixteenBitsAlphaAndSound) {
  const Video odd = read_video(kMedia / "odd_size.mkv");
  EXPECT_EQ(odd.height, 27);
  EXPECT_EQ(odd.width, 35);
  EXPECT_EQ(odd.frames.size(), 3u);
  expect_corners(odd, kUpright, 0);
  const Video alpha = read_video(kMedia / "alpha.mov");
  EXPECT_EQ(centres(alpha), (std::vector<int>{0, 40, 80, 120, 160, 200}));
  expect_corners(alpha, kUpright, 0);
  const Video grey = read_video(kMedia / "grey16.mkv");
  EXPECT_EQ(grey.frames.size(), 6u);
  for (int t = 0; t < 6; ++t) EXPECT_NEAR(centres(grey)[size_t(t)], 40 * t, 1);
  const Video sound = read_video(kMedia / "with_sound.mkv");
  EXPECT_EQ(centres(sound), (std::vector<int>{0, 40, 80, 120, 160, 200}));
}

TEST(ReadVideo, VariableRateKeepsItsPace) {
  // Frames at 0, 0.1, 0.2, 0.9, 1.0 and 1.1 s: the third is held for seven ticks.
  const Video video = read_video(kMedia / "variable_rate.mkv");
  EXPECT_NEAR(video.fps, 10, 1e-6);
  EXPECT_EQ(centres(video), (std::vector<int>{0, 40, 80, 80, 80, 80, 80, 80, 80, 120, 160, 200}));
  EXPECT_EQ(centres(read_video(kMedia / "variable_rate.mkv", {.max_frames = 5})),
            (std::vector<int>{0, 40, 80, 80, 80}));
}

TEST(ReadVideo, OneFrame) {
  const Video video = read_video(kMedia / "one_frame.mkv");
  EXPECT_EQ(centres(video), (std::vector<int>{0}));
}

TEST(ReadVideo, Gif) {
  const Video video = read_video(kMedia / "moving.gif");
  EXPECT_EQ(video.fps, 10);
  ASSERT_EQ(video.frames.size(), 3u);
  expect_corners(video, kUpright, 8);  // web palette
}

// A container whose video stream is there but was never given a frame.
TEST(ReadVideo, NoFrames) {
  const ScratchFolder folder;
  const auto file = folder.path() / "none.avi";
  AVFormatContext* format = nullptr;
  ASSERT_GE(avformat_alloc_output_context2(&format, nullptr, "avi", file.c_str()), 0);
  AVStream* stream = avformat_new_stream(format, nullptr);
  stream->codecpar->codec_type = AVMEDIA_TYPE_VIDEO;
  stream->codecpar->codec_id = AV_CODEC_ID_MPEG4;
  stream->codecpar->width = 64;
  stream->codecpar->height = 48;
  ASSERT_GE(avio_open(&format->pb, file.c_str(), AVIO_FLAG_WRITE), 0);
  ASSERT_GE(avformat_write_header(format, nullptr), 0);
  ASSERT_GE(av_write_trailer(format), 0);
  avio_closep(&format->pb);
  avformat_free_context(format);
  expect_error(ErrorKind::corrupt, {"none.avi", "no frames"}, [&] { read_video(file); });
}

TEST(ReadVideo, WithoutPictures) {
  expect_error(ErrorKind::invalid_argument, {"sound_only.m4a", "holds no video"},
               [] { read_video(kMedia / "sound_only.m4a"); });
  expect_error(ErrorKind::invalid_argument, {"cover_art.m4a", "cover picture"},
               [] { read_video(kMedia / "cover_art.m4a"); });
}

TEST(ReadVideo, WhatIsNoVideoIsNamed) {
  const ScratchFolder folder;
  expect_error(ErrorKind::not_found, {"absent.mp4", "no such file"},
               [&] { read_video(folder.path() / "absent.mp4"); });
  expect_error(ErrorKind::invalid_argument, {"is a folder"}, [&] { read_video(folder.path()); });
  expect_error(ErrorKind::corrupt, {"empty.mp4"},
               [&] { read_video(folder.write("empty.mp4", "")); });
  expect_error(ErrorKind::corrupt, {"text.mp4", "not a video"},
               [&] { read_video(folder.write("text.mp4", "no video at all, only words")); });
  // Names that libav would take for protocols, and lists of other files.
  expect_error(ErrorKind::not_found, {"http:"}, [] { read_video("http://localhost:1/x.mp4"); });
  folder.write("inner.mp4", ScratchFolder::read(kMedia / "plain.mp4"));
  expect_error(ErrorKind::invalid_argument, {"list.mp4"}, [&] {
    read_video(folder.write("list.mp4", "ffconcat version 1.0\nfile 'inner.mp4'\n"));
  });
  expect_error(ErrorKind::corrupt, {"list.m3u8"}, [&] {
    read_video(folder.write("list.m3u8", "#EXTM3U\n#EXTINF:1,\ninner.mp4\n#EXT-X-ENDLIST\n"));
  });
}

TEST(ReadVideo, TruncatedFiles) {
  const ScratchFolder folder;
  // Index at the end: nothing can be read once it is cut off.
  const std::string plain = ScratchFolder::read(kMedia / "plain.mp4");
  expect_error(ErrorKind::corrupt, {"cut.mp4", "damaged or truncated"},
               [&] { read_video(folder.write("cut.mp4", plain.substr(0, plain.size() - 200))); });
  // Index in front: frames are missing, which is no shorter clip.
  const std::string fast = ScratchFolder::read(kMedia / "fast.mp4");
  for (const size_t cut : {size_t{1}, size_t{40}, size_t{300}}) {
    expect_error(ErrorKind::corrupt, {"fast.mp4", "truncated"},
                 [&] { read_video(folder.write("fast.mp4", fast.substr(0, fast.size() - cut))); });
  }
  // The frames before the cut are good.
  const auto cut = folder.write("fast.mp4", fast.substr(0, fast.size() - 1));
  EXPECT_EQ(read_video(cut, {.max_frames = 2}).frames.size(), 2u);
}

std::vector<uint8_t> bytes_of(const std::filesystem::path& file) {
  const std::string text = ScratchFolder::read(file);
  return {text.begin(), text.end()};
}

TEST(ReadVideo, FromMemoryAsFromAFile) {
  for (const char* name : {"plain.mp4", "moving.gif", "variable_rate.mkv", "rotated90.mp4"}) {
    const Video video = read_video(kMedia / name);
    const Video again = decode_video(bytes_of(kMedia / name), {}, name);
    EXPECT_EQ(again.frames, video.frames) << name;
    EXPECT_EQ(again.fps, video.fps) << name;
  }
  expect_error(ErrorKind::corrupt, {"a clip", "not a video"},
               [] { decode_video(std::vector<uint8_t>(100, 'x'), {}, "a clip"); });
}

TEST(ReadVideo, EitherEndIsKept) {
  for (const char* name : {"plain.mp4", "variable_rate.mkv"}) {
    const Video all = read_video(kMedia / name);
    const auto count = std::ssize(all.frames);
    for (int64_t n : {int64_t{1}, int64_t{3}, count - 1, count, count + 5}) {
      const int64_t kept = std::min(n, count);
      const Video last = read_video(kMedia / name, {.max_frames = n, .keep = VideoKeep::last});
      ASSERT_EQ(std::ssize(last.frames), kept) << name;
      EXPECT_TRUE(std::equal(last.frames.begin(), last.frames.end(), all.frames.end() - kept))
          << name << ", last " << n;
    }
  }
}

TEST(ReadVideo, BroughtToTheSizeAskedForAsFramesAre) {
  const Video plain = read_video(kMedia / "plain.mp4");
  const Video small = read_video(kMedia / "plain.mp4", {.height = 16, .width = 32});
  const Video cover =
      read_video(kMedia / "plain.mp4", {.height = 16, .width = 32, .fit = VideoFit::cover});
  ASSERT_EQ(small.frames.size(), plain.frames.size());
  for (size_t i = 0; i < plain.frames.size(); ++i) {
    const Image frame{plain.height, plain.width, plain.frames[i]};
    EXPECT_EQ(small.frames[i], resize_8bit(frame, 16, 32).rgb);
    EXPECT_EQ(cover.frames[i], cover_8bit(frame, 16, 32).rgb);
    // What is done once more later changes nothing.
    EXPECT_EQ(resize_8bit({16, 32, small.frames[i]}, 16, 32).rgb, small.frames[i]);
    EXPECT_EQ(cover_8bit({16, 32, cover.frames[i]}, 16, 32).rgb, cover.frames[i]);
  }
}

// Faults, second list, C2: 300 frames of 1080p in 18 KB took 4.9 GB.
TEST(ReadVideo, MemoryIsThatOfTheFramesKept) {
  const ScratchFolder folder;
  const auto peak = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss / 1024;  // MB
  };
  const auto file = kMedia / "black_300_frames.mp4";
  const auto before = peak();
  const Video first = read_video(file, {.max_frames = 5, .height = 64, .width = 64});
  EXPECT_EQ(first.frames.size(), 5u);
  const Video last =
      read_video(file, {.max_frames = 5, .keep = VideoKeep::last, .height = 64, .width = 64});
  EXPECT_EQ(last.frames.size(), 5u);
  // The decoder's own frames (its threads hold some 3 MB each) and one frame of 6 MB as RGB.
  EXPECT_LT(peak() - before, 400);
}

// Faults, second list, B14: the picture track is flagged as the default.
TEST(ReadVideo, TheTrackWithPicturesInTime) {
  EXPECT_EQ(read_video(kMedia / "picture_track_default.mp4").frames.size(), 24u);
}

// Faults, second list, B13. The clips hold the pictures of the first one.
TEST(ReadVideo, HighDynamicRangeIsToneMapped) {
  const Video plain = read_video(kMedia / "range_sdr.mp4");
  for (const char* name : {"range_pq.mp4", "range_hlg.mp4"}) {
    const Video video = read_video(kMedia / name);
    ASSERT_EQ(video.frames.size(), plain.frames.size()) << name;
    // Taken as BT.709 they are 12 and 16 dB off. What is left is the compressed whites and two
    // lossy encodings.
    EXPECT_GT(psnr(video.frames[0], plain.frames[0]), 27) << name;
  }
}

// Comb: lines of the two fields differ where the picture moves.
double comb(const Video& video, const std::vector<uint8_t>& frame) {
  double sum = 0;
  for (int64_t y = 1; y + 1 < video.height; ++y) {
    for (int64_t x = 0; x < video.width; ++x) {
      const auto at = [&](int64_t row) {
        return double(frame[size_t((row * video.width + x) * 3 + 1)]);
      };
      const double above = at(y - 1) - at(y), below = at(y + 1) - at(y);
      if (above * below > 0) sum += std::min(std::abs(above), std::abs(below));
    }
  }
  return sum / double(video.width * video.height);
}

TEST(ReadVideo, InterlacedIsDeinterlaced) {
  const Video video = read_video(kMedia / "interlaced.mp4");
  EXPECT_EQ(video.frames.size(), 12u);
  EXPECT_NEAR(video.fps, 24, 1e-9);
  for (const auto& frame : video.frames) EXPECT_LT(comb(video, frame), 2);
}

TEST(ReadVideo, PipesAndDevicesAreNamed) {  // Faults, second list, C6
  expect_error(ErrorKind::invalid_argument, {"/dev/zero", "device"},
               [] { read_video("/dev/zero"); });
}

}  // namespace
}  // namespace orrery
