#include "attention/config_fields.h"

#include <algorithm>
#include <cmath>

namespace orrery {

std::string shown(const Json& value) {
  constexpr size_t kShown = 60;
  std::string text = value.dump();
  if (text.size() > kShown) text = text.substr(0, kShown) + "...";
  return text;
}

void expect_object(const Json& value, std::string_view what,
                   std::initializer_list<std::string_view> keys) {
  if (!value.is_object()) refuse(value, "expected ", what, " as an object");
  for (const auto& [key, member] : value.members()) {
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
    std::string known;
    for (std::string_view k : keys) known += concat(known.empty() ? "" : ", ", k);
    fail(ErrorKind::invalid_argument, value.where(), ": unknown key \"", key, "\"; ", what,
         " takes ", known);
  }
}

const std::string& expect_name(const Json& value, std::string_view what) {
  if (!value.is_string() || value.as_string().empty()) {
    refuse(value, "expected ", what, " as a text that is not empty");
  }
  return value.as_string();
}

int64_t expect_integer(const Json& value, std::string_view what, int64_t low, int64_t high) {
  if (!value.is_integer() || value.as_int() < low || value.as_int() > high) {
    refuse(value, "expected ", what, " as an integer from ", low, " to ", high);
  }
  return value.as_int();
}

double expect_number(const Json& value, std::string_view what) {
  if (!value.is_number() || !std::isfinite(value.as_double())) {
    refuse(value, "expected ", what, " as a finite number");
  }
  return value.as_double();
}

const Json& expect_member(const Json& object, std::string_view key) {
  const Json* member = object.find(key);
  require(member != nullptr, object.where(), ": the key \"", key, "\" is missing");
  return *member;
}

}  // namespace orrery
