#include "bench/mesh_case.h"

#include <algorithm>
#include <sstream>

#include "base/error.h"
#include "engine/ranks.h"

namespace orrery {

namespace {

// "tp2cp2", "cp2@4096".
MeshCase parse_mesh(const std::string& text) {
  MeshCase result;
  size_t at = 0;
  // Takes the digits at `at`; 0 when there are none or too many.
  const auto number = [&] {
    const size_t end = std::min(text.find_first_not_of("0123456789", at), text.size());
    const std::string digits = text.substr(at, end - at);
    at = end;
    return digits.empty() || digits.size() > 9 ? 0 : std::stoi(digits);
  };
  bool known = !text.empty();
  while (known && at < text.size()) {
    const size_t begin = at;
    at = std::min(text.find_first_of("0123456789", at), text.size());
    const std::string axis = text.substr(begin, at - begin);
    const int degree = number();
    known = degree > 0;
    if (axis == "tp")
      result.mesh.tp = degree;
    else if (axis == "cp")
      result.mesh.cp = degree;
    else if (axis == "cfg")
      result.mesh.cfg = degree;
    else if (axis == "@")
      result.part_rows = degree;
    else
      known = false;
  }
  require(known && result.mesh.world() > 1, "bench: mesh \"", text,
          "\" is not known; it names axes and degrees, as in cp2, tp2cp2 or cp2@4096");
  return result;
}
}  // namespace

std::string MeshCase::name() const {
  std::string text;
  for (const auto& [axis, degree] :
       {std::pair{"tp", mesh.tp}, {"cp", mesh.cp}, {"cfg", mesh.cfg}}) {
    if (degree > 1) text += concat(text.empty() ? "" : " x ", axis, " ", degree);
  }
  return part_rows > 0 ? concat(text, ", parts of ", part_rows, " rows") : text;
}

std::vector<MeshCase> meshes_of(const BenchOptions& options, const EngineOptions& engine) {
  std::vector<MeshCase> meshes;
  std::stringstream list(options.meshes);
  for (std::string item; std::getline(list, item, ',');) meshes.push_back(parse_mesh(item));
  if (meshes.empty() && mesh_of(engine).world() > 1) meshes.push_back({mesh_of(engine)});
  return meshes;
}
}  // namespace orrery
