#include "text/prompt.h"

#include <array>
#include <charconv>
#include <cmath>

#include "base/error.h"
#include "text/python_json.h"
#include "text/utf8.h"

namespace orrery {

namespace {

// printf's %.<digits>f: correctly rounded, halves to even, whatever the locale.
std::string fixed(double value, int digits) {
  std::array<char, 512> buffer;  // the largest double has 309 digits before the point
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                 std::chars_format::fixed, digits);
  return {buffer.data(), end.ptr};
}

std::string append(std::string_view base, const std::string& sentence) {
  const size_t last = base.find_last_not_of('.');
  if (last == std::string_view::npos) return sentence;
  return concat(base.substr(0, last + 1), ". ", sentence);
}

std::string with_sentences(std::string_view prompt, const PromptSettings& settings, bool inverse) {
  const std::string_view is = inverse ? " is not " : " is ";
  const bool image = settings.num_frames == 1;
  std::string text(prompt);
  if (!image && settings.duration_template) {
    require(std::isfinite(settings.fps) && settings.fps > 0, "fps: ", settings.fps,
            " is not a positive number of frames per second");
    const double duration = static_cast<double>(settings.num_frames) / settings.fps;
    text = append(text, concat("The video", is, fixed(duration, 1), " seconds long and", is, "of ",
                               fixed(settings.fps, 0), " FPS."));
  }
  if (settings.resolution_template) {
    text = append(text, concat("This ", image ? "image" : "video", is, "of ", settings.height, "x",
                               settings.width, " resolution."));
  }
  return text;
}

struct ViewPoint {
  std::string_view name;
  std::string_view sentence;
};
constexpr std::array kViewPoints = {
    ViewPoint{"ego_view",
              "This video is captured from a first-person perspective looking at the scene."},
    ViewPoint{"third_person_view",
              "This video is captured from a third-person perspective looking "
              "towards the agent from the front."},
    ViewPoint{"wrist_view", "This video is captured from a wrist-mounted camera."},
    ViewPoint{"concat_view",
              "This video contains concatenated views from multiple camera perspectives."}};

struct AspectRatio {
  std::string_view name;
  double value;
};
constexpr std::array kAspectRatios = {AspectRatio{"1,1", 1.0}, AspectRatio{"4,3", 4.0 / 3},
                                      AspectRatio{"3,4", 3.0 / 4}, AspectRatio{"16,9", 16.0 / 9},
                                      AspectRatio{"9,16", 9.0 / 16}};

std::string_view nearest_aspect_ratio(int64_t height, int64_t width) {
  const double ratio = height > 0 ? static_cast<double>(width) / static_cast<double>(height) : 1.0;
  const AspectRatio* best = &kAspectRatios.front();
  for (const AspectRatio& candidate : kAspectRatios) {
    if (std::abs(candidate.value - ratio) < std::abs(best->value - ratio)) best = &candidate;
  }
  return best->name;
}

int64_t round_half_even(double value) {
  const double floor = std::floor(value);
  const double rest = value - floor;  // exact
  const bool up = rest > 0.5 || (rest == 0.5 && std::fmod(floor, 2) != 0);
  return static_cast<int64_t>(floor) + (up ? 1 : 0);
}

std::string sentence_of(std::string_view prompt) {
  std::string text(strip_back(strip_front(prompt)));
  if (!text.empty() && std::string_view(".!?").find(text.back()) == std::string_view::npos)
    text += '.';
  return text;
}

}  // namespace

std::string_view text_of(SystemPrompt prompt) {
  switch (prompt) {
    case SystemPrompt::none: return {};
    case SystemPrompt::image:
      return "You are a helpful assistant who will generate images from a give prompt.";
    case SystemPrompt::video:
      return "You are a helpful assistant who will generate videos from a give prompt.";
    case SystemPrompt::transfer:
      return "You are a helpful assistant that generates images or videos following the user's "
             "instructions and control signals (edge maps, blur, depth, or segmentation).";
  }
  return {};
}

std::string positive_text(std::string_view prompt, const PromptSettings& settings) {
  return with_sentences(prompt, settings, false);
}

std::string negative_text(std::string_view prompt, const PromptSettings& settings) {
  return with_sentences(prompt, settings, true);
}

std::string emphasized_text(std::string_view prompt, const std::vector<std::string>& hints) {
  std::string names;
  for (const std::string& hint : hints) names += (names.empty() ? "" : ", ") + hint;
  const size_t last = prompt.find_last_not_of(" \t\n\r\v\f");
  return concat(
      prompt.substr(0, last == std::string_view::npos ? 0 : last + 1), " Follow the ", names,
      " control video precisely: shape, contour, silhouette, position, and motion of every "
      "visible structure must align with the ",
      names, " signal at every frame.");
}

std::string action_text(const ActionCaption& caption) {
  require(std::isfinite(caption.fps), "fps: ", caption.fps,
          " is not a number of frames per second");
  const double frames = static_cast<double>(caption.chunk_size) + 1;
  const double seconds = caption.fps > 0 ? frames / caption.fps : 0.0;
  constexpr double kMaxSeconds = 1e15;  // exact as integers
  require(seconds >= 0 && seconds <= kMaxSeconds, "chunk size ", caption.chunk_size, " at ",
          caption.fps, " fps lasts ", seconds, " seconds, which is not in 0..", kMaxSeconds);
  const int64_t end = round_half_even(seconds);

  Json out = Json::object();
  for (const ViewPoint& known : kViewPoints) {
    if (caption.view_point != known.name) continue;
    out.set("cinematography", Json::object({{"framing", std::string(known.sentence)}}));
  }
  const std::string time = concat("0:00-", end / 60, ":", end % 60 < 10 ? "0" : "", end % 60);
  out.set("actions",
          Json::array({Json::object(
              {{"time", time}, {"description", sentence_of(valid_utf8(caption.prompt))}})}));
  out.set("duration", concat(static_cast<int64_t>(seconds), "s"));
  out.set("fps", caption.fps);
  out.set("resolution", Json::object({{"H", caption.canvas_height}, {"W", caption.canvas_width}}));
  out.set("aspect_ratio",
          std::string(nearest_aspect_ratio(caption.canvas_height, caption.canvas_width)));
  return python_json(out);
}

std::vector<Message> conversation_of(SystemPrompt system, std::string text) {
  std::vector<Message> conversation;
  if (system != SystemPrompt::none)
    conversation.push_back({"system", std::string(text_of(system))});
  conversation.push_back({"user", std::move(text)});
  return conversation;
}

std::string render_chat(const Tokenizer& tokenizer, const std::vector<Message>& conversation) {
  require(
      !tokenizer.chat_template().empty(), ErrorKind::not_found, tokenizer.origin(),
      ": no chat template: neither chat_template.jinja nor chat_template in tokenizer_config.json");
  const ChatTemplate chat(tokenizer.chat_template(), tokenizer.origin() + ": chat template");
  return chat.render(conversation, tokenizer.special_tokens());
}

std::vector<int64_t> prompt_ids(const Tokenizer& tokenizer,
                                const std::vector<Message>& conversation) {
  constexpr std::string_view kVisionStart = "<|vision_start|>";
  const std::optional<int64_t> eos = tokenizer.eos_id();
  require(eos.has_value(), ErrorKind::corrupt, tokenizer.origin(),
          ": tokenizer_config.json names no eos_token, which ends every prompt");
  const std::optional<int64_t> vision_start = tokenizer.id_of(kVisionStart);
  require(vision_start.has_value(), ErrorKind::corrupt, tokenizer.origin(),
          ": tokenizer.json lacks the token ", kVisionStart, ", which ends every prompt");
  std::vector<int64_t> ids = tokenizer.encode(render_chat(tokenizer, conversation));
  ids.push_back(*eos);
  ids.push_back(*vision_start);
  return ids;
}

void require_prompt_fits(const std::vector<int64_t>& ids, std::string_view name) {
  const int64_t count = static_cast<int64_t>(ids.size()) - kAppendedIds;
  require(count <= kMaxPromptIds, name, ": the prompt has ", count, " tokens with its templates, ",
          count - kMaxPromptIds, " more than the limit of ", kMaxPromptIds, "; shorten it");
}

}  // namespace orrery
