#include "io/image.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <fstream>
#include <string_view>
#include <system_error>

#include "base/error.h"
#include "io/codecs.h"
#include "io/frame_reader.h"
#include "io/output_file.h"

namespace orrery {
namespace {

constexpr int64_t kMaxImageBytes = int64_t{1} << 30;

std::string lower_extension(const std::filesystem::path& file) {
  std::string extension = file.extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return extension;
}

std::vector<uint8_t> read_bytes(const std::filesystem::path& file) {
  std::error_code error;
  const auto status = std::filesystem::status(file, error);
  require(std::filesystem::exists(status), ErrorKind::not_found, file.string(),
          ": there is no such file");
  require(!std::filesystem::is_directory(status), file.string(), " is a folder, not a picture");
  errno = 0;
  std::ifstream in(file, std::ios::binary);
  std::vector<uint8_t> bytes;
  constexpr size_t kChunk = size_t{1} << 20;
  while (in) {
    const size_t done = bytes.size();
    require(int64_t(done) <= kMaxImageBytes, ErrorKind::unsupported, file.string(),
            " is larger than ", kMaxImageBytes >> 20, " MiB, too large for a picture");
    bytes.resize(done + kChunk);
    in.read(reinterpret_cast<char*>(bytes.data() + done), kChunk);
    bytes.resize(done + static_cast<size_t>(in.gcount()));
  }
  require(in.eof(), ErrorKind::invalid_argument, file.string(),
          ": cannot read the file: ", std::generic_category().message(errno));
  return bytes;
}

// libav reads still WebP only, and would call an animation damaged.
bool is_animated_webp(std::span<const uint8_t> bytes) {
  constexpr size_t kFlags = 20;
  const auto has = [&](size_t at, std::string_view tag) {
    return std::equal(tag.begin(), tag.end(), bytes.begin() + std::ptrdiff_t(at));
  };
  return bytes.size() > kFlags && has(0, "RIFF") && has(8, "WEBPVP8X") && (bytes[kFlags] & 2) != 0;
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
  return std::move(frame->image);
}

Image read_image(const std::filesystem::path& file) {
  return decode_image(read_bytes(file), file.string());
}

void write_image(const std::filesystem::path& file, const Image& image,
                 const std::map<std::string, std::string>& text) {
  require_image_name(file);
  const std::string name = file.string();
  require_pixels(image.height, image.width, name);
  require(std::ssize(image.rgb) == image.height * image.width * 3, name, ": a picture of ",
          image.width, "x", image.height, " cannot have ", image.rgb.size(), " bytes");
  const std::vector<uint8_t> bytes = lower_extension(file) == ".png"
                                         ? encode_png(image, text, name)
                                         : encode_jpeg(image, text, name);
  OutputFile output(file);
  output.write(bytes.data(), bytes.size());
  output.commit();
}

bool is_image_extension(const std::filesystem::path& file) {
  const std::string extension = lower_extension(file);
  return extension == ".png" || extension == ".jpg" || extension == ".jpeg";
}

void require_image_output(const std::filesystem::path& file) {
  require_image_name(file);
  OutputFile probe(file);
}

}  // namespace orrery
