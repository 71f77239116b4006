// The one table of a request's fields, and that of an engine's.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "engine/fields.h"

namespace orrery {

const std::vector<Field<Request>>& request_table();
const std::vector<Field<EngineOptions>>& engine_table();

// What a file is read from: {"open", "path", "sha256"}; the value that rows of files read. "limits"
// (ClipLimits), where there are any, say what of a clip can matter.
Json file_to_read(const std::filesystem::path& open, const std::string& path);

// Every field that is set, by name. Media by path; those made in memory as {"frames"} or
// {"values"}.
Json fields_json(const Request& request);
Json fields_json(const EngineOptions& options);
// Names of the fields that differ from those of an untouched request.
std::vector<std::string> given_fields(const Request& request);
// {path: SHA-256} of the files that the request was read from.
Json inputs_json(const Request& request);

}  // namespace orrery
