// The files that one run writes: opened before weights are read, written at its end.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "commands.h"
#include "orrery/media.h"
#include "orrery/output.h"

namespace orrery::cli {

// What a run reads: the files that flags name, and the model's.
void claim_inputs(FileClaims& claims, const Draft& draft, const Request& request,
                  const EngineOptions& options);

class Outputs {
 public:
  // Refuses outputs of results that the request does not have, and files that cannot be written.
  Outputs(const Draft& draft, const Request& request, const EngineOptions& options,
          const Outline& outline);

  // Writes every file; one that fails does not keep the others from being written. Then one Error
  // names those that failed and those that were written.
  void save(const Result& result);
  // A line each: the video or picture, then the actions.
  void print_names() const;

 private:
  struct Output {
    std::string role;  // as in the report: "output", "latents", "sound", "action", "report"
    OutputFile file;
    std::function<std::vector<uint8_t>(const Result&)> encode;
  };
  // `from`: the flag or field that names the file.
  void open(const std::string& role, const std::string& from, const std::filesystem::path& file,
            std::function<std::vector<uint8_t>(const Result&)> encode);

  FileClaims claims_;
  std::vector<Output> outputs_;
  std::map<std::string, std::string> names_;  // of the files by role, for the report
};

}  // namespace orrery::cli
