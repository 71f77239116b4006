#include "io/image.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "io/codecs.h"
#include "io/frame_reader.h"
#include "io/input_file.h"
#include "io/orientation.h"
#include "orrery/output.h"

namespace orrery {
namespace {

constexpr int64_t kMaxImageBytes = int64_t{1} << 30;

std::string lower_extension(const std::filesystem::path& file) {
  std::string extension = file.extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return extension;
}

// libav reads still WebP only, and would call an animation damaged.
bool is_animated_webp(std::span<const uint8_t> bytes) {
  constexpr size_t kFlags = 20;
  const auto has = [&](size_t at, std::string_view tag) {
    return std::equal(tag.begin(), tag.end(), bytes.begin() + std::ptrdiff_t(at));
  };
  return bytes.size() > kFlags && has(0, "RIFF") && has(8, "WEBPVP8X") && (bytes[kFlags] & 2) != 0;
}

// libav leaves the orientation of these as it is stored.
Orientation stored_orientation(std::span<const uint8_t> bytes) {
  const auto tag = [&](size_t at, std::string_view name) {
    return at + name.size() <= bytes.size() &&
           std::equal(name.begin(), name.end(), bytes.begin() + std::ptrdiff_t(at));
  };
  if (!tag(0, "RIFF") || !tag(8, "WEBP")) return exif_orientation(bytes);  // of TIFF alone
  constexpr size_t kFirstChunk = 12, kChunkHead = 8;
  for (size_t at = kFirstChunk; at + kChunkHead <= bytes.size();) {
    size_t size = 0;
    for (size_t i = 0; i < 4; ++i) size |= size_t{bytes[at + 4 + i]} << (8 * i);
    size = std::min(size, bytes.size() - at - kChunkHead);
    if (tag(at, "EXIF")) {
      constexpr std::string_view kHead("Exif\0\0", 6);  // some writers keep JPEG's
      const size_t skip = tag(at + kChunkHead, kHead) ? kHead.size() : 0;
      return exif_orientation(bytes.subspan(at + kChunkHead, size).subspan(std::min(skip, size)));
    }
    at += kChunkHead + size + size % 2;
  }
  return {};
}

void require_image_name(const std::filesystem::path& file) {
  require(is_image_extension(file), ErrorKind::unsupported, file.string(),
          ": pictures are written as .png, .jpg or .jpeg");
}

}  // namespace

void require_pixels(int64_t height, int64_t width, const std::string& name) {
  require(height > 0 && width > 0, ErrorKind::corrupt, name, ": the picture has no pixels (", width,
          "x", height, ")");
  require(height <= kMaxImagePixels / width, ErrorKind::unsupported, name, ": ", width, "x", height,
          " is too large; pictures may have up to ", kMaxImagePixels, " pixels");
}

Image decode_image(std::span<const uint8_t> bytes, const std::string& name) {
  require(!bytes.empty(), ErrorKind::corrupt, name, ": the file is empty");
  if (is_png(bytes)) return decode_png(bytes, name);
  if (is_jpeg(bytes)) return decode_jpeg(bytes, name);
  require(!is_animated_webp(bytes), ErrorKind::unsupported, name,
          ": animated WebP cannot be read; save one of its frames as a picture");
  auto frame = FrameReader(bytes, name, FrameReader::Contents::still).next();
  require(frame.has_value(), ErrorKind::corrupt, name, ": the file holds no picture");
  return upright(std::move(frame->image), stored_orientation(bytes));
}

Image read_image(const std::filesystem::path& file) {
  return decode_image(read_input(file, kMaxImageBytes, "a picture"), file.string());
}

std::vector<uint8_t> encode_image(const Image& image,
                                  const std::map<std::string, std::string>& text,
                                  const std::string& name) {
  require_image_name(name);
  require_pixels(image.height, image.width, name);
  require(std::ssize(image.rgb) == image.height * image.width * 3, name, ": a picture of ",
          image.width, "x", image.height, " cannot have ", image.rgb.size(), " bytes");
  return lower_extension(name) == ".png" ? encode_png(image, text, name)
                                         : encode_jpeg(image, text, name);
}

void write_image(const std::filesystem::path& file, const Image& image,
                 const std::map<std::string, std::string>& text) {
  const std::vector<uint8_t> bytes = encode_image(image, text, file.string());
  OutputFile output(file);
  output.write(bytes);
  output.commit();
}

bool is_image_extension(const std::filesystem::path& file) {
  const std::string extension = lower_extension(file);
  return extension == ".png" || extension == ".jpg" || extension == ".jpeg";
}

}  // namespace orrery
