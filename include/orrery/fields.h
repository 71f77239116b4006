// What can be said of a request, of an engine and of a program's other options: a row a field.
// Flags, help, JSON, reports, checks and reference pages are made from these rows.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "orrery/engine.h"
#include "orrery/export.h"
#include "orrery/request.h"

namespace orrery {
class Json;  // src/base/json.h; not exported
}

namespace ORRERY_API orrery {

enum class FieldType : uint8_t {
  text,
  file,      // a path
  integer,   // decimal
  number,    // decimal
  mark,      // a flag that stands alone; true or false in JSON
  on_off,    // on or off; true or false in JSON
  choice,    // one of `choices`
  integers,  // with commas between; a list in JSON
  interval,  // two numbers, both ends included
  texts,     // may be given several times; a list in JSON
  hint_files,
  hint_numbers,  // HINT=VALUE, may be given several times; an object in JSON
  adapters,      // FILE or FILE:SCALE, may be given several times; a list in JSON
};

struct FieldInfo {
  std::string_view name;       // in JSON; the flag is the same with dashes
  std::string_view group;      // heading in help and reference
  std::string_view help;       // what it is, a phrase
  std::string_view otherwise;  // what it is when it is not given, in words
  std::string_view unit = {};
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  std::string_view needs = {};    // it means nothing unless one of these fields is given
  std::string_view aliases = {};  // names of other entry points for it in JSON
  // Further flags, and first the one that takes the name's place, if any: "--scheduler", "-n". One
  // after an exclamation mark sets a mark to false.
  std::string_view flags = {};
  bool renamed = false;    // the first of `flags` takes the place of the name's own
  bool essential = false;  // in the short help
  // Of the member that the row describes.
  FieldType type = FieldType::text;
  std::vector<std::string_view> choices = {};
};

// In the order of the help.
const std::vector<FieldInfo>& request_fields();
const std::vector<FieldInfo>& engine_fields();
const FieldInfo* find_field(const std::vector<FieldInfo>& fields, std::string_view name);
// "--num-frames".
std::string flag_of(const FieldInfo& field);
// "1 to 5000", "auto, fp32 or bf16", or empty.
std::string legal_values(const FieldInfo& field);
// The known word nearest to `given`: one that it is a part of, or that differs in few letters;
// empty when none is near.
std::string nearest_word(std::string_view given, const std::vector<std::string>& known);

// Fields as they were written in flags or files, before anything is read or checked against a
// checkpoint. Each value knows who gave it.
class Draft {
 public:
  struct Value {
    std::shared_ptr<const Json> json;
    std::string from;      // "--seed" or "request.json: seed", the subject of messages
    bool repeats = false;  // a value of a run that is to be repeated: its files must be the same
  };

  // The words of a flag as typed. Given twice, the last counts; of fields that may be given several
  // times all count. Throws Error{invalid_argument} for words that are no value of the field.
  void set(const FieldInfo& field, const std::vector<std::string>& words, const std::string& from);
  void set(std::string_view name, const Json& value, const std::string& from);
  bool has(std::string_view name) const { return values_.contains(std::string(name)); }
  const Value* find(std::string_view name) const;
  std::string text(std::string_view name) const;  // of a text or file; empty when not given
  int64_t integer(std::string_view name) const;   // 0 when not given
  std::vector<std::string> texts(std::string_view name) const;
  std::vector<int64_t> integers(std::string_view name) const;
  void erase(std::string_view name) { values_.erase(std::string(name)); }
  const std::map<std::string, Value>& values() const { return values_; }

  // Takes what is not given yet. Returns a sentence for each value of `other` that stays unused
  // because another one was given.
  std::vector<std::string> fill_from(const Draft& other);

  void mark_repeated() {
    for (auto& [name, value] : values_) value.repeats = true;
  }

  // Digests that inputs must have, by path.
  std::map<std::string, std::string> inputs;
  // Folder that the paths of a file start from, by the name of a field.
  std::map<std::string, std::string> folders;

 private:
  std::map<std::string, Value> values_;
};

// The requests of a file's text: a prompt, one JSON request, a list of them, or a request a line.
// By content: JSON when it parses as such. A UTF-8 or UTF-16 byte order mark is heeded. `file`
// names the text in messages; paths in it start from the file's folder.
std::vector<Draft> parse_requests(std::string_view text, const std::filesystem::path& file);
// The same of a file; "-" is standard input.
std::vector<Draft> read_requests(const std::filesystem::path& file);
// What made a report, a video or a picture of ours.
Draft read_run(const std::filesystem::path& file);

// Reads the files that the draft names. Refuses values out of range and fields of another mode.
Request request_of(const Draft& draft);
EngineOptions engine_options_of(const Draft& draft);
// As a prompt file takes it; media by their paths.
std::string to_json(const Request& request);

}  // namespace orrery
