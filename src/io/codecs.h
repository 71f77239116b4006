// PNG and JPEG, between bytes and images. Messages begin with `name`.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "io/image.h"

namespace orrery {

bool is_png(std::span<const uint8_t> bytes);
Image decode_png(std::span<const uint8_t> bytes, const std::string& name);
std::vector<uint8_t> encode_png(const Image& image, const std::map<std::string, std::string>& text,
                                const std::string& name);

bool is_jpeg(std::span<const uint8_t> bytes);
Image decode_jpeg(std::span<const uint8_t> bytes, const std::string& name);
std::vector<uint8_t> encode_jpeg(const Image& image, const std::map<std::string, std::string>& text,
                                 const std::string& name);

// Refuses pictures without pixels or with more than kMaxImagePixels.
void require_pixels(int64_t height, int64_t width, const std::string& name);

}  // namespace orrery
