#include "orrery/media.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/json.h"
#include "engine/settings.h"
#include "io/image.h"
#include "io/safetensors.h"
#include "io/tensor_bytes.h"
#include "io/video.h"
#include "io/wav.h"
#include "orrery/output.h"

namespace orrery {

namespace fs = std::filesystem;

namespace {

std::string lower_extension(const fs::path& file) {
  std::string extension = file.extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  return extension;
}

}  // namespace

ClipLimits clip_limits(const Request& request) {
  ClipLimits limits;
  if (request.action) {  // the canvas follows from the size as stored
    limits.max_frames = std::max<int64_t>(request.action->chunk_size, 0) + 1;
    return limits;
  }
  // Sizes and counts that are refused later are not worked with here.
  const int64_t height = request.height.value_or(kDefaultHeight);
  const int64_t width = request.width.value_or(kDefaultWidth);
  if (std::min(height, width) > 0 && std::max(height, width) <= kMaxSide) {
    limits.height = height;
    limits.width = width;
  }
  // A transfer makes all frames unless a number is given (one more than may be shows), and its
  // chunks are whole numbers of latent frames.
  constexpr int64_t kPadding = 16;
  const int64_t frames =
      request.num_frames.value_or(request.transfer ? kMaxFrames + 1 : kDefaultFrames);
  limits.max_frames =
      std::clamp<int64_t>(frames, 1, kMaxFrames + 1) + (request.transfer ? kPadding : 0);
  limits.keep = request.condition_video_keep;
  limits.fit = request.video_fit;
  return limits;
}

namespace {

Frames as_frames(Image image) { return {1, image.height, image.width, std::move(image.rgb)}; }

Frames as_frames(Video video) {
  Frames frames{
      static_cast<int64_t>(video.frames.size()), video.height, video.width, {}, video.fps};
  frames.rgb.reserve(static_cast<size_t>(frames.count * frames.height * frames.width * 3));
  for (std::vector<uint8_t>& frame : video.frames) {
    frames.rgb.insert(frames.rgb.end(), frame.begin(), frame.end());
    frame = {};
  }
  return frames;
}

}  // namespace

Frames load_image(const fs::path& file) { return as_frames(read_image(file)); }

Frames load_video(const fs::path& file, const ClipLimits& limits) {
  return as_frames(read_video(file, limits));
}

Frames load_clip(const fs::path& file, const ClipLimits& limits) {
  const auto stills = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"};
  const bool is_still =
      std::find(stills.begin(), stills.end(), lower_extension(file)) != stills.end();
  return is_still ? load_image(file) : load_video(file, limits);
}

Frames decode_picture(std::span<const uint8_t> bytes, const std::string& name) {
  return as_frames(decode_image(bytes, name));
}

Frames decode_clip(std::span<const uint8_t> bytes, const ClipLimits& limits,
                   const std::string& name) {
  return as_frames(decode_video(bytes, limits, name));
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

namespace {

constexpr std::pair<std::string_view, Format> kFormats[] = {
    {".png", Format::png}, {".jpg", Format::jpeg}, {".jpeg", Format::jpeg}, {".mp4", Format::mp4},
    {".mov", Format::mov}, {".mkv", Format::mkv},  {".webm", Format::webm}};

// Stands for the file in messages about bytes in memory.
std::string name_of(Format format) {
  const auto* found = std::find_if(std::begin(kFormats), std::end(kFormats),
                                   [&](const auto& known) { return known.second == format; });
  return concat("output", found->first);
}

// The decoder makes whole latent frames of sound; the clip ends with its pictures.
std::vector<std::vector<float>> sound_of(const Result& result) {
  std::vector<std::vector<float>> sound = result.sound;
  const double seconds = static_cast<double>(result.frames.count) / result.fps;
  const auto samples =
      static_cast<size_t>(std::llround(seconds * static_cast<double>(result.sampling_rate)));
  for (auto& channel : sound) channel.resize(samples, 0.0f);
  return sound;
}

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

std::vector<uint8_t> encode_named(const Result& result, const std::string& name, int crf) {
  const Frames& frames = result.frames;
  require(frames.count > 0, name, ": the result has no frames");
  if (is_image_extension(name)) {
    require(frames.count == 1, name, ": a still picture cannot hold ", frames.count, " frames");
    return encode_image({frames.height, frames.width, frames.rgb}, result.metadata, name);
  }
  VideoOptions options;
  options.height = frames.height;
  options.width = frames.width;
  options.fps = result.fps;
  options.crf = crf;
  options.metadata = result.metadata;
  if (result.sampling_rate > 0) options.sample_rate = static_cast<int>(result.sampling_rate);
  options.audio = sound_of(result);
  VideoEncoder encoder(name, options);
  for (int64_t i = 0; i < frames.count; ++i) encoder.write(frames.frame(i));
  return encoder.finish();
}

void save(const fs::path& file, const std::vector<uint8_t>& bytes) {
  OutputFile output(file);
  output.write(bytes);
  output.commit();
}

}  // namespace

Format format_of(const fs::path& file) {
  const std::string extension = lower_extension(file);
  std::string offers;
  for (const auto& [known, format] : kFormats) {
    if (extension == known) return format;
    offers += concat(offers.empty() ? "" : " ", known);
  }
  fail(ErrorKind::invalid_argument, "output ", file.string(), ": the extension \"", extension,
       "\" cannot be written; those that can: ", offers);
}

bool is_still(Format format) { return format == Format::png || format == Format::jpeg; }

void check_format(Format format, int64_t frames, int64_t sampling_rate) {
  if (is_still(format)) {
    require(frames == 1, name_of(format), " is a still image, but ", frames,
            " frames are made; name an .mp4 file or ask for --num-frames 1");
  } else {
    require_video_output(name_of(format), static_cast<int>(sampling_rate));
  }
}

std::vector<uint8_t> encode(const Result& result, Format format, int crf) {
  return encode_named(result, name_of(format), crf);
}

std::vector<uint8_t> encode_latents(const Result& result) {
  return encode_safetensors({{"latents", view_of(result.latents)}}, result.metadata, "latents");
}

ActionFormat action_format_of(const fs::path& file) {
  return lower_extension(file) == ".safetensors" ? ActionFormat::safetensors : ActionFormat::json;
}

std::vector<uint8_t> encode_action(const Result& result, ActionFormat format) {
  require(result.action.has_value(), "this run predicts no actions");
  const FloatTensor& action = *result.action;
  if (format == ActionFormat::safetensors) {
    return encode_safetensors({{"actions", view_of(action)}}, result.metadata, "actions");
  }
  Json rows = Json::array();
  const auto width = static_cast<size_t>(action.shape[1]);
  for (size_t r = 0; r < static_cast<size_t>(action.shape[0]); ++r) {
    Json row = Json::array();
    for (size_t c = 0; c < width; ++c) row.push(static_cast<double>(action.values[r * width + c]));
    rows.push(std::move(row));
  }
  return bytes_of(Json::object().set("actions", std::move(rows)).dump(1) + "\n");
}

std::vector<uint8_t> encode_sound(const Result& result) {
  require(!result.sound.empty(), "this run makes no sound");
  return bytes_of(encode_wav(sound_of(result), result.sampling_rate, "the sound"));
}

std::string with_files(const std::string& report, const std::map<std::string, std::string>& files) {
  Json names = Json::object();
  for (const auto& [role, name] : files) names.set(role, name);
  return Json::parse(report, "report").set("files", std::move(names)).dump(1) + "\n";
}

void save_output(const fs::path& file, const Result& result, int crf) {
  format_of(file);
  save(file, encode_named(result, file.string(), crf));
}

void save_latents(const fs::path& file, const Result& result) {
  save(file, encode_latents(result));
}

void save_action(const fs::path& file, const Result& result) {
  save(file, encode_action(result, action_format_of(file)));
}

void save_sound(const fs::path& file, const Result& result) { save(file, encode_sound(result)); }

void save_text(const fs::path& file, const std::string& text) { save(file, bytes_of(text)); }

}  // namespace orrery
