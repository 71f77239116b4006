// The values of a chat template and what can be done with them alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/budget.h"
#include "text/jinja_syntax.h"

namespace orrery::jinja {

// Bounds of one value, far above what conversations need: 4096 tokens, the longest prompt, have
// fewer.
inline constexpr size_t kMaxTextBytes = size_t{4} << 20;
inline constexpr size_t kMaxItems = 100'000;

struct Value;
using List = std::vector<Value>;
using Members = std::map<std::string, Value, std::less<>>;

struct Value {
  enum class Type { undefined, none, boolean, integer, text, list, dict, space, macro };
  Type type = Type::undefined;
  int64_t integer = 0;
  std::string text;  // of a name that is undefined, its spelling
  std::shared_ptr<const List> list;
  std::shared_ptr<Members> members;  // of a dict, never changed; of a namespace, shared and changed
  const Statement* macro = nullptr;
  int depth = 0;

  static Value of(std::string text) {
    Value value;
    value.type = Type::text;
    value.text = std::move(text);
    return value;
  }
  static Value of(int64_t integer) {
    Value value;
    value.type = Type::integer;
    value.integer = integer;
    return value;
  }
  static Value of(bool boolean) {
    Value value;
    value.type = Type::boolean;
    value.integer = boolean;
    return value;
  }
  static Value none() {
    Value value;
    value.type = Type::none;
    return value;
  }
  static Value of(List items) {
    Value value;
    value.type = Type::list;
    for (const Value& item : items) value.depth = std::max(value.depth, item.depth + 1);
    value.list = std::make_shared<const List>(std::move(items));
    return value;
  }
  static Value of(Members entries, Type type = Type::dict) {
    Value value;
    value.type = type;
    for (const auto& [name, item] : entries) value.depth = std::max(value.depth, item.depth + 1);
    value.members = std::make_shared<Members>(std::move(entries));
    return value;
  }

  bool is(Type wanted) const { return type == wanted; }
  bool is_number() const { return type == Type::integer || type == Type::boolean; }
  bool truthy() const {
    switch (type) {
      case Type::undefined:
      case Type::none: return false;
      case Type::boolean:
      case Type::integer: return integer != 0;
      case Type::text: return !text.empty();
      case Type::list: return !list->empty();
      case Type::dict: return !members->empty();
      case Type::space:
      case Type::macro: return true;
    }
    return false;
  }
};

// Spends the values and bytes that are compared; false when the budget does not last.
bool equal(const Value& a, const Value& b, Budget& budget);

// Memory that a copy of the items takes, what they share not counted.
int64_t bytes_of(const List& items);

// Position of the first `part` in a text, npos when there is none; in linear time.
size_t find_text(std::string_view text, std::string_view part);

// Byte offsets of the code points of a text, and its end.
std::vector<size_t> boundaries(std::string_view text);

// Python's strip() on both sides.
std::string trimmed(std::string_view text);

// The methods strip, lstrip, rstrip, startswith, endswith, split and replace; none when the name or
// the arguments are others. May exceed the bounds by one replacement or item: the caller checks
// them.
std::optional<Value> call_text_method(const std::string& text, std::string_view name,
                                      const List& arguments);

// The tests without arguments; none when the name is another.
std::optional<bool> passes_test(const Value& value, std::string_view name);

// + - * // % as Python has them for integers; none when there is no result of 64 bits.
std::optional<int64_t> arithmetic(std::string_view op, int64_t a, int64_t b);

}  // namespace orrery::jinja
