// Videos without FFmpeg: refused.
#include "base/error.h"
#include "io/frame_reader.h"
#include "io/video.h"

namespace orrery {
namespace {

[[noreturn]] void refuse(const std::string& name) {
  fail(ErrorKind::unsupported, name,
       ": this build has no FFmpeg; pictures are .png, .jpg or .jpeg, and videos need a build with "
       "ORRERY_MEDIA=ON");
}

}  // namespace

struct FrameReader::State {};
FrameReader::FrameReader(const std::filesystem::path& file, Contents) { refuse(file.string()); }
FrameReader::FrameReader(std::span<const uint8_t>, const std::string& name, Contents) {
  refuse(name);
}
FrameReader::~FrameReader() = default;
std::optional<FrameReader::Frame> FrameReader::next() { return std::nullopt; }
double FrameReader::frame_rate() const { return 0; }

struct VideoEncoder::State {};
VideoEncoder::VideoEncoder(const std::string& name, const VideoOptions&) { refuse(name); }
VideoEncoder::~VideoEncoder() = default;
void VideoEncoder::write(const uint8_t*) {}
std::vector<uint8_t> VideoEncoder::finish() { return {}; }

bool is_video_extension(const std::filesystem::path&) { return false; }
void require_video_output(const std::filesystem::path& file, int) { refuse(file.string()); }

}  // namespace orrery
