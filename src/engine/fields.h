// The machinery of field tables: a row is a FieldInfo and the member it describes. Values travel as
// JSON, whatever they were written in.
#pragma once

#include <cmath>
#include <concepts>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "orrery/fields.h"

namespace orrery {

// Throws Error{invalid_argument} unless `value` has the field's type and lies within its limits.
// `subject` begins the message.
void check_value(const FieldInfo& field, const Json& value, const std::string& subject);

// A row of the table of S.
template <typename S>
struct Field : FieldInfo {
  std::function<void(S&, const Json&)> read;  // of a checked value
  std::function<Json(const S&)> write;        // null: not set
};

// --- values and JSON ---

template <typename T>
struct FieldCodec;

template <std::integral T>
struct FieldCodec<T> {
  static constexpr FieldType kType = FieldType::integer;
  static T read(const Json& json) { return static_cast<T>(json.as_int()); }
  static Json write(T value) { return Json(static_cast<int64_t>(value)); }
};
template <>
struct FieldCodec<double> {
  static constexpr FieldType kType = FieldType::number;
  static double read(const Json& json) { return json.as_double(); }
  static Json write(double value) { return Json(value); }
};
template <>
struct FieldCodec<bool> {
  static constexpr FieldType kType = FieldType::mark;
  static bool read(const Json& json) { return json.as_bool(); }
  static Json write(bool value) { return Json(value); }
};
template <>
struct FieldCodec<std::string> {
  static constexpr FieldType kType = FieldType::text;
  static std::string read(const Json& json) { return json.as_string(); }
  static Json write(const std::string& value) { return Json(value); }
};
template <>
struct FieldCodec<std::filesystem::path> {
  static constexpr FieldType kType = FieldType::file;
  static std::filesystem::path read(const Json& json) { return json.as_string(); }
  static Json write(const std::filesystem::path& value) { return Json(value.string()); }
};
template <Choice E>
struct FieldCodec<E> {
  static constexpr FieldType kType = FieldType::choice;
  static E read(const Json& json) { return value_named<E>(json.as_string()).value(); }
  static Json write(E value) { return Json(std::string(name_of(value))); }
};
template <>
struct FieldCodec<std::vector<int64_t>> {
  static constexpr FieldType kType = FieldType::integers;
  static std::vector<int64_t> read(const Json& json) {
    std::vector<int64_t> values;
    for (const Json& item : json.items()) values.push_back(item.as_int());
    return values;
  }
  static Json write(const std::vector<int64_t>& values) {
    Json list = Json::array();
    for (int64_t value : values) list.push(value);
    return list;
  }
};
template <>
struct FieldCodec<TimestepInterval> {
  static constexpr FieldType kType = FieldType::interval;
  static TimestepInterval read(const Json& json) {
    return {json.at(size_t{0}).as_double(), json.at(size_t{1}).as_double()};
  }
  static Json write(const TimestepInterval& value) {
    return Json::array({Json(value.begin), Json(value.end)});
  }
};
template <typename T>
struct FieldCodec<std::optional<T>> {
  static constexpr FieldType kType =
      std::is_same_v<T, bool> ? FieldType::on_off : FieldCodec<T>::kType;
  static std::optional<T> read(const Json& json) { return FieldCodec<T>::read(json); }
  static Json write(const std::optional<T>& value) {
    return value ? FieldCodec<T>::write(*value) : Json();
  }
};

// --- rows ---

template <Choice E>
std::vector<std::string_view> choices_of() {
  std::vector<std::string_view> list;
  for (const Name<E>& row : names(E{})) list.push_back(row.name);
  return list;
}
template <typename T>
struct Plain {
  using type = T;
};
template <typename T>
struct Plain<std::optional<T>> {
  using type = T;
};

// The row of a member.
template <typename S, typename T>
Field<S> field(T S::*member, FieldInfo info) {
  info.type = FieldCodec<T>::kType;
  using Value = typename Plain<T>::type;
  if constexpr (Choice<Value>) info.choices = choices_of<Value>();
  return {std::move(info),
          [member](S& to, const Json& json) { to.*member = FieldCodec<T>::read(json); },
          [member](const S& from) { return FieldCodec<T>::write(from.*member); }};
}

// The row of a part's field as one of the whole; reading it makes the part.
template <typename S, typename P>
Field<S> field_of_part(std::optional<P> S::*part, const Field<P>& row) {
  return {static_cast<const FieldInfo&>(row),
          [part, row](S& to, const Json& json) {
            if (!(to.*part)) (to.*part).emplace();
            row.read(*(to.*part), json);
          },
          [part, row](const S& from) { return from.*part ? row.write(*(from.*part)) : Json(); }};
}

template <typename S>
std::vector<FieldInfo> infos_of(const std::vector<Field<S>>& fields) {
  return {fields.begin(), fields.end()};
}

// Refuses members out of their limits, by name.
template <typename S>
void check_fields(const std::vector<Field<S>>& fields, const S& values) {
  for (const Field<S>& row : fields) {
    const Json json = row.write(values);
    if (!json.is_null()) check_value(row, json, std::string(row.name));
  }
}

// --- counting members ---

struct AnyMember {
  template <typename T>
  operator T&() const&;
  template <typename T>
  operator T&&() const&&;
};
template <typename S, typename... Given>
consteval int member_count() {
  if constexpr (requires { S{std::declval<Given>()..., std::declval<AnyMember>()}; })
    return member_count<S, Given..., AnyMember>();
  else
    return static_cast<int>(sizeof...(Given));
}

}  // namespace orrery
