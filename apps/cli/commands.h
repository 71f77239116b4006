// The commands of the program. Flags, help, man page and completions are made from one description
// of each (command_table()).
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "orrery/fields.h"
#include "orrery/job.h"

namespace orrery::cli {

// What a command was called with.
struct Call {
  Draft flags;
  Job& job;
  std::string line;  // the whole command line
};

struct Command {
  std::string_view name;
  std::string_view summary;
  std::string_view example;
  std::vector<FieldInfo> fields;              // in the order of the help
  std::vector<std::string_view> positionals;  // names of fields that need no flag
  std::function<int(const Call&)> run;        // the process's exit status, or throws Error
  bool hidden = false;
  bool runs_on_ranks = false;
};
const std::vector<Command>& command_table();

int generate(const Call& call);
int compare(const Call& call);
int plan(const Call& call);
int inspect(const Call& call);
int tokenize(const Call& call);
int make_checkpoint(const Call& call);
int bench(const Call& call);
int reference(const Call& call);

// Fields that name files rather than settings.
const std::vector<FieldInfo>& file_fields();
// Those of make-checkpoint.
const std::vector<FieldInfo>& checkpoint_fields();

// The flags, and what they leave open from --from and --prompt-file. `note` gets a sentence for
// each value of a file that a flag replaces.
Draft completed(const Draft& flags, const std::function<void(const std::string&)>& note);
std::filesystem::path model_of(const Draft& draft);

// What `orrery COMMAND --help` prints, `width` columns wide; only the essential flags when `brief`.
std::string help_of(const Command& command, size_t width, bool brief);
// The general help.
std::string help_of_all(size_t width);

// 0 ok, 2 a request or file that must be mended, 3 blocked by the guardrail, 4 no verdict of the
// guardrail, 130 interrupted, 1 anything else. docs/modes.md lists them.
int exit_status(ErrorKind kind);

}  // namespace orrery::cli
