#include "io/embedded_text.h"

#include <algorithm>
#include <fstream>
#include <memory>

#include "base/error.h"

extern "C" {
#include <libavformat/avformat.h>
}

namespace orrery {

namespace {

constexpr size_t kMaxText = size_t{16} << 20;

uint32_t big_endian(const std::string& bytes, size_t at, size_t count) {
  uint32_t value = 0;
  for (size_t i = 0; i < count; ++i) value = value << 8 | static_cast<uint8_t>(bytes[at + i]);
  return value;
}

// Reads `count` bytes; fewer are a truncated file.
std::string take(std::ifstream& in, size_t count, const std::string& name) {
  require(count <= kMaxText, ErrorKind::corrupt, name, ": a text of ", count, " bytes");
  std::string bytes(count, '\0');
  in.read(bytes.data(), static_cast<std::streamsize>(count));
  require(static_cast<size_t>(in.gcount()) == count, ErrorKind::corrupt, name,
          ": the file is truncated");
  return bytes;
}

// tEXt: key, 0, text. iTXt: key, 0, flag, method, language, 0, translated key, 0, text.
std::string text_of_chunk(const std::string& type, const std::string& chunk,
                          const std::string& key) {
  if (!chunk.starts_with(key + '\0')) return {};
  size_t at = key.size() + 1;
  if (type == "iTXt") {
    if (chunk.size() < at + 2 || chunk[at] != 0) return {};  // compressed
    at += 2;
    for (int i = 0; i < 2; ++i) at = std::min(chunk.find('\0', at), chunk.size() - 1) + 1;
  }
  return chunk.substr(at);
}

std::string png_text(std::ifstream& in, const std::string& key, const std::string& name) {
  constexpr size_t kCrc = 4;
  in.seekg(8);
  while (true) {
    const std::string head = take(in, 8, name);
    const size_t length = big_endian(head, 0, 4);
    const std::string type = head.substr(4);
    if (type == "IEND") return {};
    if (type != "tEXt" && type != "iTXt") {
      in.seekg(static_cast<std::streamoff>(length + kCrc), std::ios::cur);
      continue;
    }
    std::string text = text_of_chunk(type, take(in, length, name), key);
    if (!text.empty()) return text;
    in.seekg(kCrc, std::ios::cur);
  }
}

// Long comments go on in the next marker.
std::string jpeg_text(std::ifstream& in, const std::string& key, const std::string& name) {
  constexpr size_t kLargest = 65533;
  std::string text;
  bool goes_on = false;
  in.seekg(2);
  while (true) {
    const std::string head = take(in, 4, name);
    const auto marker = static_cast<uint8_t>(head[1]);
    if (static_cast<uint8_t>(head[0]) != 0xFF || marker == 0xDA) return text;
    const std::string body = take(in, big_endian(head, 2, 2) - 2, name);
    if (marker != 0xFE) continue;
    if (goes_on)
      text += body;
    else if (body.starts_with(key + ": "))
      text = body.substr(key.size() + 2);
    else
      continue;
    goes_on = body.size() == kLargest;
    if (!goes_on) return text;
  }
}

std::string container_text(const std::string& name, const std::string& key) {
  struct Close {
    void operator()(AVFormatContext* context) const { avformat_close_input(&context); }
  };
  AVFormatContext* opened = nullptr;
  require(avformat_open_input(&opened, name.c_str(), nullptr, nullptr) == 0, ErrorKind::corrupt,
          name, ": this is no report, picture or video that can be read");
  const std::unique_ptr<AVFormatContext, Close> context(opened);
  const AVDictionaryEntry* tag = av_dict_get(context->metadata, key.c_str(), nullptr, 0);
  return tag == nullptr ? std::string() : tag->value;
}

}  // namespace

std::string read_embedded_text(const std::filesystem::path& file, const std::string& key) {
  const std::string name = file.string();
  std::ifstream in(file, std::ios::binary);
  require(in.good() && !std::filesystem::is_directory(file), ErrorKind::not_found, name,
          ": cannot open the file");
  std::string magic(8, '\0');
  in.read(magic.data(), static_cast<std::streamsize>(magic.size()));
  in.clear();
  if (magic == "\x89PNG\r\n\x1A\n") return png_text(in, key, name);
  if (magic.starts_with("\xFF\xD8")) return jpeg_text(in, key, name);
  return container_text(name, key);
}

}  // namespace orrery
