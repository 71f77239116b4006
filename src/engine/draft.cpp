#include <algorithm>
#include <charconv>
#include <numeric>

#include "engine/request_fields.h"
#include "io/sha256.h"
#include "orrery/media.h"

namespace orrery {

namespace fs = std::filesystem;

namespace {

// Letters to insert, delete or replace.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

std::vector<std::string_view> words_of(std::string_view text, char delimiter) {
  std::vector<std::string_view> words;
  while (!text.empty()) {
    const size_t end = std::min(text.find(delimiter), text.size());
    if (end > 0) words.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return words;
}

[[noreturn]] void refuse(const std::string& subject, const char* expected, std::string_view got) {
  fail(ErrorKind::invalid_argument, subject, " must be ", expected, ", got \"", got, "\"");
}

Json parse_integer(std::string_view word, const std::string& subject) {
  constexpr auto kExpected = "a whole decimal number";
  const std::string_view digits = word.starts_with('+') ? word.substr(1) : word;
  int64_t value = 0;
  const char* end = digits.data() + digits.size();
  if (auto [at, error] = std::from_chars(digits.data(), end, value);
      at == end && error == std::errc())
    return Json(value);
  // A seed may fill 64 bits; PyTorch takes it as the negative number of the same bits.
  uint64_t bits = 0;
  const auto [at, error] = std::from_chars(digits.data(), end, bits);
  if (at != end || digits.empty() || error == std::errc::invalid_argument)
    refuse(subject, kExpected, word);
  require(error == std::errc() && subject == "--seed", subject, " is ", word,
          "; the limits are -2^63 and ", subject == "--seed" ? "2^64 - 1" : "2^63 - 1");
  return Json(static_cast<int64_t>(bits));
}

Json parse_number(std::string_view word, const std::string& subject) {
  double value = 0;
  const std::string_view digits = word.starts_with('+') ? word.substr(1) : word;
  const char* end = digits.data() + digits.size();
  const auto [at, error] = std::from_chars(digits.data(), end, value);
  if (at != end || error != std::errc() || !std::isfinite(value))
    refuse(subject, "a finite decimal number", word);
  return Json(value);
}

Json parse_switch(std::string_view word, const std::string& subject) {
  if (word == "on" || word == "true" || word == "1") return Json(true);
  if (word == "off" || word == "false") return Json(false);
  refuse(subject, "on or off", word);
}

// The two sides of HINT=VALUE.
std::pair<std::string, std::string> parse_pair(std::string_view text, const std::string& subject) {
  const size_t equals = text.find('=');
  require(equals != 0 && equals != std::string_view::npos && equals + 1 != text.size(), subject,
          " \"", text, "\": expected HINT=VALUE");
  return {std::string(text.substr(0, equals)), std::string(text.substr(equals + 1))};
}

Json parse_hint_files(const std::vector<std::string>& words, const std::string& subject) {
  Json files = Json::object();
  for (const std::string& word : words) {
    const bool is_computed = word == "edge" || word == "blur";
    const auto [hint, file] =
        is_computed ? std::pair{word, std::string()} : parse_pair(word, subject);
    require(value_named<ControlHint>(hint).has_value(), "control \"", hint,
            "\" is not known; it is ", list_of_names<ControlHint>());
    require(!files.has(hint), "control ", hint, " is given twice");
    files.set(hint, is_computed ? Json(true) : Json(file));
  }
  return files;
}

Json parse_hint_numbers(const std::vector<std::string>& words, const std::string& subject) {
  Json numbers = Json::object();
  for (const std::string& word : words) {
    const auto [hint, number] = parse_pair(word, subject);
    numbers.set(hint, parse_number(number, subject + " " + hint));
  }
  return numbers;
}

// FILE or FILE:SCALE. A file whose own name ends like that is taken as a file.
Json parse_adapters(const std::vector<std::string>& words, const std::string& subject) {
  Json list = Json::array();
  for (const std::string& word : words) {
    const size_t colon = word.rfind(':');
    const bool scaled = colon != std::string::npos && !fs::exists(word);
    Json scale(1.0);
    if (scaled) {
      try {
        scale = parse_number(word.substr(colon + 1), subject);
      } catch (const Error&) {
        fail(ErrorKind::invalid_argument, subject, " \"", word, "\": \"", word.substr(colon + 1),
             "\" after the colon is no number; expected FILE or FILE:SCALE");
      }
    }
    list.push(
        Json::object().set("file", scaled ? word.substr(0, colon) : word).set("scale", scale));
  }
  return list;
}

Json parse_words(const FieldInfo& field, const std::vector<std::string>& words,
                 const std::string& subject) {
  const std::string last = words.empty() ? "" : words.back();
  switch (field.type) {
    case FieldType::integer: return parse_integer(last, subject);
    case FieldType::number: return parse_number(last, subject);
    case FieldType::mark:
    case FieldType::on_off: return parse_switch(last, subject);
    case FieldType::integers: {
      Json list = Json::array();
      for (const std::string& word : words) {
        for (std::string_view part : words_of(word, ',')) list.push(parse_integer(part, subject));
      }
      return list;
    }
    case FieldType::interval: {
      require(words.size() >= 2, subject, " takes two numbers, got ", words.size());
      return Json::array(
          {parse_number(words[words.size() - 2], subject), parse_number(last, subject)});
    }
    case FieldType::texts: {
      Json list = Json::array();
      for (const std::string& word : words) list.push(word);
      return list;
    }
    case FieldType::hint_files: return parse_hint_files(words, subject);
    case FieldType::hint_numbers: return parse_hint_numbers(words, subject);
    case FieldType::adapters: return parse_adapters(words, subject);
    case FieldType::text:
    case FieldType::file:
    case FieldType::choice: break;
  }
  require(is_utf8(last), subject, " is not UTF-8 text");
  return Json(last);
}

void check_limits(const FieldInfo& field, double value, const std::string& subject) {
  require(std::isfinite(value), subject, " must be a finite number, got ", value);
  require(value >= field.least, subject, " must be at least ", field.least, ", got ", value);
  require(value <= field.most, subject, " is ", value, "; the limit is ", field.most);
}

const FieldInfo* known_field(std::string_view name) {
  const FieldInfo* field = find_field(request_fields(), name);
  return field != nullptr ? field : find_field(engine_fields(), name);
}

// Fields without what gives them a meaning.
void refuse_strays(const Draft& draft) {
  for (const auto& [name, value] : draft.values()) {
    const FieldInfo* field = known_field(name);
    if (field == nullptr || field->needs.empty()) continue;
    const auto needs = words_of(field->needs, ' ');
    if (std::any_of(needs.begin(), needs.end(),
                    [&](std::string_view need) { return draft.has(need); }))
      continue;
    std::string flags;
    for (std::string_view need : needs)
      flags += (flags.empty() ? "" : " or ") + flag_of(*known_field(need));
    fail(ErrorKind::invalid_argument, value.from, " needs ", flags);
  }
}

// Where a path leads, and that its bytes are those of the run that is repeated.
Json opened(const Draft& draft, const std::string& name, const Draft::Value& value,
            const std::string& path) {
  require(path.find("://") == std::string::npos, value.from, " is the address ", path,
          "; only files of this machine are read: download it first");
  const auto folder = draft.folders.find(name);
  fs::path file = path;
  if (folder != draft.folders.end() && file.is_relative()) file = folder->second / file;
  const Json place = file_to_read(file, path);
  const auto known = draft.inputs.find(path);
  require(!value.repeats || known == draft.inputs.end() ||
              known->second == place.at("sha256").as_string(),
          value.from, ": the file ", path,
          " has changed since the run that is to be repeated; give it again (",
          flag_of(*known_field(name)), ") if that is meant");
  return place;
}

// What clips are cut down to: as the fields say that are no files.
Json limits_of(const Draft& draft) {
  Request plain;
  for (const Field<Request>& row : request_table()) {
    constexpr std::string_view kFields[] = {
        "height",    "width",       "num_frames",       "condition_video_keep",
        "video_fit", "action_mode", "action_chunk_size"};
    const bool counts =
        std::find(std::begin(kFields), std::end(kFields), row.name) != std::end(kFields);
    const Draft::Value* value = counts ? draft.find(row.name) : nullptr;
    if (value != nullptr) row.read(plain, *value->json);
  }
  if (draft.has("control")) plain.transfer.emplace();
  const ClipLimits limits = clip_limits(plain);
  return Json::object()
      .set("max_frames", limits.max_frames)
      .set("keep", std::string(name_of(limits.keep)))
      .set("height", limits.height)
      .set("width", limits.width)
      .set("fit", std::string(name_of(limits.fit)));
}

Json with_files(const Draft& draft, const FieldInfo& field, const Draft::Value& value) {
  const std::string name(field.name);
  const bool is_file = field.type == FieldType::file;
  if (!is_file && field.type != FieldType::hint_files) return *value.json;
  const Json limits = limits_of(draft);
  const auto open = [&](const std::string& path) {
    return opened(draft, name, value, path).set("limits", limits);
  };
  if (is_file) return open(value.json->as_string());
  Json files = Json::object();
  for (const auto& [hint, file] : value.json->members())
    files.set(hint, file.is_string() ? open(file.as_string()) : file);
  return files;
}

}  // namespace

const FieldInfo* find_field(const std::vector<FieldInfo>& fields, std::string_view name) {
  const auto it = std::find_if(fields.begin(), fields.end(),
                               [&](const FieldInfo& field) { return field.name == name; });
  return it == fields.end() ? nullptr : &*it;
}

std::string flag_of(const FieldInfo& field) {
  if (field.renamed) return std::string(words_of(field.flags, ',').front());
  std::string flag = "--" + std::string(field.name);
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

std::string legal_values(const FieldInfo& field) {
  if (!field.choices.empty()) {
    std::string list;
    for (std::string_view name : field.choices)
      list += (list.empty() ? "" : ", ") + std::string(name);
    return list;
  }
  const bool low = std::isfinite(field.least), high = std::isfinite(field.most);
  if (low && high) return concat(field.least, " to ", field.most);
  if (low) return concat("at least ", field.least);
  return high ? concat("at most ", field.most) : "";
}

std::string nearest_word(std::string_view given, const std::vector<std::string>& known) {
  std::string best;
  size_t least = std::max<size_t>(2, given.size() / 4) + 1;
  for (const std::string& word : known) {
    if (given.size() > 2 && word.starts_with(given)) return word;
  }
  for (const std::string& word : known) {
    if (given.size() > 3 && word.find(given) != std::string::npos) return word;
  }
  for (const std::string& word : known) {
    const size_t d = edit_distance(given, word);
    if (d >= least || d >= given.size() - 1) continue;
    least = d;
    best = word;
  }
  return best;
}

void check_value(const FieldInfo& field, const Json& value, const std::string& subject) {
  const auto expect = [&](bool holds, const char* expected) {
    if (!holds)
      fail(ErrorKind::invalid_argument, subject, " must be ", expected, ", got ",
           value.dump().substr(0, 80));
  };
  switch (field.type) {
    case FieldType::integer:
      expect(value.is_integer(), "a whole number");
      return check_limits(field, value.as_double(), subject);
    case FieldType::number:
      expect(value.is_number(), "a number");
      return check_limits(field, value.as_double(), subject);
    case FieldType::mark:
    case FieldType::on_off: return expect(value.is_boolean(), "true or false");
    case FieldType::text: return expect(value.is_string(), "text");
    case FieldType::file:
      return expect(value.is_string() || value.is_object(), "the path of a file");
    case FieldType::choice: {
      expect(value.is_string(), "a name");
      const std::string& name = value.as_string();
      const bool known =
          std::find(field.choices.begin(), field.choices.end(), name) != field.choices.end();
      require(known, subject, " is \"", name, "\"; it is one of ", legal_values(field));
      return;
    }
    case FieldType::integers:
    case FieldType::interval:
      expect(value.is_array(), "a list of numbers");
      expect(field.type == FieldType::integers || value.items().size() == 2, "two numbers");
      for (const Json& item : value.items()) {
        expect(field.type == FieldType::integers ? item.is_integer() : item.is_number(),
               "a list of numbers");
        check_limits(field, item.as_double(), subject);
      }
      return;
    case FieldType::hint_numbers:
      expect(value.is_object(), "an object of numbers by hint");
      for (const auto& [hint, number] : value.members()) {
        expect(number.is_number(), "an object of numbers by hint");
        check_limits(field, number.as_double(), subject + " " + hint);
      }
      return;
    case FieldType::hint_files: return expect(value.is_object(), "an object of files by hint");
    case FieldType::texts:
    case FieldType::adapters: return expect(value.is_array(), "a list");
  }
}

void Draft::set(const FieldInfo& field, const std::vector<std::string>& words,
                const std::string& from) {
  const Json value = parse_words(field, words, from);
  check_value(field, value, from);
  values_[std::string(field.name)] = {std::make_shared<const Json>(value), from, false};
}

void Draft::set(std::string_view name, const Json& value, const std::string& from) {
  if (const FieldInfo* field = known_field(name)) check_value(*field, value, from);
  values_[std::string(name)] = {std::make_shared<const Json>(value), from, false};
}

const Draft::Value* Draft::find(std::string_view name) const {
  const auto it = values_.find(std::string(name));
  return it == values_.end() ? nullptr : &it->second;
}

std::string Draft::text(std::string_view name) const {
  const Value* value = find(name);
  return value != nullptr ? value->json->as_string() : std::string();
}

int64_t Draft::integer(std::string_view name) const {
  const Value* value = find(name);
  return value != nullptr ? value->json->as_int() : 0;
}

std::vector<int64_t> Draft::integers(std::string_view name) const {
  const Value* value = find(name);
  return value != nullptr ? FieldCodec<std::vector<int64_t>>::read(*value->json)
                          : std::vector<int64_t>();
}

std::vector<std::string> Draft::texts(std::string_view name) const {
  std::vector<std::string> list;
  const Value* value = find(name);
  if (value == nullptr) return list;
  for (const Json& item : value->json->items()) list.push_back(item.as_string());
  return list;
}

std::vector<std::string> Draft::fill_from(const Draft& other) {
  std::vector<std::string> sentences;
  for (const auto& [name, value] : other.values_) {
    const auto [mine, is_new] = values_.try_emplace(name, value);
    if (is_new) {
      if (const auto folder = other.folders.find(name); folder != other.folders.end())
        folders.insert(*folder);
      continue;
    }
    const std::string here = mine->second.json->dump(), there = value.json->dump();
    if (here == there) continue;
    sentences.push_back(concat(mine->second.from, " ", here.substr(0, 60), " is used instead of ",
                               there.substr(0, 60), " (", value.from, ")"));
  }
  for (const auto& [path, digest] : other.inputs) inputs.try_emplace(path, digest);
  return sentences;
}

Request request_of(const Draft& draft) {
  refuse_strays(draft);
  Request request;
  for (const Field<Request>& row : request_table()) {
    if (const Draft::Value* value = draft.find(row.name))
      row.read(request, with_files(draft, row, *value));
  }
  // As the public entry point does.
  if (request.action && !request.use_system_prompt) request.use_system_prompt = false;
  return request;
}

EngineOptions engine_options_of(const Draft& draft) {
  refuse_strays(draft);
  EngineOptions options;
  for (const Field<EngineOptions>& row : engine_table()) {
    if (const Draft::Value* value = draft.find(row.name)) row.read(options, *value->json);
  }
  return options;
}

}  // namespace orrery
