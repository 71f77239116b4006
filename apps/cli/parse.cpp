#include "parse.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>

#include "orrery/version.h"

namespace orrery::cli {

namespace {

[[noreturn]] void refuse(const std::string& sentence) {
  throw Error(ErrorKind::invalid_argument, sentence);
}

size_t terminal_width() {
  constexpr size_t kUsual = 100, kLeast = 40;
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kUsual;
  return std::max<size_t>(kLeast, size.ws_col);
}

const Command* find_command(std::string_view name) {
  for (const Command& command : command_table()) {
    if (command.name == name) return &command;
  }
  return nullptr;
}

// CLI11's spelling of the row: "model,--model,-m", "--graphs,!--no-graphs".
std::string spelling(const Command& command, const FieldInfo& field) {
  std::string names = field.renamed ? "" : flag_of(field);
  if (!field.flags.empty()) names += (names.empty() ? "" : ",") + std::string(field.flags);
  const auto& places = command.positionals;
  if (std::find(places.begin(), places.end(), field.name) != places.end())
    names = std::string(field.name) + "," + names;
  return names;
}

CLI::Option* add(CLI::App& app, const Command& command, const FieldInfo& field) {
  const std::string names = spelling(command, field);
  if (field.type == FieldType::mark)
    return app.add_flag(names)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  CLI::Option* option = app.add_option(names);
  switch (field.type) {
    case FieldType::texts:
    case FieldType::adapters:
    case FieldType::hint_files:
    case FieldType::hint_numbers: option->expected(1)->take_all(); break;
    case FieldType::integers:
      option->expected(1, CLI::detail::expected_max_vector_size)->allow_extra_args()->take_all();
      break;
    case FieldType::interval:
      option->expected(2)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
      break;
    default: option->expected(1)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  }
  if (field.name == "attention" && field.type == FieldType::text)
    option->envname("ORRERY_ATTENTION");
  return option;
}

std::vector<std::string> flags_of(const Command& command) {
  std::vector<std::string> flags;
  for (const FieldInfo& field : command.fields) {
    std::string rest = spelling(command, field);
    for (size_t at; !rest.empty(); rest.erase(0, at == std::string::npos ? at : at + 1)) {
      at = rest.find(',');
      std::string flag = rest.substr(0, at);
      if (flag.starts_with("!")) flag.erase(0, 1);
      if (flag.starts_with("--")) flags.push_back(flag.substr(2));
    }
  }
  return flags;
}

std::string unknown_words(const Command& command, const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) {
    if (!word.starts_with("-")) continue;
    if (!text.empty()) text += "; ";
    const std::string flag = word.substr(0, word.find('='));
    text += flag + " is not known";
    const std::string near =
        nearest_word(std::string_view(flag).substr(flag.find_first_not_of('-')), flags_of(command));
    if (!near.empty()) text += "; did you mean --" + near + "?";
  }
  if (text.empty()) text = "\"" + words.front() + "\" is one word too many";
  return text + (text.ends_with('?') ? " orrery " : "; orrery ") + std::string(command.name) +
         " --help lists the flags";
}

const Command& command_named(const std::string& name) {
  if (const Command* command = find_command(name)) return *command;
  std::vector<std::string> names;
  for (const Command& command : command_table()) {
    if (!command.hidden) names.emplace_back(command.name);
  }
  const std::string near = nearest_word(name, names);
  refuse("the command " + name + " is not known" +
         (near.empty() ? "; orrery --help lists the commands" : "; did you mean " + near + "?"));
}

// Words that ask for text and not for work.
bool answers(const std::vector<std::string>& words, Answer& answer) {
  const auto is = [&](size_t i, std::initializer_list<const char*> these) {
    return i < words.size() && std::find(these.begin(), these.end(), words[i]) != these.end();
  };
  const size_t width = terminal_width();
  if (is(0, {"--version", "version"})) {
    answer.text = "orrery " + build_description() + "\n";
  } else if (is(0, {"help", "--help", "-h"})) {
    answer.text =
        words.size() > 1 ? help_of(command_named(words[1]), width, false) : help_of_all(width);
  } else {
    for (size_t i = 1; i < words.size() && words[i] != "--"; ++i) {
      if (is(i, {"--help", "--help-all", "-h"}))
        answer.text = help_of(command_named(words[0]), width, words[i] == "-h");
    }
  }
  return !answer.text.empty();
}

}  // namespace

const Command& parse(int argc, const char* const* argv, Draft& flags, Answer& answer) {
  std::vector<std::string> words(argv + 1, argv + argc);
  if (words.empty()) refuse("a command is needed, as in orrery generate; orrery --help lists them");
  if (answers(words, answer)) return command_table().front();
  const Command& command = command_named(words.front());

  CLI::App app;
  app.set_help_flag();
  app.allow_extras();
  std::vector<std::pair<const FieldInfo*, CLI::Option*>> options;
  for (const FieldInfo& field : command.fields)
    options.emplace_back(&field, add(app, command, field));
  words.erase(words.begin());
  std::reverse(words.begin(), words.end());  // as CLI11 takes them
  try {
    app.parse(words);
  } catch (const CLI::ParseError& error) {
    if (!app.remaining().empty()) refuse(unknown_words(command, app.remaining()));
    refuse(error.what());
  }
  if (!app.remaining().empty()) refuse(unknown_words(command, app.remaining()));
  for (const auto& [field, option] : options) {
    if (option->count() > 0) flags.set(*field, option->results(), flag_of(*field));
  }
  return command;
}

}  // namespace orrery::cli
