// A JSON value and a strict parser. nlohmann/json reads the grammar behind json.cpp; no type of it
// leaks out. Strict means: duplicate keys, trailing text, invalid UTF-8, nesting beyond
// kMaxJsonDepth, integers beyond 64 bits and NaN or Infinity are errors. A UTF-8 byte order mark in
// front is skipped. Errors name the origin (a file or flag) and the path inside the document
// ("model_index.json: scheduler[1]").
//
// An object is a list in file order: find() and set() take time linear in its size. Whoever has
// thousands of keys iterates members().
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace orrery {

inline constexpr int kMaxJsonDepth = 64;
// A document in memory takes up to some 200 bytes a value. The largest that are read, tokenizers,
// have about a million values in 20 MB.
inline constexpr int64_t kMaxJsonValues = 2'000'000;
inline constexpr uintmax_t kMaxJsonBytes = uintmax_t{64} << 20;

struct JsonPlace;

bool is_utf8(std::string_view text);

class Json {
 public:
  enum class Kind { null, boolean, integer, number, string, array, object };
  using Member = std::pair<std::string, Json>;

  Json() = default;
  Json(bool value) : value_(value) {}
  Json(int value) : value_(int64_t{value}) {}
  Json(int64_t value) : value_(value) {}
  Json(double value) : value_(value) {}
  Json(std::string value) : value_(std::move(value)) {}
  Json(const char* value) : Json(std::string(value)) {}
  static Json array(std::vector<Json> items = {});
  static Json object(std::vector<Member> members = {});

  // Throws Error{corrupt}. `origin` names the source in every later message.
  static Json parse(std::string_view text, const std::string& origin);
  // The same for an object of any size, of which only one member is in memory at a time: `each` is
  // called with every member in the order of the text. It may have seen some when an error is
  // thrown.
  using EachMember = std::function<void(const std::string& key, const Json& value)>;
  static void parse_members(std::string_view text, const std::string& origin,
                            const EachMember& each);
  // Throws Error{not_found} or Error{corrupt}; a file of more than kMaxJsonBytes is not read.
  static Json load(const std::filesystem::path& file);

  Kind kind() const { return static_cast<Kind>(value_.index()); }
  bool is_null() const { return kind() == Kind::null; }
  bool is_object() const { return kind() == Kind::object; }
  bool is_array() const { return kind() == Kind::array; }
  bool is_string() const { return kind() == Kind::string; }
  bool is_number() const { return kind() == Kind::number || kind() == Kind::integer; }
  bool is_integer() const { return kind() == Kind::integer; }
  bool is_boolean() const { return kind() == Kind::boolean; }

  // Checked access: throws Error{corrupt} that names `where()` and the type found.
  bool as_bool() const;
  int64_t as_int() const;    // integers only, not 1.0 and not true
  double as_double() const;  // integer or number
  const std::string& as_string() const;
  const std::vector<Json>& items() const;      // arrays
  const std::vector<Member>& members() const;  // objects, in file order

  bool has(std::string_view key) const;
  const Json* find(std::string_view key) const;  // null when absent; objects only
  const Json& at(std::string_view key) const;    // throws when absent
  const Json& at(size_t index) const;

  // Building. set() appends or replaces; push() appends.
  Json& set(std::string key, Json value);
  Json& push(Json value);

  // indent < 0: one line without blanks. Escapes only what JSON requires; bytes that are not UTF-8
  // become U+FFFD. Numbers read back as the same double. Throws Error{invalid_argument} for NaN and
  // Infinity, which JSON cannot say.
  std::string dump(int indent = -1) const;

  // "origin: path" of this value as parsed; "a value" for one that was built. A scalar past the
  // first 256 of a container names the container.
  std::string where() const;

 private:
  friend class JsonBuilder;
  // In the order of Kind.
  std::variant<std::monostate, bool, int64_t, double, std::string, std::vector<Json>,
               std::vector<Member>>
      value_;
  std::shared_ptr<const JsonPlace> place_;
};

}  // namespace orrery
