#include "text/jinja_value.h"

#include <cstring>
#include <set>

#include "text/utf8.h"

namespace orrery::jinja {

using Type = Value::Type;

bool equal(const Value& a, const Value& b, Budget& budget) {
  const size_t text = std::min(a.text.size(), b.text.size());
  if (!budget.spend(0, static_cast<int64_t>(sizeof(Value) + text))) return false;
  if (a.is_number() && b.is_number()) return a.integer == b.integer;
  if (a.type != b.type) return false;
  switch (a.type) {
    case Type::text: return a.text == b.text;
    case Type::list:
      return std::equal(a.list->begin(), a.list->end(), b.list->begin(), b.list->end(),
                        [&](const Value& x, const Value& y) { return equal(x, y, budget); });
    case Type::dict:
      return std::equal(a.members->begin(), a.members->end(), b.members->begin(), b.members->end(),
                        [&](const auto& x, const auto& y) {
                          return x.first == y.first && equal(x.second, y.second, budget);
                        });
    case Type::space: return a.members == b.members;
    case Type::macro: return a.macro == b.macro;
    default: return true;
  }
}

int64_t bytes_of(const List& items) {
  size_t bytes = items.size() * sizeof(Value);
  for (const Value& item : items) bytes += item.text.size();
  return static_cast<int64_t>(bytes);
}

size_t find_text(std::string_view text, std::string_view part) {
  const void* at = memmem(text.data(), text.size(), part.data(), part.size());
  return at == nullptr ? std::string_view::npos
                       : static_cast<size_t>(static_cast<const char*>(at) - text.data());
}

std::vector<size_t> boundaries(std::string_view text) {
  std::vector<size_t> at{0};
  for (size_t i = 0; i < text.size();) {
    next_code_point(text, i);
    at.push_back(i);
  }
  return at;
}

namespace {

// Without a set, of white space.
std::string stripped(std::string_view text, const std::string* set, bool front, bool back) {
  if (set == nullptr) {
    if (front) text = strip_front(text);
    if (back) text = strip_back(text);
    return std::string(text);
  }
  std::set<char32_t> characters;
  for (size_t i = 0; i < set->size();) characters.insert(next_code_point(*set, i));
  const std::vector<size_t> at = boundaries(text);
  size_t first = 0;
  size_t last = at.size() - 1;
  const auto listed = [&](size_t i) {
    size_t position = at[i];
    return characters.count(next_code_point(text, position)) > 0;
  };
  while (front && first < last && listed(first)) ++first;
  while (back && first < last && listed(last - 1)) --last;
  return std::string(text.substr(at[first], at[last] - at[first]));
}

Value split(std::string_view text, std::string_view by) {
  List parts;
  for (size_t found = find_text(text, by);
       found != std::string_view::npos && parts.size() <= kMaxItems; found = find_text(text, by)) {
    parts.push_back(Value::of(std::string(text.substr(0, found))));
    text.remove_prefix(found + by.size());
  }
  parts.push_back(Value::of(std::string(text)));
  return Value::of(std::move(parts));
}

Value replace(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  for (size_t found = find_text(text, from);
       found != std::string_view::npos && out.size() <= kMaxTextBytes;
       found = find_text(text, from)) {
    (out += text.substr(0, found)) += to;
    text.remove_prefix(found + from.size());
  }
  out += text;
  return Value::of(std::move(out));
}

}  // namespace

std::string trimmed(std::string_view text) { return stripped(text, nullptr, true, true); }

std::optional<Value> call_text_method(const std::string& text, std::string_view name,
                                      const List& arguments) {
  const bool texts = std::all_of(arguments.begin(), arguments.end(),
                                 [](const Value& argument) { return argument.is(Type::text); });
  if (!texts) return std::nullopt;
  const size_t given = arguments.size();
  const std::string* first = given > 0 ? &arguments[0].text : nullptr;
  if (given <= 1) {
    if (name == "strip") return Value::of(stripped(text, first, true, true));
    if (name == "lstrip") return Value::of(stripped(text, first, true, false));
    if (name == "rstrip") return Value::of(stripped(text, first, false, true));
  }
  if (given == 1) {
    if (name == "startswith") return Value::of(text.starts_with(*first));
    if (name == "endswith") return Value::of(text.ends_with(*first));
    if (name == "split" && !first->empty()) return split(text, *first);
  }
  if (given == 2 && name == "replace" && !first->empty()) {
    return replace(text, *first, arguments[1].text);
  }
  return std::nullopt;
}

std::optional<bool> passes_test(const Value& value, std::string_view name) {
  if (name == "defined") return !value.is(Type::undefined);
  if (name == "undefined") return value.is(Type::undefined);
  if (name == "none") return value.is(Type::none);
  if (name == "string") return value.is(Type::text);
  if (name == "mapping") return value.is(Type::dict);
  if (name == "iterable" || name == "sequence") {
    return value.is(Type::text) || value.is(Type::list) || value.is(Type::dict) ||
           value.is(Type::undefined);
  }
  if (name == "true") return value.is(Type::boolean) && value.integer != 0;
  if (name == "false") return value.is(Type::boolean) && value.integer == 0;
  if (name == "boolean") return value.is(Type::boolean);
  if (name == "integer") return value.is(Type::integer);
  if (name == "number") return value.is_number();
  return std::nullopt;
}

std::optional<int64_t> arithmetic(std::string_view op, int64_t a, int64_t b) {
  int64_t result = 0;
  if (op == "+")
    return __builtin_add_overflow(a, b, &result) ? std::nullopt : std::optional(result);
  if (op == "-")
    return __builtin_sub_overflow(a, b, &result) ? std::nullopt : std::optional(result);
  if (op == "*")
    return __builtin_mul_overflow(a, b, &result) ? std::nullopt : std::optional(result);
  if (b == 0 || (b == -1 && a == INT64_MIN)) return std::nullopt;
  const int64_t rest = a % b;
  const bool adjust = rest != 0 && (rest < 0) != (b < 0);  // Python rounds towards minus infinity
  if (op == "%") return rest + (adjust ? b : 0);
  return a / b - (adjust ? 1 : 0);
}

}  // namespace orrery::jinja
