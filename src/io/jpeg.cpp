#include <csetjmp>
#include <cstddef>
#include <cstring>

// jpeglib.h does not include what it uses.
// clang-format off
#include <cstdio>
#include <jpeglib.h>
#include <jerror.h>
// clang-format on

#include "base/error.h"
#include "io/codecs.h"
#include "io/orientation.h"

namespace orrery {
namespace {

// libjpeg reports errors by longjmp, which must not pass C++ objects: stages are member functions
// whose own objects all live in the class.
class JpegErrors {
 public:
  jpeg_error_mgr manager;  // first: libjpeg hands back its address
  jmp_buf target;
  char message[JMSG_LENGTH_MAX] = {};

  jpeg_error_mgr* attach() {
    jpeg_std_error(&manager);
    manager.error_exit = on_error;
    manager.emit_message = on_message;
    manager.output_message = [](j_common_ptr) {};
    return &manager;
  }

 private:
  static void on_error(j_common_ptr codec) {
    auto* errors = reinterpret_cast<JpegErrors*>(codec->err);
    codec->err->format_message(codec, errors->message);
    longjmp(errors->target, 1);
  }
  // Warnings after which pixels are invented are errors here.
  static void on_message(j_common_ptr codec, int level) {
    if (level >= 0) return;
    switch (codec->err->msg_code) {
      case JWRN_JPEG_EOF:
      case JWRN_HIT_MARKER:
      case JWRN_HUFF_BAD_CODE:
      case JWRN_BOGUS_PROGRESSION: on_error(codec);
      default: break;
    }
  }
};

// Cameras and libjpeg's own scripts make 10 scans at most, optimisers some dozens.
constexpr int kMaxScans = 100;
// A block of 64 pixels takes a bit or more, but for runs of equal blocks in arithmetic coding.
constexpr int64_t kMaxPixelsPerByte = 16 * 8 * 64;
constexpr int kExifMarker = JPEG_APP0 + 1;
constexpr uint8_t kExifName[] = {'E', 'x', 'i', 'f', 0, 0};

// PIL's conversion; four-channel JPEGs store inverted ink by Adobe's convention.
void cmyk_to_rgb(const uint8_t* cmyk, uint8_t* rgb) {
  const int white = cmyk[3];
  for (int c = 0; c < 3; ++c) {
    const int product = (255 - cmyk[c]) * white + 128;
    rgb[c] = static_cast<uint8_t>(white - ((product + (product >> 8)) >> 8));
  }
}

class JpegReader {
 public:
  JpegReader(std::span<const uint8_t> bytes, const std::string& name) : bytes_(bytes), name_(name) {
    codec_.err = errors_.attach();
    attempt(&JpegReader::create);
  }
  ~JpegReader() { jpeg_destroy_decompress(&codec_); }
  JpegReader(const JpegReader&) = delete;
  JpegReader& operator=(const JpegReader&) = delete;

  Image read() {
    attempt(&JpegReader::read_header);
    image_.height = codec_.image_height;
    image_.width = codec_.image_width;
    require_pixels(image_.height, image_.width, name_);
    require(std::ssize(bytes_) * kMaxPixelsPerByte >= image_.height * image_.width,
            ErrorKind::corrupt, name_, ": the JPEG picture claims ", image_.width, "x",
            image_.height, " pixels, more than its ", bytes_.size(), " bytes can hold");
    image_.rgb.resize(size_t(image_.height * image_.width * 3));
    if (codec_.out_color_space == JCS_CMYK) row_.resize(size_t(image_.width * 4));
    attempt(&JpegReader::read_pixels);
    return upright(std::move(image_), orientation_);
  }

 private:
  void attempt(void (JpegReader::*stage)()) {
    if (setjmp(errors_.target) != 0) {
      fail(ErrorKind::corrupt, name_,
           ": the JPEG picture is damaged or truncated: ", errors_.message);
    }
    (this->*stage)();
  }
  void create() { jpeg_create_decompress(&codec_); }
  void read_header() {
    jpeg_mem_src(&codec_, bytes_.data(), bytes_.size());
    jpeg_save_markers(&codec_, kExifMarker, 0xffff);
    jpeg_read_header(&codec_, TRUE);
    codec_.out_color_space = codec_.num_components == 4 ? JCS_CMYK : JCS_RGB;
    for (const jpeg_marker_struct* marker = codec_.marker_list; marker; marker = marker->next) {
      constexpr size_t kHead = sizeof(kExifName);
      if (marker->marker != kExifMarker || marker->data_length < kHead ||
          std::memcmp(marker->data, kExifName, kHead) != 0) {
        continue;
      }
      orientation_ = exif_orientation({marker->data + kHead, marker->data_length - kHead});
      break;
    }
  }
  // Each scan goes over the whole picture: a small file can keep a processor busy for hours.
  static void on_progress(j_common_ptr codec) {
    if (reinterpret_cast<j_decompress_ptr>(codec)->input_scan_number <= kMaxScans) return;
    auto* errors = reinterpret_cast<JpegErrors*>(codec->err);
    std::snprintf(errors->message, sizeof errors->message, "it has more than %d scans", kMaxScans);
    longjmp(errors->target, 1);
  }
  void read_pixels() {
    progress_.progress_monitor = on_progress;
    codec_.progress = &progress_;
    jpeg_start_decompress(&codec_);
    while (codec_.output_scanline < codec_.output_height) {
      uint8_t* rgb = image_.rgb.data() + int64_t{codec_.output_scanline} * image_.width * 3;
      JSAMPROW row = row_.empty() ? rgb : row_.data();
      jpeg_read_scanlines(&codec_, &row, 1);
      if (row_.empty()) continue;
      for (int64_t x = 0; x < image_.width; ++x) cmyk_to_rgb(row + x * 4, rgb + x * 3);
    }
    jpeg_finish_decompress(&codec_);
  }

  std::span<const uint8_t> bytes_;
  const std::string& name_;
  JpegErrors errors_;
  jpeg_decompress_struct codec_{};
  jpeg_progress_mgr progress_{};
  Image image_;
  std::vector<uint8_t> row_;
  Orientation orientation_;
};

class JpegWriter {
 public:
  JpegWriter(const Image& image, const std::map<std::string, std::string>& text,
             const std::string& name)
      : image_(image), name_(name) {
    for (const auto& [key, value] : text) comments_.push_back(concat(key, ": ", value));
    codec_.err = errors_.attach();
  }
  ~JpegWriter() {
    jpeg_destroy_compress(&codec_);
    std::free(data_);
  }
  JpegWriter(const JpegWriter&) = delete;
  JpegWriter& operator=(const JpegWriter&) = delete;

  std::vector<uint8_t> write() {
    if (setjmp(errors_.target) != 0) {
      fail(ErrorKind::invalid_argument, name_,
           ": the picture cannot be written: ", errors_.message);
    }
    write_all();
    return {data_, data_ + size_};
  }

 private:
  void write_all() {
    jpeg_create_compress(&codec_);
    jpeg_mem_dest(&codec_, &data_, &size_);
    codec_.image_width = JDIMENSION(image_.width);
    codec_.image_height = JDIMENSION(image_.height);
    codec_.input_components = 3;
    codec_.in_color_space = JCS_RGB;
    jpeg_set_defaults(&codec_);
    jpeg_set_quality(&codec_, 95, TRUE);
    codec_.comp_info[0].h_samp_factor = 1;
    codec_.comp_info[0].v_samp_factor = 1;
    jpeg_start_compress(&codec_, TRUE);
    constexpr size_t kLargestMarker = 65533;
    for (const std::string& comment : comments_) {
      for (size_t at = 0; at < comment.size(); at += kLargestMarker) {
        jpeg_write_marker(&codec_, JPEG_COM, reinterpret_cast<const JOCTET*>(comment.data()) + at,
                          static_cast<unsigned>(std::min(kLargestMarker, comment.size() - at)));
      }
    }
    while (codec_.next_scanline < codec_.image_height) {
      auto* row = const_cast<JSAMPROW>(image_.rgb.data() +
                                       int64_t{codec_.next_scanline} * image_.width * 3);
      jpeg_write_scanlines(&codec_, &row, 1);
    }
    jpeg_finish_compress(&codec_);
  }

  const Image& image_;
  const std::string& name_;
  std::vector<std::string> comments_;
  JpegErrors errors_;
  jpeg_compress_struct codec_{};
  unsigned char* data_ = nullptr;
  unsigned long size_ = 0;
};

}  // namespace

bool is_jpeg(std::span<const uint8_t> bytes) {
  return bytes.size() >= 3 && bytes[0] == 0xff && bytes[1] == 0xd8 && bytes[2] == 0xff;
}

Image decode_jpeg(std::span<const uint8_t> bytes, const std::string& name) {
  return JpegReader(bytes, name).read();
}

std::vector<uint8_t> encode_jpeg(const Image& image, const std::map<std::string, std::string>& text,
                                 const std::string& name) {
  require(image.width <= JPEG_MAX_DIMENSION && image.height <= JPEG_MAX_DIMENSION, name, ": ",
          image.width, "x", image.height, " is too large for JPEG, whose sides end at ",
          JPEG_MAX_DIMENSION, "; write a .png");
  return JpegWriter(image, text, name).write();
}

}  // namespace orrery
