#include <png.h>

#include <algorithm>
#include <csetjmp>
#include <cstring>

#include "base/error.h"
#include "io/codecs.h"
#include "io/orientation.h"

namespace orrery {
namespace {

constexpr png_alloc_size_t kMaxChunkBytes = 1 << 20;  // of what is kept beside the pixels

// libpng reports errors by longjmp, which must not pass C++ objects: each stage below is a member
// function whose own objects all live in the class, entered through attempt().
class PngReader {
 public:
  PngReader(std::span<const uint8_t> bytes, const std::string& name) : rest_(bytes), name_(name) {
    png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, this, on_error, on_warning);
    info_ = png_ ? png_create_info_struct(png_) : nullptr;
    if (!info_) {
      png_destroy_read_struct(&png_, nullptr, nullptr);
      fail(ErrorKind::out_of_memory, name_, ": no memory to read the picture");
    }
    png_set_read_fn(png_, this, on_read);
    png_set_user_limits(png_, 0x7fffffff, 0x7fffffff);
    // Beside pixels and orientation nothing is wanted, and compressed texts can claim gigabytes.
    constexpr png_byte kSkipped[] = "iCCP\0iTXt\0sPLT\0tEXt\0zTXt";
    png_set_keep_unknown_chunks(png_, PNG_HANDLE_CHUNK_NEVER, kSkipped, sizeof(kSkipped) / 5);
    png_set_chunk_malloc_max(png_, kMaxChunkBytes);
  }
  ~PngReader() { png_destroy_read_struct(&png_, &info_, nullptr); }
  PngReader(const PngReader&) = delete;
  PngReader& operator=(const PngReader&) = delete;

  Image read() {
    const size_t size = rest_.size();
    attempt(&PngReader::read_header);
    image_.height = png_get_image_height(png_, info_);
    image_.width = png_get_image_width(png_, info_);
    require_pixels(image_.height, image_.width, name_);
    // Deflate shrinks to 1/1032 at most; a file too small for what it claims costs no memory.
    require(int64_t(size) * 1032 >= image_.height * ((image_.width + 7) / 8), ErrorKind::corrupt,
            name_, ": the PNG picture claims ", image_.width, "x", image_.height,
            " pixels, more than its ", size, " bytes can hold");
    image_.rgb.resize(size_t(image_.height * image_.width * 3));
    for (int64_t y = 0; y < image_.height; ++y) {
      rows_.push_back(image_.rgb.data() + y * image_.width * 3);
    }
    attempt(&PngReader::read_pixels);
    return upright(std::move(image_), exif_orientation({exif_, exif_size_}));
  }

 private:
  void attempt(void (PngReader::*stage)()) {
    if (setjmp(png_jmpbuf(png_)) != 0) {
      fail(ErrorKind::corrupt, name_, ": the PNG picture is damaged or truncated: ", message_);
    }
    (this->*stage)();
  }
  void read_header() {
    png_read_info(png_, info_);
    png_set_expand(png_);
    png_set_strip_16(png_);
    png_set_strip_alpha(png_);
    png_set_gray_to_rgb(png_);
    png_set_interlace_handling(png_);
    png_read_update_info(png_, info_);
    if (png_get_rowbytes(png_, info_) != size_t{3} * png_get_image_width(png_, info_)) {
      png_error(png_, "unexpected row size");
    }
  }
  void read_pixels() {
    png_read_image(png_, rows_.data());
    png_read_end(png_, info_);
    png_get_eXIf_1(png_, info_, &exif_size_, &exif_);
  }
  static void on_read(png_structp png, png_bytep out, size_t size) {
    auto& reader = *static_cast<PngReader*>(png_get_io_ptr(png));
    if (size > reader.rest_.size()) png_error(png, "the file ends too early");
    std::memcpy(out, reader.rest_.data(), size);
    reader.rest_ = reader.rest_.subspan(size);
  }
  static void on_error(png_structp png, png_const_charp message) {
    auto& reader = *static_cast<PngReader*>(png_get_error_ptr(png));
    std::strncpy(reader.message_, message, sizeof(reader.message_) - 1);
    png_longjmp(png, 1);
  }
  static void on_warning(png_structp, png_const_charp) {}

  std::span<const uint8_t> rest_;
  const std::string& name_;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  Image image_;
  std::vector<png_bytep> rows_;
  png_uint_32 exif_size_ = 0;
  png_bytep exif_ = nullptr;
  char message_[200] = {};
};

class PngWriter {
 public:
  PngWriter(const Image& image, const std::map<std::string, std::string>& text,
            const std::string& name)
      : image_(image), name_(name) {
    for (const auto& [key, value] : text) {
      const bool latin = std::all_of(value.begin(), value.end(),
                                     [](char c) { return static_cast<unsigned char>(c) < 128; });
      png_text entry{};
      entry.compression = latin ? PNG_TEXT_COMPRESSION_NONE : PNG_ITXT_COMPRESSION_NONE;
      entry.key = const_cast<char*>(key.c_str());
      entry.text = const_cast<char*>(value.c_str());
      (latin ? entry.text_length : entry.itxt_length) = value.size();
      text_.push_back(entry);
    }
    png_ = png_create_write_struct(PNG_LIBPNG_VER_STRING, this, on_error, on_warning);
    info_ = png_ ? png_create_info_struct(png_) : nullptr;
    if (!info_) {
      png_destroy_write_struct(&png_, nullptr);
      fail(ErrorKind::out_of_memory, name_, ": no memory to write the picture");
    }
    png_set_write_fn(png_, this, on_write, nullptr);
    png_set_user_limits(png_, 0x7fffffff, 0x7fffffff);
  }
  ~PngWriter() { png_destroy_write_struct(&png_, &info_); }
  PngWriter(const PngWriter&) = delete;
  PngWriter& operator=(const PngWriter&) = delete;

  std::vector<uint8_t> write() {
    if (setjmp(png_jmpbuf(png_)) != 0) {
      fail(ErrorKind::invalid_argument, name_, ": the picture cannot be written: ", message_);
    }
    write_all();
    return std::move(out_);
  }

 private:
  void write_all() {
    png_set_IHDR(png_, info_, png_uint_32(image_.width), png_uint_32(image_.height), 8,
                 PNG_COLOR_TYPE_RGB, PNG_INTERLACE_NONE, PNG_COMPRESSION_TYPE_DEFAULT,
                 PNG_FILTER_TYPE_DEFAULT);
    if (!text_.empty()) png_set_text(png_, info_, text_.data(), int(text_.size()));
    png_write_info(png_, info_);
    for (int64_t y = 0; y < image_.height; ++y) {
      png_write_row(png_, image_.rgb.data() + y * image_.width * 3);
    }
    png_write_end(png_, nullptr);
  }
  // No allocation failure may throw through libpng's frames.
  static void on_write(png_structp png, png_bytep data, size_t size) {
    auto& writer = *static_cast<PngWriter*>(png_get_io_ptr(png));
    bool stored = true;
    try {
      writer.out_.insert(writer.out_.end(), data, data + size);
    } catch (const std::exception&) {
      stored = false;
    }
    if (!stored) png_error(png, "out of memory");
  }
  static void on_error(png_structp png, png_const_charp message) {
    auto& writer = *static_cast<PngWriter*>(png_get_error_ptr(png));
    std::strncpy(writer.message_, message, sizeof(writer.message_) - 1);
    png_longjmp(png, 1);
  }
  static void on_warning(png_structp, png_const_charp) {}

  const Image& image_;
  const std::string& name_;
  std::vector<png_text> text_;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  std::vector<uint8_t> out_;
  char message_[200] = {};
};

}  // namespace

bool is_png(std::span<const uint8_t> bytes) {
  return bytes.size() >= 8 && png_sig_cmp(bytes.data(), 0, 8) == 0;
}

Image decode_png(std::span<const uint8_t> bytes, const std::string& name) {
  return PngReader(bytes, name).read();
}

std::vector<uint8_t> encode_png(const Image& image, const std::map<std::string, std::string>& text,
                                const std::string& name) {
  for (const auto& [key, value] : text) {
    const bool printable =
        std::all_of(key.begin(), key.end(), [](char c) { return c >= ' ' && c <= '~'; });
    require(printable && !key.empty() && key.size() < 80 && key.front() != ' ' && key.back() != ' ',
            name, ": \"", key, "\" is not a PNG keyword (1 to 79 printable ASCII characters)");
    require(value.find('\0') == std::string::npos, name, ": the text \"", key,
            "\" holds a zero byte, which PNG text cannot");
  }
  return PngWriter(image, text, name).write();
}

}  // namespace orrery
