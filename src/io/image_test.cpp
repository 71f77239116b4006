#include "io/image.h"

#include <gtest/gtest.h>
#include <png.h>
#include <sys/resource.h>

#include <cstdlib>
#include <string>
#include <vector>

// jpeglib.h does not include what it uses.
// clang-format off
#include <cstdio>
#include <jpeglib.h>
// clang-format on

#include "expect_error.h"
#include "scratch_folder.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

const std::filesystem::path kMedia = source_dir() / "tests/data/media";

Image pattern(int64_t height, int64_t width) {
  Image image{height, width, {}};
  for (int64_t i = 0; i < height * width * 3; ++i) {
    image.rgb.push_back(uint8_t((i * 37 + i / 3 * 11) % 256));
  }
  return image;
}

// A PNG of any kind libpng can write; rows without padding.
struct RawPng {
  int64_t height, width;
  int bit_depth, color_type;
  std::vector<uint8_t> rows;
  std::vector<png_color> palette = {};
  std::vector<png_byte> alpha = {};  // of the palette
  int interlace = PNG_INTERLACE_NONE;
  std::vector<uint8_t> exif = {};
};

std::vector<uint8_t> make_png(RawPng raw) {
  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, nullptr);
  png_infop info = png_create_info_struct(png);
  std::vector<uint8_t> out;
  png_set_write_fn(
      png, &out,
      [](png_structp writer, png_bytep data, size_t size) {
        auto& bytes = *static_cast<std::vector<uint8_t>*>(png_get_io_ptr(writer));
        bytes.insert(bytes.end(), data, data + size);
      },
      nullptr);
  png_set_IHDR(png, info, png_uint_32(raw.width), png_uint_32(raw.height), raw.bit_depth,
               raw.color_type, raw.interlace, PNG_COMPRESSION_TYPE_DEFAULT,
               PNG_FILTER_TYPE_DEFAULT);
  if (!raw.palette.empty()) png_set_PLTE(png, info, raw.palette.data(), int(raw.palette.size()));
  if (!raw.alpha.empty()) png_set_tRNS(png, info, raw.alpha.data(), int(raw.alpha.size()), nullptr);
  if (!raw.exif.empty()) png_set_eXIf_1(png, info, png_uint_32(raw.exif.size()), raw.exif.data());
  std::vector<png_bytep> rows;
  const size_t row = raw.rows.size() / size_t(raw.height);
  for (int64_t y = 0; y < raw.height; ++y) rows.push_back(raw.rows.data() + size_t(y) * row);
  png_set_rows(png, info, rows.data());
  png_write_png(png, info, PNG_TRANSFORM_IDENTITY, nullptr);
  png_destroy_write_struct(&png, &info);
  return out;
}

std::vector<uint8_t> make_jpeg(int64_t height, int64_t width, int channels, J_COLOR_SPACE space,
                               std::vector<uint8_t> pixels) {
  jpeg_compress_struct codec;
  jpeg_error_mgr errors;
  codec.err = jpeg_std_error(&errors);
  jpeg_create_compress(&codec);
  unsigned char* data = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&codec, &data, &size);
  codec.image_width = JDIMENSION(width);
  codec.image_height = JDIMENSION(height);
  codec.input_components = channels;
  codec.in_color_space = space;
  jpeg_set_defaults(&codec);
  jpeg_set_quality(&codec, 100, TRUE);
  jpeg_start_compress(&codec, TRUE);
  for (int64_t y = 0; y < height; ++y) {
    JSAMPROW row = pixels.data() + y * width * channels;
    jpeg_write_scanlines(&codec, &row, 1);
  }
  jpeg_finish_compress(&codec);
  std::vector<uint8_t> out(data, data + size);
  jpeg_destroy_compress(&codec);
  std::free(data);
  return out;
}

void expect_pixel(const Image& image, int64_t y, int64_t x, std::vector<int> rgb, int tolerance) {
  for (size_t c = 0; c < 3; ++c) {
    EXPECT_NEAR(int(image.rgb[size_t(y * image.width + x) * 3 + c]), rgb[c], tolerance)
        << "at " << x << ", " << y << " channel " << c;
  }
}

std::vector<uint8_t> exif(uint8_t orientation) {
  return {'I', 'I', 42, 0, 8, 0,           0, 0, 1, 0, 0x12, 0x01, 3,
          0,   1,   0,  0, 0, orientation, 0, 0, 0, 0, 0,    0,    0};
}

// --- writing -------------------------------------------------------------------------------------

TEST(WriteImage, PngRoundTripWithText) {
  const ScratchFolder folder;
  const auto file = folder.path() / "a.PNG";
  const Image image = pattern(13, 7);
  write_image(file, image, {{"prompt", "a cat"}, {"Comment", "na\xc3\xafve"}});
  const Image back = read_image(file);
  EXPECT_EQ(back.height, 13);
  EXPECT_EQ(back.width, 7);
  EXPECT_EQ(back.rgb, image.rgb);
  const std::string bytes = ScratchFolder::read(file);
  EXPECT_NE(bytes.find(std::string("tEXtprompt\0a cat", 16)), std::string::npos);
  EXPECT_NE(bytes.find("iTXtComment"), std::string::npos);
  EXPECT_EQ(folder.file_count(), 1);
}

TEST(WriteImage, JpegIsCloseAndCarriesComments) {
  const ScratchFolder folder;
  const auto file = folder.path() / "a.jpeg";
  Image image{16, 24, {}};
  for (int64_t i = 0; i < 16 * 24; ++i) {
    for (const int64_t value : {i % 24 * 10, 128 + i / 24, int64_t{30}}) {
      image.rgb.push_back(uint8_t(value));
    }
  }
  write_image(file, image, {{"prompt", "a dog"}});
  const Image back = read_image(file);
  ASSERT_EQ(back.rgb.size(), image.rgb.size());
  // Quality 95 on a smooth picture, chroma at full resolution.
  for (size_t i = 0; i < image.rgb.size(); ++i) EXPECT_NEAR(back.rgb[i], image.rgb[i], 6);
  EXPECT_NE(ScratchFolder::read(file).find("prompt: a dog"), std::string::npos);
}

TEST(WriteImage, SameImageSameBytes) {
  const ScratchFolder folder;
  for (const char* extension : {".png", ".jpg"}) {
    const auto a = folder.path() / (std::string("a") + extension);
    const auto b = folder.path() / (std::string("b") + extension);
    write_image(a, pattern(20, 20), {{"k", "v"}});
    write_image(b, pattern(20, 20), {{"k", "v"}});
    EXPECT_EQ(ScratchFolder::read(a), ScratchFolder::read(b));
  }
}

TEST(WriteImage, RefusesByName) {
  const ScratchFolder folder;
  expect_error(ErrorKind::unsupported, {"a.gif", ".png"},
               [&] { write_image(folder.path() / "a.gif", pattern(2, 2)); });
  expect_error(ErrorKind::invalid_argument, {"a.png", "3x2", "17 bytes"}, [&] {
    write_image(folder.path() / "a.png", Image{2, 3, std::vector<uint8_t>(17)});
  });
  expect_error(ErrorKind::invalid_argument, {"keyword"}, [&] {
    write_image(folder.path() / "a.png", pattern(2, 2), {{"", "x"}});
  });
  EXPECT_EQ(folder.file_count(), 0);
  EXPECT_TRUE(is_image_extension("x.JPG"));
  EXPECT_FALSE(is_image_extension("x.mp4"));
}

// --- PNG -----------------------------------------------------------------------------------------

TEST(ReadPng, EveryKindBecomesRgb) {  // B41
  struct Kind {
    RawPng raw;
    std::vector<uint8_t> rgb;
  };
  const std::vector<png_color> palette = {{1, 2, 3}, {250, 251, 252}};
  const std::vector<Kind> kinds = {
      {{1, 2, 8, PNG_COLOR_TYPE_RGB_ALPHA, {1, 2, 3, 0, 4, 5, 6, 255}}, {1, 2, 3, 4, 5, 6}},
      {{1, 2, 8, PNG_COLOR_TYPE_GRAY, {7, 200}}, {7, 7, 7, 200, 200, 200}},
      {{1, 2, 8, PNG_COLOR_TYPE_GRAY_ALPHA, {7, 0, 200, 9}}, {7, 7, 7, 200, 200, 200}},
      {{1, 2, 16, PNG_COLOR_TYPE_GRAY, {0x12, 0xff, 0xfe, 0x01}},
       {0x12, 0x12, 0x12, 0xfe, 0xfe, 0xfe}},
      {{1, 1, 16, PNG_COLOR_TYPE_RGB, {9, 255, 8, 255, 7, 0}}, {9, 8, 7}},
      {{1, 1, 16, PNG_COLOR_TYPE_RGB_ALPHA, {9, 255, 8, 255, 7, 0, 0, 0}}, {9, 8, 7}},
      {{1, 8, 1, PNG_COLOR_TYPE_GRAY, {0b10000000}},
       {255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
      {{1, 2, 4, PNG_COLOR_TYPE_GRAY, {0x1f}}, {17, 17, 17, 255, 255, 255}},
      {{1, 2, 8, PNG_COLOR_TYPE_PALETTE, {1, 0}, palette}, {250, 251, 252, 1, 2, 3}},
      // Transparent palette entries keep their colour.
      {{1, 2, 8, PNG_COLOR_TYPE_PALETTE, {1, 0}, palette, {0, 0}}, {250, 251, 252, 1, 2, 3}},
  };
  for (const Kind& kind : kinds) {
    const Image image = decode_image(make_png(kind.raw), "x.png");
    EXPECT_EQ(image.rgb, kind.rgb) << kind.raw.color_type << " of " << kind.raw.bit_depth;
    EXPECT_EQ(image.width, kind.raw.width);
  }
}

TEST(ReadPng, InterlacedAndTurned) {
  RawPng raw{9, 5, 8, PNG_COLOR_TYPE_RGB, pattern(9, 5).rgb};
  raw.interlace = PNG_INTERLACE_ADAM7;
  EXPECT_EQ(decode_image(make_png(raw), "x.png").rgb, pattern(9, 5).rgb);
  raw.exif = exif(3);
  const Image turned = decode_image(make_png(raw), "x.png");
  EXPECT_EQ(turned.rgb[0], pattern(9, 5).rgb[9 * 5 * 3 - 3]);
}

TEST(ReadPng, DamageIsNamed) {
  const auto good = make_png({9, 5, 8, PNG_COLOR_TYPE_RGB, pattern(9, 5).rgb});
  for (size_t size = 8; size < good.size(); ++size) {
    expect_error(ErrorKind::corrupt, {"cut.png", "damaged or truncated"}, [&] {
      decode_image({good.data(), size}, "cut.png");
    });
  }
  auto flipped = good;
  flipped[flipped.size() - 20] ^= 1;  // inside IDAT: its checksum no longer fits
  expect_error(ErrorKind::corrupt, {"bad.png"}, [&] { decode_image(flipped, "bad.png"); });
}

TEST(ReadPng, SmallFilesCannotClaimLargePictures) {
  auto claims = make_png({1, 1, 8, PNG_COLOR_TYPE_RGB, {1, 2, 3}});
  const auto claim = [&](uint32_t width, uint32_t height) {
    uint8_t* header = claims.data() + 12;
    for (int i = 0; i < 4; ++i) header[4 + i] = uint8_t(width >> (24 - 8 * i));
    for (int i = 0; i < 4; ++i) header[8 + i] = uint8_t(height >> (24 - 8 * i));
    uint32_t crc = 0xffffffffu;
    for (int i = 0; i < 17; ++i) {
      crc ^= header[i];
      for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    for (int i = 0; i < 4; ++i) header[17 + i] = uint8_t(~crc >> (24 - 8 * i));
  };
  claim(16000, 16000);
  expect_error(ErrorKind::corrupt, {"16000x16000", "more than"},
               [&] { decode_image(claims, "bomb.png"); });
  claim(100000, 100000);
  expect_error(ErrorKind::unsupported, {"100000x100000", "too large"},
               [&] { decode_image(claims, "bomb.png"); });
}

// --- JPEG ----------------------------------------------------------------------------------------

TEST(ReadJpeg, GreyCmykAndTurned) {  // B41
  const Image grey =
      decode_image(make_jpeg(8, 8, 1, JCS_GRAYSCALE, std::vector<uint8_t>(64, 77)), "grey.jpg");
  expect_pixel(grey, 3, 3, {77, 77, 77}, 1);

  // Inverted ink, as Adobe stores it: cyan and magenta absent, half of the yellow, no black.
  std::vector<uint8_t> ink;
  for (int i = 0; i < 64; ++i) ink.insert(ink.end(), {255, 255, 128, 255});
  expect_pixel(decode_image(make_jpeg(8, 8, 4, JCS_CMYK, ink), "cmyk.jpg"), 3, 3, {255, 255, 128},
               2);

  // Left half dark, right half bright; orientation 6 shows the left edge on top.
  std::vector<uint8_t> halves;
  for (int i = 0; i < 16 * 32; ++i) halves.push_back(i % 32 < 16 ? 20 : 230);
  auto jpeg = make_jpeg(16, 32, 1, JCS_GRAYSCALE, halves);
  std::vector<uint8_t> marker = {0xff, 0xe1, 0, 0, 'E', 'x', 'i', 'f', 0, 0};
  const auto block = exif(6);
  marker.insert(marker.end(), block.begin(), block.end());
  marker[3] = uint8_t(marker.size() - 2);
  jpeg.insert(jpeg.begin() + 2, marker.begin(), marker.end());
  const Image turned = decode_image(jpeg, "turned.jpg");
  EXPECT_EQ(turned.height, 32);
  EXPECT_EQ(turned.width, 16);
  expect_pixel(turned, 4, 8, {20, 20, 20}, 3);
  expect_pixel(turned, 28, 8, {230, 230, 230}, 3);
}

TEST(ReadJpeg, DamageIsNamed) {
  const auto good = make_jpeg(40, 40, 3, JCS_RGB, pattern(40, 40).rgb);
  // Cutting the end marker alone loses nothing but is noticed all the same.
  for (const size_t size :
       {size_t{4}, size_t{100}, good.size() / 2, good.size() - 10, good.size() - 2}) {
    expect_error(ErrorKind::corrupt, {"cut.jpg", "damaged or truncated"}, [&] {
      decode_image({good.data(), size}, "cut.jpg");
    });
  }
}

// --- other formats and files ---------------------------------------------------------------------

// Quadrants of the fixtures: red, green, blue, white; a black square in the middle of frame 0.
void expect_quadrants(const Image& image, int tolerance) {
  ASSERT_EQ(image.height, 48);
  ASSERT_EQ(image.width, 64);
  expect_pixel(image, 5, 5, {255, 0, 0}, tolerance);
  expect_pixel(image, 5, 58, {0, 255, 0}, tolerance);
  expect_pixel(image, 42, 5, {0, 0, 255}, tolerance);
  expect_pixel(image, 42, 58, {255, 255, 255}, tolerance);
  expect_pixel(image, 24, 32, {0, 0, 0}, tolerance);
}

TEST(ReadImage, OtherStillFormats) {
  expect_quadrants(read_image(kMedia / "still.webp"), 0);
  expect_quadrants(read_image(kMedia / "moving.gif"), 8);  // first frame; web palette
}

TEST(ReadImage, WhatIsNoPictureIsNamed) {
  const ScratchFolder folder;
  expect_error(ErrorKind::not_found, {"absent.png", "no such file"},
               [&] { read_image(folder.path() / "absent.png"); });
  expect_error(ErrorKind::invalid_argument, {"is a folder"}, [&] { read_image(folder.path()); });
  expect_error(ErrorKind::corrupt, {"empty.png", "is empty"},
               [&] { read_image(folder.write("empty.png", "")); });
  expect_error(ErrorKind::corrupt, {"text.png", "not a picture"},
               [&] { read_image(folder.write("text.png", "just some words\n")); });
  expect_error(ErrorKind::invalid_argument, {"plain.mp4", "not a picture"},
               [&] { read_image(kMedia / "plain.mp4"); });
  expect_error(ErrorKind::unsupported, {"animated.webp", "animated WebP"},
               [&] { read_image(kMedia / "animated.webp"); });
  // A playlist would make the library open what it names.
  expect_error(ErrorKind::invalid_argument, {"list.png", "not a picture"}, [&] {
    read_image(folder.write("list.png", "ffconcat version 1.0\nfile '/etc/hostname'\n"));
  });
}

TEST(ReadImage, ContentCountsNotTheName) {
  const ScratchFolder folder;
  const auto png = make_png({9, 5, 8, PNG_COLOR_TYPE_RGB, pattern(9, 5).rgb});
  const auto file =
      folder.write("really.jpg", {reinterpret_cast<const char*>(png.data()), png.size()});
  EXPECT_EQ(read_image(file).rgb, pattern(9, 5).rgb);
}

// Faults, second list, B12: stored on its side, as its tag says.
TEST(ReadImage, OrientationOfWebpAndTiff) {
  const Image upright = read_image(kMedia / "upright.png");
  for (const char* name : {"orientation6.webp", "orientation6.tif"}) {
    const Image image = read_image(kMedia / name);
    EXPECT_EQ(image.height, upright.height) << name;
    EXPECT_EQ(image.rgb, upright.rgb) << name;
  }
}

int64_t peak_megabytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss / 1024;
}

// Faults, second list, C3: compressed text chunks of 8 MB each in some KB.
TEST(ReadImage, TextChunksTakeNoMemory) {
  std::vector<uint8_t> bomb;
  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, nullptr);
  png_infop info = png_create_info_struct(png);
  png_set_write_fn(
      png, &bomb,
      [](png_structp writer, png_bytep data, size_t size) {
        auto& bytes = *static_cast<std::vector<uint8_t>*>(png_get_io_ptr(writer));
        bytes.insert(bytes.end(), data, data + size);
      },
      nullptr);
  png_set_IHDR(png, info, 2, 1, 8, PNG_COLOR_TYPE_RGB, PNG_INTERLACE_NONE,
               PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  std::string text(7'900'000, 'a'), key = "Comment";
  png_text entry{};
  entry.compression = PNG_TEXT_COMPRESSION_zTXt;
  entry.key = key.data();
  entry.text = text.data();
  entry.text_length = text.size();
  constexpr int kChunks = 30;
  png_write_info_before_PLTE(png, info);
  for (int i = 0; i < kChunks; ++i) {
    png_set_text(png, info, &entry, 1);
    png_write_info(png, info);
    png_free_data(png, info, PNG_FREE_TEXT, -1);
  }
  const png_byte row[6] = {1, 2, 3, 4, 5, 6};
  png_write_row(png, row);
  png_write_end(png, nullptr);
  png_destroy_write_struct(&png, &info);
  const int64_t before = peak_megabytes();
  const Image image = decode_image(bomb, "bomb.png");
  EXPECT_EQ(image.rgb, (std::vector<uint8_t>{1, 2, 3, 4, 5, 6}));
  EXPECT_LT(peak_megabytes() - before, 50);
}

// A progressive JPEG whose AC coefficients come one a scan.
std::vector<uint8_t> many_scans(int components_of_ac) {
  const Image image = pattern(16, 16);
  std::vector<jpeg_scan_info> scans;
  scans.push_back({3, {0, 1, 2}, 0, 0, 0, 0});
  for (int c = 0; c < components_of_ac; ++c) {
    for (int k = 1; k < DCTSIZE2; ++k) scans.push_back({1, {c}, k, k, 0, 0});
  }
  jpeg_compress_struct codec{};
  jpeg_error_mgr errors{};
  codec.err = jpeg_std_error(&errors);
  jpeg_create_compress(&codec);
  unsigned char* data = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&codec, &data, &size);
  codec.image_width = JDIMENSION(image.width);
  codec.image_height = JDIMENSION(image.height);
  codec.input_components = 3;
  codec.in_color_space = JCS_RGB;
  jpeg_set_defaults(&codec);
  codec.scan_info = scans.data();
  codec.num_scans = int(scans.size());
  jpeg_start_compress(&codec, TRUE);
  while (codec.next_scanline < codec.image_height) {
    auto* row = const_cast<JSAMPROW>(image.rgb.data() + codec.next_scanline * image.width * 3);
    jpeg_write_scanlines(&codec, &row, 1);
  }
  jpeg_finish_compress(&codec);
  std::vector<uint8_t> out(data, data + size);
  jpeg_destroy_compress(&codec);
  std::free(data);
  return out;
}

TEST(ReadImage, ScansOfJpegAreBounded) {  // Faults, second list, C3
  EXPECT_EQ(decode_image(many_scans(1), "64.jpg").height, 16);
  expect_error(ErrorKind::corrupt, {"190.jpg", "more than 100 scans"},
               [] { decode_image(many_scans(3), "190.jpg"); });
}

TEST(ReadImage, JpegThatClaimsMoreThanItHolds) {  // Faults, second list, C3
  std::vector<uint8_t> bytes = many_scans(0);
  for (size_t i = 0; i + 8 < bytes.size(); ++i) {
    if (bytes[i] != 0xff || bytes[i + 1] != 0xc2) continue;  // frame header: sides at 5 and 7
    bytes[i + 5] = bytes[i + 7] = 0x3f;
    break;
  }
  expect_error(ErrorKind::corrupt, {"claims", "16144x16144"},
               [&] { decode_image(bytes, "claim.jpg"); });
}

TEST(ReadImage, DevicesAreNamed) {  // Faults, second list, C6
  expect_error(ErrorKind::invalid_argument, {"/dev/zero", "device"},
               [] { read_image("/dev/zero"); });
}

}  // namespace
}  // namespace orrery
