#include "base/config_reader.h"

#include <algorithm>

#include "base/error.h"

namespace orrery {

namespace {

bool switches_nothing_on(const Json& value) {
  switch (value.kind()) {
    case Json::Kind::null: return true;
    case Json::Kind::boolean: return !value.as_bool();
    case Json::Kind::integer: return value.as_int() == 0;
    case Json::Kind::number: return value.as_double() == 0;
    case Json::Kind::string: return value.as_string().empty() || value.as_string() == "none";
    case Json::Kind::array:
      return std::all_of(value.items().begin(), value.items().end(), switches_nothing_on);
    case Json::Kind::object: return value.members().empty();
  }
  return false;
}

}  // namespace

ConfigReader::ConfigReader(const Json& object) : object_(object) { object.members(); }

const Json* ConfigReader::find(std::string_view key) {
  marked_.push_back(key);
  const Json* value = object_.find(key);
  return value != nullptr && !value->is_null() ? value : nullptr;
}

const Json& ConfigReader::at(std::string_view key) {
  marked_.push_back(key);
  return object_.at(key);
}

void ConfigReader::read(std::string_view key, bool& field) {
  if (const Json* value = find(key)) field = value->as_bool();
}

void ConfigReader::read(std::string_view key, double& field) {
  if (const Json* value = find(key)) field = value->as_double();
}

void ConfigReader::read(std::string_view key, int64_t& field, int64_t least, int64_t most) {
  const Json* value = find(key);
  if (value == nullptr) return;
  field = value->as_int();
  require(field >= least && field <= most, ErrorKind::corrupt, where(), ": ", key, " is ", field,
          ", expected ", least, " to ", most);
}

void ConfigReader::harmless(std::initializer_list<std::string_view> keys) {
  marked_.insert(marked_.end(), keys);
}

void ConfigReader::refuse_rest(std::string_view reader) const {
  constexpr size_t kShown = 20, kLongest = 80;
  std::string names;
  size_t count = 0;
  for (const auto& [key, value] : object_.members()) {
    if (std::find(marked_.begin(), marked_.end(), key) != marked_.end()) continue;
    if (key.starts_with('_') || switches_nothing_on(value) || ++count > kShown) continue;
    names += concat(count > 1 ? ", " : "", key.substr(0, kLongest));
  }
  if (count > kShown) names += concat(" and ", count - kShown, " more");
  require(count == 0, ErrorKind::unsupported, where(), ": ", reader, " cannot obey ", names);
}

}  // namespace orrery
