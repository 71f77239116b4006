// Conditioning pixels of the reference: images, video frames and action canvases. Sizes come from
// the keys ("HxW_to_HxW") and the tensors themselves.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "golden/golden.h"
#include "io/resize.h"

namespace orrery {
namespace {

std::vector<std::string> keys_ending(const Safetensors& file, const std::string& suffix) {
  std::vector<std::string> keys;
  for (const StoredTensor& stored : file.tensors()) {
    if (stored.name.ends_with(suffix)) {
      keys.push_back(stored.name.substr(0, stored.name.size() - suffix.size()));
    }
  }
  return keys;
}

Image image_of(const std::vector<uint8_t>& bytes, int64_t index, int64_t height, int64_t width) {
  const auto begin = bytes.begin() + index * height * width * 3;
  return {height, width, {begin, begin + height * width * 3}};
}

TEST(GoldenPreprocess, ConditioningImages) {
  ORRERY_SKIP_WITHOUT("image_preprocess");
  const auto path = golden::directory() / "image_preprocess/tensors.safetensors";
  const golden::Tensors tensors(path);
  for (const std::string& key : keys_ending(Safetensors::open_file(path), ".in")) {
    SCOPED_TRACE(key);
    const Shape in = tensors.shape(key + ".in"), out = tensors.shape(key + ".out");
    const Image image = image_of(tensors.bytes(key + ".in"), 0, in[0], in[1]);
    // Both round to 8 bits, so any difference is a whole level: none is allowed, since the fp32
    // operations come in the reference's order.
    EXPECT_EQ(condition_image(image, out[2], out[3]), tensors.floats(key + ".out"));
  }
}

TEST(GoldenPreprocess, ConditioningVideos) {
  ORRERY_SKIP_WITHOUT("video_preprocess");
  const auto path = golden::directory() / "video_preprocess/tensors.safetensors";
  const golden::Tensors tensors(path);
  for (const std::string& key : keys_ending(Safetensors::open_file(path), ".in")) {
    SCOPED_TRACE(key);
    const Shape in = tensors.shape(key + ".in"), out = tensors.shape(key + ".out");
    const auto bytes = tensors.bytes(key + ".in");
    const auto want = tensors.floats(key + ".out");
    const int64_t frames = out[2], plane = out[3] * out[4];
    ASSERT_EQ(in[0], frames);
    for (int64_t t = 0; t < frames; ++t) {
      const auto got = condition_frame(image_of(bytes, t, in[1], in[2]), out[3], out[4]);
      for (int64_t c = 0; c < 3; ++c) {
        const auto* first = want.data() + (c * frames + t) * plane;
        // Integer resampling: equal bits.
        EXPECT_EQ(std::vector<float>(got.begin() + c * plane, got.begin() + (c + 1) * plane),
                  std::vector<float>(first, first + plane))
            << "frame " << t << " channel " << c;
      }
    }
  }
}

TEST(GoldenPreprocess, ActionCanvases) {
  ORRERY_SKIP_WITHOUT("action_preprocess");
  const auto folder = golden::directory() / "action_preprocess";
  const golden::Tensors tensors(folder / "tensors.safetensors");
  const Json json = Json::load(folder / "case.json");
  for (const Json& item : json.at("cases").items()) {
    const std::string& key = item.at("key").as_string();
    SCOPED_TRACE(key);
    const int64_t tier = std::stoll(key.substr(4, key.find('_') - 4));  // "tier256_48x64"
    const Shape in = tensors.shape(key + ".in0");
    const auto& shape = item.at("shape").items();  // [1, 3, frames, height, width]
    const ActionCanvas canvas = action_canvas(
        {image_of(tensors.bytes(key + ".in0"), 0, in[0], in[1])}, shape[2].as_int(), tier);
    const ActionGeometry& geometry = canvas.geometry;
    EXPECT_EQ(canvas.frames, shape[2].as_int());
    EXPECT_EQ(geometry.height, item.at("target").at(0).as_int());
    EXPECT_EQ(geometry.width, item.at("target").at(1).as_int());
    EXPECT_EQ(double(geometry.content_height), item.at("image_size").at(2).as_double());
    EXPECT_EQ(double(geometry.content_width), item.at("image_size").at(3).as_double());
    const Shape tail = tensors.shape(key + ".out0_tail");
    std::vector<float> sub, corner;
    for (int64_t c = 0; c < 3; ++c) {
      const float* first =
          canvas.pixels.data() + c * canvas.frames * geometry.height * geometry.width;
      for (int64_t y = 0; y < geometry.height; ++y) {
        for (int64_t x = 0; x < geometry.width; ++x) {
          const float value = first[y * geometry.width + x];
          if (y % 8 == 0 && x % 8 == 0) sub.push_back(value);
          if (y >= geometry.height - tail[1] && x >= geometry.width - tail[2])
            corner.push_back(value);
        }
      }
      // Time is filled with the last frame.
      for (int64_t t = 1; t < canvas.frames; ++t) {
        const float* frame = first + t * geometry.height * geometry.width;
        EXPECT_TRUE(std::equal(frame, frame + geometry.height * geometry.width, first));
      }
    }
    // fp32 sums of a few products in the same order: 2e-7 is reported between two implementations.
    EXPECT_LT(golden::relative_error(sub, tensors.floats(key + ".out0_sub")), 1e-6);
    EXPECT_LT(golden::relative_error(corner, tensors.floats(key + ".out0_tail")), 1e-6);
  }
}

}  // namespace
}  // namespace orrery
