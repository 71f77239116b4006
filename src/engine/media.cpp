#include "orrery/media.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>

#include "base/error.h"
#include "base/json.h"
#include "io/image.h"
#include "io/safetensors.h"
#include "io/video.h"
#include "io/wav.h"

namespace orrery {

namespace fs = std::filesystem;

Frames load_image(const fs::path& file) {
  Image image = read_image(file);
  return {1, image.height, image.width, std::move(image.rgb)};
}

Frames load_video(const fs::path& file, int64_t max_frames) {
  const Video video = read_video(file, max_frames);
  Frames frames{
      static_cast<int64_t>(video.frames.size()), video.height, video.width, {}, video.fps};
  for (const auto& frame : video.frames)
    frames.rgb.insert(frames.rgb.end(), frame.begin(), frame.end());
  return frames;
}

Frames load_clip(const fs::path& file) {
  std::string extension = file.extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  const auto stills = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"};
  return std::find(stills.begin(), stills.end(), extension) != stills.end() ? load_image(file)
                                                                            : load_video(file);
}

namespace {

FloatTensor load_tensor(const fs::path& file, const char* name) {
  const Tensor tensor = Safetensors::open_file(file).read(name, DType::f32);
  FloatTensor out;
  for (int i = 0; i < tensor.view.rank(); ++i) out.shape.push_back(tensor.view.dim(i));
  const float* values = tensor.view.as<float>();
  out.values.assign(values, values + tensor.view.numel());
  return out;
}

View view_of(const FloatTensor& tensor) {
  Shape shape;
  for (int64_t dim : tensor.shape) shape.push_back(dim);
  return make_view(tensor.values.data(), shape, DType::f32);
}

// Writes through a temporary neighbour, so that nobody ever sees half a file.
void replace_file(const fs::path& file, const std::string& content) {
  const fs::path partial = file.string() + ".partial";
  {
    std::ofstream out(partial, std::ios::binary | std::ios::trunc);
    out << content;
    out.flush();
    if (!out.good()) {
      std::error_code ignored;
      fs::remove(partial, ignored);
      fail(ErrorKind::invalid_argument, file.string(), ": cannot write the file");
    }
  }
  fs::rename(partial, file);
}

}  // namespace

FloatTensor load_actions(const fs::path& file) {
  if (file.extension() == ".safetensors") return load_tensor(file, "actions");
  const Json json = Json::load(file);
  const Json& given = json.is_object() ? json.at("actions") : json;
  // A batch of one, as saved from a tensor [1, rows, values].
  const bool is_batch = given.items().size() == 1 && given.items().front().is_array() &&
                        !given.items().front().items().empty() &&
                        given.items().front().items().front().is_array();
  const auto& items = is_batch ? given.items().front().items() : given.items();
  FloatTensor out;
  require(!items.empty(), file.string(), ": no action rows");
  const size_t width = items.front().items().size();
  for (size_t r = 0; r < items.size(); ++r) {
    require(items[r].items().size() == width, file.string(), ": row ", r, " has ",
            items[r].items().size(), " values, row 0 has ", width);
    for (const Json& value : items[r].items())
      out.values.push_back(static_cast<float>(value.as_double()));
  }
  out.shape = {static_cast<int64_t>(items.size()), static_cast<int64_t>(width)};
  return out;
}

FloatTensor load_latents(const fs::path& file) { return load_tensor(file, "latents"); }

bool is_still(const fs::path& file) { return is_image_extension(file); }

void check_output(const fs::path& file, int64_t frames, int64_t sampling_rate) {
  require(!file.empty(), "output: the file name is empty");
  require(!fs::is_directory(file), "output ", file.string(),
          " is a folder; give a file name such as ",
          (file / (frames == 1 ? "sample.png" : "sample.mp4")).string());
  const fs::path folder = file.has_parent_path() ? file.parent_path() : fs::path(".");
  require(fs::is_directory(folder), ErrorKind::not_found, "output: the folder ", folder.string(),
          " does not exist");
  require(access(folder.c_str(), W_OK) == 0, "output: the folder ", folder.string(),
          " is not writable");
  if (is_image_extension(file)) {
    require(frames == 1, "output ", file.string(), " is a still image, but ", frames,
            " frames are made; name an .mp4 file or ask for --num-frames 1");
    return;
  }
  require(is_video_extension(file), "output ", file.string(), ": the extension \"",
          file.extension().string(),
          "\" cannot be written; use .png or .jpg for one frame, .mp4 for video");
  require_video_output(file, static_cast<int>(sampling_rate));
}

namespace {

// The decoder makes whole latent frames of sound; the clip ends with its pictures.
std::vector<std::vector<float>> sound_of(const Result& result) {
  std::vector<std::vector<float>> sound = result.sound;
  const double seconds = static_cast<double>(result.frames.count) / result.fps;
  const auto samples =
      static_cast<size_t>(std::llround(seconds * static_cast<double>(result.sampling_rate)));
  for (auto& channel : sound) channel.resize(samples, 0.0f);
  return sound;
}

}  // namespace

void save_output(const fs::path& file, const Result& result, int crf) {
  const Frames& frames = result.frames;
  require(frames.count > 0, "output: the result has no frames");
  if (is_image_extension(file)) {
    write_image(file, {frames.height, frames.width, frames.rgb}, result.metadata);
    return;
  }
  VideoOptions options;
  options.height = frames.height;
  options.width = frames.width;
  options.fps = result.fps;
  options.crf = crf;
  options.metadata = result.metadata;
  if (result.sampling_rate > 0) options.sample_rate = static_cast<int>(result.sampling_rate);
  options.audio = sound_of(result);
  VideoWriter writer(file, options);
  for (int64_t i = 0; i < frames.count; ++i) writer.write(frames.frame(i));
  writer.finish();
}

void save_latents(const fs::path& file, const Result& result) {
  write_safetensors(file, {{"latents", view_of(result.latents)}}, result.metadata);
}

void save_action(const fs::path& file, const Result& result) {
  require(result.action.has_value(), "output ", file.string(), ": this run predicts no actions");
  const FloatTensor& action = *result.action;
  if (file.extension() == ".safetensors") {
    write_safetensors(file, {{"actions", view_of(action)}}, result.metadata);
    return;
  }
  Json rows = Json::array();
  const auto width = static_cast<size_t>(action.shape[1]);
  for (size_t r = 0; r < static_cast<size_t>(action.shape[0]); ++r) {
    Json row = Json::array();
    for (size_t c = 0; c < width; ++c) row.push(static_cast<double>(action.values[r * width + c]));
    rows.push(std::move(row));
  }
  replace_file(file, Json::object().set("actions", std::move(rows)).dump(1) + "\n");
}

void save_sound(const fs::path& file, const Result& result) {
  require(!result.sound.empty(), "output ", file.string(), ": this run makes no sound");
  write_wav(file, sound_of(result), result.sampling_rate);
}

void save_text(const fs::path& file, const std::string& text) { replace_file(file, text); }

}  // namespace orrery
