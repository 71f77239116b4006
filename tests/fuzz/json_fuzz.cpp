// Any bytes: parsing refuses with an Error or gives a value that is written and read back the same.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/json.h"

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

// Every value can say where it stands.
void visit(const orrery::Json& value) {
  check(value.where().starts_with("fuzz"));
  if (value.is_array()) {
    for (const orrery::Json& item : value.items()) visit(item);
  } else if (value.is_object()) {
    for (const auto& [key, member] : value.members()) {
      check(orrery::is_utf8(key));
      visit(member);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  orrery::Json value;
  try {
    value = orrery::Json::parse(text, "fuzz");
  } catch (const orrery::Error& error) {
    check(error.kind() == orrery::ErrorKind::corrupt);
    return 0;
  }
  visit(value);
  const std::string written = value.dump();
  check(orrery::is_utf8(written));
  check(orrery::Json::parse(written, "written").dump() == written);
  check(orrery::Json::parse(value.dump(2), "written").dump() == written);
  return 0;
}
