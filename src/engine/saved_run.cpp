// A request from what it made: a report, or the settings that a picture or video carries.
#include <algorithm>
#include <fstream>

#include "engine/request_fields.h"
#include "io/embedded_text.h"

namespace orrery {

namespace {

// The settings object of report.cpp.
Json settings_of(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  require(in.good(), ErrorKind::not_found, file.string(), ": cannot open the file");
  char first = 0;
  in >> first;
  if (first == '{') {
    const Json report = Json::load(file);
    const Json* settings = report.find("settings");
    require(settings != nullptr, file.string(),
            ": this JSON is no report of a run: it has no settings");
    return *settings;
  }
  const std::string text = read_embedded_text(file, "comment");
  require(text.starts_with('{'), file.string(), ": the file does not say how it was made");
  return Json::parse(text, file.string());
}

}  // namespace

Draft read_run(const std::filesystem::path& file) {
  const Json settings = settings_of(file);
  const std::string origin = file.string();
  const Json *given = settings.find("given"), *engine = settings.find("engine");
  require(given != nullptr && engine != nullptr, origin,
          ": made by an older build, whose settings do not say what was given");
  Draft draft;
  for (const Json& item : given->items()) {
    const std::string& name = item.as_string();
    const FieldInfo* field = find_field(request_fields(), name);
    require(field != nullptr, origin, ": ", name, " is no field of this build");
    const Json& value = settings.at(name);
    require(field->type != FieldType::file || value.is_string(), origin, ": ", name,
            " was given in memory; give it as a file with ", flag_of(*field));
    draft.set(name, value, origin + ": " + name);
  }
  for (const auto& [name, value] : engine->members()) {
    require(name == "model" || find_field(engine_fields(), name) != nullptr, origin, ": engine.",
            name, " is no option of this build");
    draft.set(name, value, origin + ": " + name);
  }
  for (const auto& [path, digest] : settings.at("inputs").members())
    draft.inputs[path] = digest.as_string();
  draft.mark_repeated();
  return draft;
}

}  // namespace orrery
