#include "base/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/budget.h"
#include "base/error.h"

namespace orrery {

// Where a value stood in its document. Children share the place of their container, so that a path
// costs nothing until a message asks for it.
struct JsonPlace {
  std::shared_ptr<const JsonPlace> container;  // null: the document itself
  std::string key;                             // of a member; of the document: its origin
  int64_t index = -1;                          // of an item; -1: a member
};

namespace {

const char* kind_name(Json::Kind kind) {
  switch (kind) {
    case Json::Kind::null: return "null";
    case Json::Kind::boolean: return "a boolean";
    case Json::Kind::integer: return "an integer";
    case Json::Kind::number: return "a number";
    case Json::Kind::string: return "a string";
    case Json::Kind::array: return "an array";
    case Json::Kind::object: return "an object";
  }
  return "?";
}

// Not require(): its arguments, the path among them, would be made on every access.
[[noreturn]] void refuse_kind(const Json& value, const char* expected) {
  fail(ErrorKind::corrupt, value.where(), ": expected ", expected, ", found ",
       kind_name(value.kind()));
}

std::string path_of(const JsonPlace& place) {
  if (!place.container) return place.key;
  const bool is_top = !place.container->container;
  std::string path = path_of(*place.container);
  if (place.index >= 0) return path + concat(is_top ? ": [" : "[", place.index, "]");
  return path + (is_top ? ": " : ".") + place.key;
}

// Length of the UTF-8 sequence at the front of a text that is not empty; 0 when it is malformed,
// overlong, a surrogate or beyond U+10FFFF.
size_t utf8_sequence(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const unsigned second = byte(1);
  const bool bad = (lead == 0xe0 && second < 0xa0) || (lead == 0xed && second > 0x9f) ||
                   (lead == 0xf0 && second < 0x90) || (lead == 0xf4 && second > 0x8f);
  return bad ? 0 : length;
}

void write_string(std::string& out, std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  out += '"';
  while (!text.empty()) {
    const size_t length = utf8_sequence(text);
    const unsigned char lead = static_cast<unsigned char>(text.front());
    if (length == 0) {
      out += "\xef\xbf\xbd";
    } else if (lead == '"' || lead == '\\') {
      out += '\\';
      out += text.front();
    } else if (lead == '\n') {
      out += "\\n";
    } else if (lead == '\t') {
      out += "\\t";
    } else if (lead == '\r') {
      out += "\\r";
    } else if (lead < 0x20) {
      out += "\\u00";
      out += kHex[lead >> 4];
      out += kHex[lead & 15];
    } else {
      out += text.substr(0, length);
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  out += '"';
}

void write_number(std::string& out, double value) {
  require(std::isfinite(value), "json: the number ", value, " cannot be written");
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  const std::string_view text(digits, static_cast<size_t>(end - digits));
  out += text;
  if (text.find_first_of(".e") == std::string_view::npos)
    out += ".0";  // stays a number, not an integer
}

void write_value(std::string& out, const Json& value, int indent, int depth);

// Writes `count` entries between brackets; entry(i) writes one.
template <typename Entry>
void write_list(std::string& out, const char* brackets, size_t count, int indent, int depth,
                Entry entry) {
  const auto new_line = [&](int level) {
    if (indent < 0) return;
    out += '\n';
    out.append(static_cast<size_t>(indent) * static_cast<size_t>(level), ' ');
  };
  out += brackets[0];
  for (size_t i = 0; i < count; ++i) {
    if (i > 0) out += ',';
    new_line(depth + 1);
    entry(i);
  }
  if (count > 0) new_line(depth);
  out += brackets[1];
}

void write_value(std::string& out, const Json& value, int indent, int depth) {
  switch (value.kind()) {
    case Json::Kind::null: out += "null"; return;
    case Json::Kind::boolean: out += value.as_bool() ? "true" : "false"; return;
    case Json::Kind::integer: out += std::to_string(value.as_int()); return;
    case Json::Kind::number: write_number(out, value.as_double()); return;
    case Json::Kind::string: write_string(out, value.as_string()); return;
    case Json::Kind::array: {
      const auto& items = value.items();
      write_list(out, "[]", items.size(), indent, depth,
                 [&](size_t i) { write_value(out, items[i], indent, depth + 1); });
      return;
    }
    case Json::Kind::object: {
      const auto& members = value.members();
      write_list(out, "{}", members.size(), indent, depth, [&](size_t i) {
        write_string(out, members[i].first);
        out += indent < 0 ? ":" : ": ";
        write_value(out, members[i].second, indent, depth + 1);
      });
      return;
    }
  }
}

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const size_t length = utf8_sequence(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

// Receives the parser's events and grows the tree.
class JsonBuilder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  // With `each`, members of the outermost object are handed over as they are complete.
  explicit JsonBuilder(const std::string& origin, const Json::EachMember* each = nullptr)
      : document_(std::make_shared<JsonPlace>(JsonPlace{nullptr, origin, -1})), each_(each) {}
  Json take() { return std::move(root_); }

  bool null() override { return place_scalar(Json()); }
  bool boolean(bool value) override { return place_scalar(Json(value)); }
  bool number_integer(int64_t value) override { return place_scalar(Json(value)); }
  bool number_unsigned(uint64_t value) override {
    if (value > uint64_t{INT64_MAX}) refuse_integer(std::to_string(value));
    return place_scalar(Json(static_cast<int64_t>(value)));
  }
  bool number_float(double value, const std::string& text) override {
    // The library falls back to a double for integers that it cannot hold.
    if (text.find_first_of(".eE") == std::string::npos) refuse_integer(text);
    return place_scalar(Json(value));
  }
  bool string(std::string& value) override { return place_scalar(Json(std::move(value))); }
  bool binary(nlohmann::json::binary_t&) override { return false; }
  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool end_object() override {
    check_keys(std::get<std::vector<Json::Member>>(stack_.back().value.value_));
    return close();
  }
  bool end_array() override { return close(); }
  bool key(std::string& name) override {
    stack_.back().key = std::move(name);
    return true;
  }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    // "[json.exception...] parse error at line 1, column 2: ...; last read: '...'". The part last
    // read can be as long as the document.
    constexpr size_t kShown = 240;
    std::string detail = error.what();
    if (const auto at = detail.find("] "); at != std::string::npos) detail.erase(0, at + 2);
    if (detail.size() > kShown) detail = detail.substr(0, kShown) + "...";
    fail(ErrorKind::corrupt, document_->key, ": not valid JSON near byte ", position, " (", detail,
         ")");
  }

 private:
  struct Frame {
    Json value;
    std::string key;
  };

  JsonPlace here() const {
    if (stack_.empty()) return *document_;
    const Frame& frame = stack_.back();
    if (!frame.value.is_array()) return {frame.value.place_, frame.key, -1};
    return {frame.value.place_, {}, static_cast<int64_t>(frame.value.items().size())};
  }
  [[noreturn]] void refuse_integer(const std::string& digits) const {
    constexpr size_t kShown = 40;
    fail(ErrorKind::corrupt, path_of(here()), ": the integer ", digits.substr(0, kShown),
         digits.size() > kShown ? "..." : "", " does not fit in 64 bits with a sign");
  }
  void check_keys(const std::vector<Json::Member>& members) const {
    constexpr size_t kFew = 16;
    const auto refuse = [&](const std::string& key) {
      fail(ErrorKind::corrupt, path_of(*stack_.back().value.place_), ": the key \"", key,
           "\" occurs twice");
    };
    if (members.size() <= kFew) {
      for (size_t i = 0; i < members.size(); ++i) {
        for (size_t j = 0; j < i; ++j) {
          if (members[i].first == members[j].first) refuse(members[i].first);
        }
      }
      return;
    }
    std::unordered_set<std::string_view> keys;
    keys.reserve(members.size());
    for (const auto& [key, value] : members) {
      if (!keys.insert(key).second) refuse(key);
    }
  }
  bool open(Json value) {
    if (static_cast<int>(stack_.size()) >= kMaxJsonDepth) {
      fail(ErrorKind::corrupt, document_->key, ": nested deeper than ", kMaxJsonDepth, " levels");
    }
    value.place_ = stack_.empty() ? document_ : std::make_shared<JsonPlace>(here());
    stack_.push_back({std::move(value), {}});
    return true;
  }
  bool close() {
    Json value = std::move(stack_.back().value);
    stack_.pop_back();
    return place(std::move(value));
  }
  bool place_scalar(Json value) {
    // A vocabulary has 150 000 scalars and no use for their paths; a config has a few dozen.
    constexpr size_t kLocatedScalars = 256;
    if (stack_.empty()) {
      value.place_ = document_;
    } else if (const Json& container = stack_.back().value;
               (container.is_array() ? container.items().size() : container.members().size()) <
               kLocatedScalars) {
      value.place_ = std::make_shared<JsonPlace>(here());
    } else {
      value.place_ = container.place_;
    }
    return place(std::move(value));
  }
  bool place(Json value) {
    // Handed over, a value does not stay: what is budgeted is the tree in memory.
    const bool goes = each_ != nullptr && stack_.size() == 1 && stack_.back().value.is_object();
    if (!goes && !budget_.spend(1, 0)) {
      fail(ErrorKind::corrupt, document_->key, ": more than ", kMaxJsonValues, " values");
    }
    if (stack_.empty()) {
      root_ = std::move(value);
      return true;
    }
    if (goes) return hand_over(std::move(value));
    Frame& frame = stack_.back();
    if (auto* items = std::get_if<std::vector<Json>>(&frame.value.value_)) {
      items->push_back(std::move(value));
    } else {
      std::get<std::vector<Json::Member>>(frame.value.value_)
          .emplace_back(std::move(frame.key), std::move(value));
    }
    return true;
  }

  bool hand_over(Json value) {
    std::string& key = stack_.back().key;
    if (!handed_over_.insert(key).second) {
      fail(ErrorKind::corrupt, document_->key, ": the key \"", key, "\" occurs twice");
    }
    (*each_)(key, value);
    budget_.steps = kMaxJsonValues;
    return true;
  }

  std::shared_ptr<const JsonPlace> document_;
  const Json::EachMember* each_;
  std::unordered_set<std::string> handed_over_;  // names of those members
  Budget budget_{kMaxJsonValues, 0};
  std::vector<Frame> stack_;
  Json root_;
};

Json Json::array(std::vector<Json> items) {
  Json value;
  value.value_ = std::move(items);
  return value;
}

Json Json::object(std::vector<Member> members) {
  Json value;
  value.value_ = std::move(members);
  return value;
}

namespace {

Json build(std::string_view text, const std::string& origin, JsonBuilder&& builder) {
  // The library takes a NUL for the end of the text and would not see what follows.
  if (const size_t at = text.find('\0'); at != std::string_view::npos) {
    fail(ErrorKind::corrupt, origin, ": not valid JSON near byte ", at, " (a NUL byte)");
  }
  nlohmann::json::sax_parse(text.data(), text.data() + text.size(), &builder);
  return builder.take();
}

}  // namespace

Json Json::parse(std::string_view text, const std::string& origin) {
  return build(text, origin, JsonBuilder(origin));
}

void Json::parse_members(std::string_view text, const std::string& origin, const EachMember& each) {
  if (!build(text, origin, JsonBuilder(origin, &each)).is_object())
    fail(ErrorKind::corrupt, origin, ": expected an object");
}

Json Json::load(const std::filesystem::path& file) {
  std::error_code none;
  require(!std::filesystem::is_directory(file, none), ErrorKind::not_found, file.string(),
          ": is a folder, a JSON file is needed");
  std::ifstream in(file, std::ios::binary);
  require(in.good(), ErrorKind::not_found, file.string(), ": cannot open the file");
  const auto refuse_length = [&](uintmax_t bytes) {
    require(bytes <= kMaxJsonBytes, ErrorKind::corrupt, file.string(), ": more than ",
            kMaxJsonBytes >> 20, " MiB, which no JSON file of a model or a request needs");
  };
  if (std::filesystem::is_regular_file(file, none))
    refuse_length(std::filesystem::file_size(file, none));
  std::string text;
  // In pieces, since a pipe has no size to ask for.
  constexpr size_t kPiece = size_t{1} << 20;
  for (size_t used = 0; in.good(); text.resize(used)) {
    text.resize(used + kPiece);
    in.read(text.data() + used, kPiece);
    used += static_cast<size_t>(in.gcount());
    refuse_length(used);
  }
  require(in.eof(), ErrorKind::corrupt, file.string(), ": cannot read the file");
  return parse(text, file.string());
}

std::string Json::where() const { return place_ ? path_of(*place_) : "a value"; }

bool Json::as_bool() const {
  if (!is_boolean()) refuse_kind(*this, "a boolean");
  return std::get<bool>(value_);
}

int64_t Json::as_int() const {
  if (!is_integer()) refuse_kind(*this, "an integer");
  return std::get<int64_t>(value_);
}

double Json::as_double() const {
  if (!is_number()) refuse_kind(*this, "a number");
  if (const int64_t* integer = std::get_if<int64_t>(&value_)) return static_cast<double>(*integer);
  return std::get<double>(value_);
}

const std::string& Json::as_string() const {
  if (!is_string()) refuse_kind(*this, "a string");
  return std::get<std::string>(value_);
}

const std::vector<Json>& Json::items() const {
  if (!is_array()) refuse_kind(*this, "an array");
  return std::get<std::vector<Json>>(value_);
}

const std::vector<Json::Member>& Json::members() const {
  if (!is_object()) refuse_kind(*this, "an object");
  return std::get<std::vector<Member>>(value_);
}

bool Json::has(std::string_view key) const { return find(key) != nullptr; }

const Json* Json::find(std::string_view key) const {
  for (const Member& member : members()) {
    if (member.first == key) return &member.second;
  }
  return nullptr;
}

const Json& Json::at(std::string_view key) const {
  const Json* value = find(key);
  if (!value) fail(ErrorKind::corrupt, where(), ": the key \"", key, "\" is missing");
  return *value;
}

const Json& Json::at(size_t index) const {
  if (index >= items().size()) {
    fail(ErrorKind::corrupt, where(), ": has ", items().size(), " items, item ", index,
         " is missing");
  }
  return items()[index];
}

Json& Json::set(std::string key, Json value) {
  require(is_object(), "json: set() on ", kind_name(kind()));
  auto& members = std::get<std::vector<Member>>(value_);
  for (Member& member : members) {
    if (member.first == key) {
      member.second = std::move(value);
      return *this;
    }
  }
  members.emplace_back(std::move(key), std::move(value));
  return *this;
}

Json& Json::push(Json value) {
  require(is_array(), "json: push() on ", kind_name(kind()));
  std::get<std::vector<Json>>(value_).push_back(std::move(value));
  return *this;
}

std::string Json::dump(int indent) const {
  std::string out;
  write_value(out, *this, indent, 0);
  return out;
}

}  // namespace orrery
