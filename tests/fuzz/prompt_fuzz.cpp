// Any bytes as a prompt, as the settings around it and as a chat template: texts that are UTF-8, or
// an Error.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/json.h"
#include "text/prompt.h"

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

template <typename T>
T take(std::string_view& bytes) {
  T value{};
  const size_t count = std::min(bytes.size(), sizeof value);
  std::memcpy(&value, bytes.data(), count);
  bytes.remove_prefix(count);
  return value;
}

void assemble(std::string_view bytes) {
  orrery::PromptSettings settings;
  settings.num_frames = take<int64_t>(bytes);
  settings.fps = take<double>(bytes);
  settings.height = take<int16_t>(bytes);
  settings.width = take<int16_t>(bytes);
  try {
    const std::string positive = orrery::positive_text(bytes, settings);
    const std::string negative = orrery::negative_text(bytes, settings);
    check(positive.ends_with("resolution.") && negative.ends_with("resolution."));
    check(negative.size() > positive.size());
  } catch (const orrery::Error&) {
    check(!(settings.fps > 0) || std::isinf(settings.fps));
  }
  orrery::ActionCaption caption;
  caption.prompt = bytes;
  caption.chunk_size = settings.num_frames;
  caption.fps = settings.fps;
  caption.canvas_height = settings.height;
  caption.canvas_width = settings.width;
  try {
    const std::string text = orrery::action_text(caption);
    check(orrery::Json::parse(text, "caption").at("fps").as_double() == caption.fps);
  } catch (const orrery::Error&) {
  }
}

void render(std::string_view bytes) {
  try {
    const orrery::ChatTemplate chat(bytes, "fuzz");
    const std::string text =
        chat.render({{"system", "Be brief."}, {"user", "H\xc3\xa9 \xff"}}, {{"eos_token", "</s>"}});
    check(orrery::is_utf8(text));
  } catch (const orrery::Error& error) {
    check(error.kind() == orrery::ErrorKind::unsupported);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  assemble(bytes);
  render(bytes);
  return 0;
}
