// Prompt files: text, or requests in JSON as the public entry points take them.
#include <algorithm>
#include <array>
#include <fstream>
#include <iostream>
#include <iterator>

#include "engine/request_fields.h"
#include "io/resize.h"
#include "text/python_json.h"
#include "text/utf8.h"

namespace orrery {

namespace fs = std::filesystem;

namespace {

constexpr size_t kMaxText = size_t{64} << 20;

// --- bytes to text ---

std::string from_utf16(std::string_view bytes, bool big_endian, const std::string& origin) {
  require(bytes.size() % 2 == 0, origin, ": the UTF-16 text ends within a character");
  const auto unit = [&](size_t at) {
    const auto high = static_cast<uint8_t>(bytes[at + (big_endian ? 0 : 1)]);
    const auto low = static_cast<uint8_t>(bytes[at + (big_endian ? 1 : 0)]);
    return static_cast<char32_t>(high << 8 | low);
  };
  std::string text;
  for (size_t at = 0; at < bytes.size(); at += 2) {
    char32_t code = unit(at);
    if (code >= 0xD800 && code < 0xE000) {
      const char32_t second = at + 2 < bytes.size() ? unit(at + 2) : 0;
      require(code < 0xDC00 && second >= 0xDC00 && second < 0xE000, origin,
              ": the UTF-16 text holds half of a surrogate pair");
      code = 0x10000 + ((code - 0xD800) << 10) + (second - 0xDC00);
      at += 2;
    }
    append_utf8(text, code);
  }
  return text;
}

std::string decoded(std::string_view bytes, const std::string& origin) {
  std::string text;
  if (bytes.starts_with("\xFF\xFE"))
    text = from_utf16(bytes.substr(2), false, origin);
  else if (bytes.starts_with("\xFE\xFF"))
    text = from_utf16(bytes.substr(2), true, origin);
  else
    text = bytes.starts_with("\xEF\xBB\xBF") ? bytes.substr(3) : bytes;
  require(text.find('\0') == std::string::npos, origin,
          ": the text holds a NUL character; is it UTF-16 without a byte order mark?");
  require(is_utf8(text), origin, ": the text is not UTF-8; convert it, for example with iconv");
  return text;
}

// --- one JSON request ---

std::string prompt_of(const Json& json, const std::string& subject) {
  require(json.is_string() || json.is_object(), subject,
          " must be text or an object (a caption), got ", json.dump().substr(0, 80));
  return json.is_string() ? json.as_string() : python_json(json);
}

// Names that structured captions have too.
bool is_caption_key(std::string_view key) {
  return key == "fps" || key == "resolution" || key == "aspect_ratio";
}

// Keys that are not rows of the table: what they set is said by read_special().
constexpr std::array<std::string_view, 6> kSpecial{"name",       "model_mode",   "prompt_path",
                                                   "resolution", "aspect_ratio", "image"};

const FieldInfo* field_named(std::string_view key) {
  for (const FieldInfo& field : request_fields()) {
    if (field.name == key) return &field;
    std::string_view aliases = field.aliases;
    while (!aliases.empty()) {
      const size_t end = std::min(aliases.find(' '), aliases.size());
      if (aliases.substr(0, end) == key) return &field;
      aliases.remove_prefix(std::min(end + 1, aliases.size()));
    }
  }
  return nullptr;
}

bool is_request_key(std::string_view key) {
  return std::find(kSpecial.begin(), kSpecial.end(), key) != kSpecial.end() ||
         value_named<ControlHint>(key) || field_named(key) != nullptr;
}

[[noreturn]] void refuse_key(const std::string& origin, const std::string& key) {
  std::vector<std::string> known(kSpecial.begin(), kSpecial.end());
  for (const FieldInfo& field : request_fields()) known.emplace_back(field.name);
  const std::string near = nearest_word(key, known);
  fail(ErrorKind::invalid_argument, origin, ": ", key, " is not known",
       near.empty() ? std::string() : "; did you mean " + near + "?");
}

class RequestReader {
 public:
  RequestReader(const Json& request, const std::string& origin, const fs::path& folder)
      : request_(request), origin_(origin), folder_(folder) {}

  Draft read() {
    for (const auto& [key, value] : request_.members()) {
      if (value.is_null()) continue;  // not given
      if (const std::optional<ControlHint> hint = value_named<ControlHint>(key))
        read_control(key, value);
      else if (const FieldInfo* field = field_named(key))
        read_field(*field, key, value);
      else
        read_special(key, value);
    }
    apply_size();
    if (!controls_.members().empty()) set("control", controls_, "control");
    if (!weights_.members().empty()) set("control_weight", weights_, "control_weight");
    return std::move(draft_);
  }

 private:
  std::string subject(const std::string& key) const { return origin_ + ": " + key; }

  void set(std::string_view name, const Json& value, const std::string& key) {
    require(!draft_.has(name), subject(key), " says ", name, " a second time");
    draft_.set(name, value, subject(key));
    draft_.folders[std::string(name)] = folder_;
  }

  void read_field(const FieldInfo& field, const std::string& key, const Json& value) {
    if (field.name == "prompt" || field.name == "negative_prompt")
      return set(field.name, Json(prompt_of(value, subject(key))), key);
    set(field.name, value, key);
  }

  // true, or {"control_path", "control_weight", "preset_..."}.
  void read_control(const std::string& hint, const Json& value) {
    require(value.is_object() || (value.is_boolean() && value.as_bool()), subject(hint),
            " must be true or an object with control_path");
    Json file(true);
    if (value.is_object()) {
      for (const auto& [key, part] : value.members()) {
        if (part.is_null()) continue;
        if (key == "control_path")
          file = part;
        else if (key == "control_weight")
          weights_.set(hint, part);
        else if (key == "preset_edge_threshold" || key == "preset_blur_strength")
          set(key, part, hint + "." + key);
        else
          refuse_key(subject(hint), key);
      }
    }
    require(file.is_string() || file.is_boolean(), subject(hint), ": control_path must be text");
    controls_.set(hint, file);
  }

  void read_special(const std::string& key, const Json& value) {
    const auto is = [&](std::string_view name) { return key == name; };
    if (std::find(kSpecial.begin(), kSpecial.end(), key) == kSpecial.end())
      refuse_key(origin_, key);
    require(value.is_string() || is("resolution"), subject(key), " must be text");
    if (is("model_mode")) return read_mode(value.as_string());
    if (is("prompt_path")) return read_prompt_path(value.as_string());
    if (is("image")) return set("vision_path", value, key);
    if (is("resolution")) tier_ = value.is_string() ? value.as_string() : value.dump();
    if (is("aspect_ratio")) ratio_ = value.as_string();
    if (is("name")) draft_.set("name", value, subject(key));
  }

  void read_prompt_path(const std::string& path) {
    const std::vector<Draft> prompts = read_requests((folder_ / path).lexically_normal());
    require(prompts.size() == 1, subject("prompt_path"), ": ", path, " holds ", prompts.size(),
            " prompts; one is needed");
    for (const char* name : {"prompt", "negative_prompt"}) {
      if (const Draft::Value* value = prompts.front().find(name))
        set(name, *value->json, "prompt_path");
    }
  }

  void read_mode(const std::string& mode) {
    if (value_named<ActionMode>(mode)) return set("action_mode", Json(mode), "model_mode");
    const auto known = {"text2image", "text2video", "image2video", "video2video"};
    require(std::find(known.begin(), known.end(), mode) != known.end(), subject("model_mode"),
            " is \"", mode, "\"; it is text2image, text2video, image2video, video2video, ",
            list_of_names<ActionMode>());
    const Json* vision = request_.find("vision_path");
    const bool has_vision = (vision != nullptr && !vision->is_null()) || request_.has("video_path");
    require(!mode.starts_with("text2") || !has_vision, subject("model_mode"), " is ", mode,
            ", but a picture or video is given");
    if (mode != "text2image") return;
    const Json* frames = request_.find("num_frames");
    if (frames == nullptr || frames->is_null()) return set("num_frames", Json(1), "model_mode");
    require(frames->dump() == "1", subject("model_mode"), " is text2image, but num_frames is ",
            frames->dump());
  }

  // Public tiers: a short side and the shape, 16,9 unless said.
  void apply_size() {
    if (tier_.empty()) {
      require(ratio_.empty(), subject("aspect_ratio"), " needs resolution");
      return;
    }
    std::string ratio = ratio_.empty() ? "16,9" : ratio_;
    std::replace(ratio.begin(), ratio.end(), ':', ',');
    const auto tiers = {"256", "480", "704", "720"};
    const auto ratios = {"1,1", "4,3", "3,4", "16,9", "9,16"};
    require(std::find(tiers.begin(), tiers.end(), tier_) != tiers.end() &&
                std::find(ratios.begin(), ratios.end(), ratio) != ratios.end(),
            subject("resolution"), " is ", tier_, " at ", ratio,
            "; known are 256, 480, 704 and 720 at 1,1 4,3 3,4 16,9 and 9,16. Or give height and "
            "width");
    constexpr int64_t kUnit = 100;  // the shape alone counts
    const ActionGeometry size =
        action_geometry(std::stoi(tier_), kUnit * std::stoi(ratio.substr(ratio.find(',') + 1)),
                        kUnit * std::stoi(ratio));
    set("height", Json(size.height), "resolution");
    set("width", Json(size.width), "resolution");
  }

  const Json& request_;
  const std::string& origin_;
  fs::path folder_;
  Draft draft_;
  Json controls_ = Json::object(), weights_ = Json::object();
  std::string tier_, ratio_;
};

// --- which of them it is ---

Draft prompt_draft(const std::string& prompt, const std::string& origin) {
  Draft draft;
  draft.set("prompt", Json(prompt), origin);
  return draft;
}

// A structured caption has none of a request's own keys.
bool is_caption(const Json& object) {
  return std::none_of(object.members().begin(), object.members().end(), [](const auto& member) {
    return is_request_key(member.first) && !is_caption_key(member.first);
  });
}

Draft draft_of(const Json& json, const std::string& text, const std::string& origin,
               const fs::path& folder) {
  if (json.is_string()) return prompt_draft(json.as_string(), origin);
  require(json.is_object(), origin, ": expected a JSON object or string");
  if (is_caption(json)) return prompt_draft(text, origin);
  return RequestReader(json, origin, folder).read();
}

std::optional<Json> parsed(std::string_view text, const std::string& origin) {
  try {
    return Json::parse(text, origin);
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string line = text.substr(begin, end - begin);
    if (line.find_first_not_of(" \t\r") != std::string::npos) lines.push_back(std::move(line));
    begin = end + 1;
  }
  return lines;
}

// A request a line, when the first line is one by itself.
std::vector<Draft> json_lines(const std::string& text, const std::string& origin,
                              const fs::path& folder) {
  std::vector<Draft> drafts;
  const std::vector<std::string> lines = lines_of(text);
  const std::optional<Json> first = parsed(lines.front(), origin);
  if (lines.size() < 2 || !first || !first->is_object()) return drafts;
  for (size_t i = 0; i < lines.size(); ++i) {
    const std::string where = concat(origin, ", line ", i + 1);
    drafts.push_back(draft_of(Json::parse(lines[i], where), lines[i], where, folder));
  }
  return drafts;
}

}  // namespace

std::vector<Draft> parse_requests(std::string_view bytes, const fs::path& file) {
  const std::string origin = file.string();
  const fs::path folder = file == "-" ? fs::path() : file.parent_path();
  std::string text = decoded(bytes, origin);
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  const size_t begin = text.find_first_not_of(" \t\r\n");
  require(begin != std::string::npos, origin, ": the file is empty; it should hold a prompt");
  const char first = text[begin];
  const std::optional<Json> json = parsed(text, origin);
  const bool named_json = file.extension() == ".json" || file.extension() == ".JSON";
  if (!json) {
    if (first == '{') {
      if (std::vector<Draft> drafts = json_lines(text, origin, folder); !drafts.empty())
        return drafts;
    }
    if (first == '{' || named_json) Json::parse(text, origin);  // says what is wrong
    return {prompt_draft(text, origin)};
  }
  if (json->is_array()) {
    std::vector<Draft> drafts;
    for (size_t i = 0; i < json->items().size(); ++i) {
      const Json& item = json->items()[i];
      drafts.push_back(draft_of(item, item.dump(), concat(origin, ": request ", i + 1), folder));
    }
    require(!drafts.empty(), origin, ": the list of requests is empty");
    return drafts;
  }
  // A number or a word alone is a prompt.
  if (!json->is_object() && !json->is_string()) {
    require(!named_json, origin, ": expected a JSON object or string");
    return {prompt_draft(text, origin)};
  }
  return {draft_of(*json, text, origin, folder)};
}

std::vector<Draft> read_requests(const fs::path& file) {
  std::string bytes;
  if (file == "-") {
    bytes.assign(std::istreambuf_iterator<char>(std::cin), {});
  } else {
    require(!fs::is_directory(file), file.string(), " is a folder; name a file with the prompt");
    std::ifstream in(file, std::ios::binary);
    require(in.good(), ErrorKind::not_found, file.string(), ": cannot open the file");
    std::array<char, 1 << 16> block;
    while (in.read(block.data(), block.size()) || in.gcount() > 0) {
      bytes.append(block.data(), static_cast<size_t>(in.gcount()));
      require(bytes.size() <= kMaxText, file.string(), ": more than ", kMaxText >> 20,
              " MB are no prompt");
    }
  }
  return parse_requests(bytes, file);
}

}  // namespace orrery
