// The fields of one configuration, each either read, known to have no effect, or refused by name:
// a key that nobody asked for would otherwise change a model in silence.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace orrery {

class ConfigReader {
 public:
  // `object` outlives the reader. Throws Error{corrupt} when it is no JSON object.
  explicit ConfigReader(const Json& object);

  // The value of `key`, null when it is absent or null. Marks the key as read.
  const Json* find(std::string_view key);
  // As Json::at().
  const Json& at(std::string_view key);
  // Fields keep their value when the key is absent or null; Error{corrupt} names a wrong type or a
  // number outside [least, most].
  void read(std::string_view key, bool& field);
  void read(std::string_view key, double& field);
  void read(std::string_view key, int64_t& field, int64_t least, int64_t most);
  // Marks keys that do not change a result, whatever they hold.
  void harmless(std::initializer_list<std::string_view> keys);
  // Throws Error{unsupported} with every key that is still unmarked and says something: null,
  // false, 0, "", "none", {} and lists of these switch nothing on, and a leading underscore marks
  // notes of the program that wrote the file. `reader` names who would have to obey: "this engine's
  // VAE".
  void refuse_rest(std::string_view reader) const;

  std::string where() const { return object_.where(); }

 private:
  const Json& object_;
  std::vector<std::string_view> marked_;
};

}  // namespace orrery
