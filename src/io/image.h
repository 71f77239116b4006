// Still images in memory and on disk.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace orrery {

// Larger pictures are refused: a small damaged file can claim any size.
inline constexpr int64_t kMaxImagePixels = int64_t{1} << 28;

// 8-bit RGB, rows top to bottom, no padding.
struct Image {
  int64_t height = 0;
  int64_t width = 0;
  std::vector<uint8_t> rgb;  // [height, width, 3]
};

// PNG or JPEG by content, not by name; other still formats (WebP, BMP, TIFF, GIF, ...) by libav.
// Alpha and transparent colours are dropped, the colours below them kept; grey, palette and CMYK
// are expanded; of 16 bits the high 8 are taken; EXIF orientation is applied; colour profiles are
// ignored. Errors name the file and what is wrong with it; a truncated file is an error.
Image read_image(const std::filesystem::path& file);
// The same from memory; `name` stands for the file in messages.
Image decode_image(std::span<const uint8_t> bytes, const std::string& name);

// PNG (with `text` as tEXt or iTXt chunks) or JPEG (quality 95, no chroma subsampling, text as
// comments "key: value"), by the extension of `name`, with which messages begin. The same image
// gives the same bytes.
std::vector<uint8_t> encode_image(const Image& image,
                                  const std::map<std::string, std::string>& text,
                                  const std::string& name);
// The same as an output file.
void write_image(const std::filesystem::path& file, const Image& image,
                 const std::map<std::string, std::string>& text = {});

// True when write_image() can write this extension (.png .jpg .jpeg, any case).
bool is_image_extension(const std::filesystem::path& file);

}  // namespace orrery
