// Help, man page, reference page and completions, all made from the tables of fields.
#include <algorithm>
#include <cstdio>
#include <sstream>

#include "commands.h"
#include "orrery/version.h"

namespace orrery::cli {

namespace {

std::string words_to_lines(const std::string& text, size_t indent, size_t width) {
  std::string out;
  size_t column = width;  // the first word begins a line
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (column + 1 + word.size() > width) {
      out += (out.empty() ? "" : "\n") + std::string(indent, ' ');
      column = indent;
    } else {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
  }
  return out + "\n";
}

// "NUMBER", "FILE"; empty for a flag that stands alone.
std::string value_word(const FieldInfo& field) {
  switch (field.type) {
    case FieldType::mark: return "";
    case FieldType::on_off: return "on|off";
    case FieldType::file: return field.name == "model" || field.name == "out" ? "FOLDER" : "FILE";
    case FieldType::integer: return "N";
    case FieldType::number: return "NUMBER";
    case FieldType::integers: return "N,N,...";
    case FieldType::interval: return "A B";
    case FieldType::hint_files: return "HINT[=FILE]";
    case FieldType::hint_numbers: return "HINT=NUMBER";
    case FieldType::adapters: return "FILE[:SCALE]";
    case FieldType::choice:
    case FieldType::text:
    case FieldType::texts: break;
  }
  return field.type == FieldType::choice ? "NAME" : "TEXT";
}

// Every spelling: "-H", "--height".
std::vector<std::string> spellings(const FieldInfo& field) {
  std::vector<std::string> list;
  if (!field.renamed) list.push_back(flag_of(field));
  std::istringstream flags{std::string(field.flags)};
  for (std::string flag; std::getline(flags, flag, ',');)
    list.push_back(flag.starts_with("!") ? flag.substr(1) : flag);
  return list;
}

std::string heading(const FieldInfo& field) {
  std::string line;
  for (const std::string& flag : spellings(field)) line += (line.empty() ? "" : ", ") + flag;
  const std::string value = value_word(field);
  return line + (value.empty() ? "" : " " + value);
}

// "Frames, 4 n + 1; 1 makes an image [1 to 5000; default 189]".
std::string sentence(const FieldInfo& field) {
  std::string facts = legal_values(field);
  if (!field.unit.empty()) facts += (facts.empty() ? "" : " ") + std::string(field.unit);
  if (!field.otherwise.empty())
    facts += (facts.empty() ? "" : "; ") + ("default " + std::string(field.otherwise));
  return std::string(field.help) + (facts.empty() ? "" : " [" + facts + "]");
}

// The groups in the order of their first field.
std::vector<std::string_view> groups_of(const Command& command) {
  std::vector<std::string_view> groups;
  for (const FieldInfo& field : command.fields) {
    if (std::find(groups.begin(), groups.end(), field.group) == groups.end())
      groups.push_back(field.group);
  }
  return groups;
}

std::string usage_of(const Command& command) {
  std::string line = "orrery " + std::string(command.name);
  for (std::string_view place : command.positionals) line += " [" + std::string(place) + "]";
  return line + " [flags]";
}

// --- the pages ---

std::string escaped_for_man(std::string_view text) {
  std::string out;
  for (char c : text) {
    if (c == '\\' || c == '-') out += '\\';
    if (out.empty() && (c == '.' || c == '\'')) out += "\\&";
    out += c;
  }
  return out;
}

std::string man_page() {
  std::string page =
      ".TH ORRERY 1 \"\" \"orrery " + version() +
      "\"\n.SH NAME\norrery \\- native inference "
      "for NVIDIA Cosmos 3 world models\n.SH SYNOPSIS\n.B orrery\n.I command\n[flags]\n";
  for (const Command& command : command_table()) {
    if (command.hidden) continue;
    page += ".SH \"ORRERY " + std::string(command.name) + "\"\n" +
            escaped_for_man(command.summary) + ".\n";
    for (std::string_view group : groups_of(command)) {
      page += ".SS \"" + std::string(group) + "\"\n";
      for (const FieldInfo& field : command.fields) {
        if (field.group != group) continue;
        page += ".TP\n.B " + escaped_for_man(heading(field)) + "\n" +
                escaped_for_man(sentence(field)) + ".\n";
      }
    }
  }
  return page +
         ".SH \"EXIT STATUS\"\n0 done, 2 a request or file that must be mended, 3 "
         "blocked by the guardrail, 4 no verdict of the guardrail, 130 interrupted, 1 anything "
         "else.\n";
}

std::string cell(std::string_view text) {
  std::string out;
  for (char c : text) out += c == '|' ? std::string("\\|") : std::string(1, c);
  return out;
}

void add_table(std::string& page, const std::vector<FieldInfo>& fields, const char* names) {
  std::string_view group;
  for (const FieldInfo& field : fields) {
    if (field.group != group) {
      group = field.group;
      page +=
          "\n### " + std::string(group) + "\n\n| " + names +
          " | flag | values | unit | default | needs | meaning |\n|---|---|---|---|---|---|---|\n";
    }
    std::string name = "`" + std::string(field.name) + "`";
    std::istringstream aliases{std::string(field.aliases)};
    for (std::string alias; aliases >> alias;) name += ", `" + alias + "`";
    std::string values = legal_values(field);
    if (values.empty()) values = value_word(field).empty() ? "true, false" : value_word(field);
    page += "| " + name + " | `" + cell(heading(field)) + "` | " + cell(values) + " | " +
            std::string(field.unit) + " | " + cell(field.otherwise) + " | " +
            std::string(field.needs) + " | " + cell(field.help) + " |\n";
  }
}

std::string markdown_page() {
  std::string page =
      "# Settings\n\nMade by `orrery reference markdown` from the tables that flags, prompt files, "
      "reports and checks are made from; a test holds it against them.\n\n## A request\n\nThe "
      "first column is the name in prompt files and reports.\n";
  add_table(page, request_fields(), "name");
  page += "\n## The engine\n";
  add_table(page, engine_fields(), "name");
  page += "\n## Files and output of the program\n";
  add_table(page, file_fields(), "field");
  page +=
      "\nPrompt files also take `model_mode` (text2image, text2video, image2video, video2video, "
      "or an action mode),\n`prompt_path` (a prompt file of its own), `name` (of the output in "
      "a folder), `resolution` (256, 480, 704 or 720)\nwith `aspect_ratio` (1,1 4,3 3,4 16,9 "
      "9,16), and `edge`, `blur`, `depth`, `seg` and `wsm`, each `true` or an object\nwith "
      "`control_path`, `control_weight`, `preset_edge_threshold` and `preset_blur_strength`.\n";
  return page;
}

std::string bash_completion() {
  std::string commands, cases;
  for (const Command& command : command_table()) {
    if (command.hidden) continue;
    commands += std::string(command.name) + " ";
    std::string flags;
    for (const FieldInfo& field : command.fields) {
      for (const std::string& flag : spellings(field)) flags += flag + " ";
    }
    cases += "    " + std::string(command.name) + ") flags=\"" + flags + "\" ;;\n";
  }
  std::string choices;
  for (const std::vector<FieldInfo>* fields : {&request_fields(), &engine_fields()}) {
    for (const FieldInfo& field : *fields) {
      if (field.choices.empty()) continue;
      std::string names;
      for (std::string_view name : field.choices) names += std::string(name) + " ";
      choices += "    " + flag_of(field) + ") COMPREPLY=($(compgen -W \"" + names +
                 "\" -- \"$word\")); return ;;\n";
    }
  }
  return "# bash completion of orrery\n_orrery() {\n  local word=${COMP_WORDS[COMP_CWORD]} "
         "before=${COMP_WORDS[COMP_CWORD-1]} flags=\n  if [ \"$COMP_CWORD\" -eq 1 ]; then\n    "
         "COMPREPLY=($(compgen -W \"" +
         commands + "\" -- \"$word\"))\n    return\n  fi\n  case $before in\n" + choices +
         "  esac\n  case ${COMP_WORDS[1]} in\n" + cases +
         "  esac\n  case $word in\n    -*) COMPREPLY=($(compgen -W \"$flags\" -- \"$word\")) ;;\n  "
         "  *) COMPREPLY=($(compgen -f -- \"$word\")) ;;\n  esac\n}\ncomplete -o filenames -F "
         "_orrery orrery\n";
}

std::string escaped_for_zsh(std::string_view text) {
  std::string out;
  for (char c : text) {
    if (c == '\'') {
      out += "'\\''";
      continue;
    }
    if (c == '[' || c == ']' || c == ':') out += '\\';
    out += c;
  }
  return out;
}

std::string zsh_completion() {
  std::string commands, cases;
  for (const Command& command : command_table()) {
    if (command.hidden) continue;
    commands +=
        "    '" + std::string(command.name) + ":" + escaped_for_zsh(command.summary) + "'\n";
    cases += "    " + std::string(command.name) + ")\n      _arguments";
    for (const FieldInfo& field : command.fields) {
      std::string action = field.type == FieldType::mark ? "" : ":value:";
      if (field.type == FieldType::file) action += "_files";
      if (!field.choices.empty()) {
        action += "(";
        for (std::string_view name : field.choices) action += std::string(name) + " ";
        action += ")";
      }
      for (const std::string& flag : spellings(field))
        cases += " \\\n        '*" + flag + "[" + escaped_for_zsh(field.help) + "]" + action + "'";
    }
    cases += " \\\n        '*:file:_files' ;;\n";
  }
  return "#compdef orrery\n_orrery() {\n  local -a commands=(\n" + commands +
         "  )\n  if (( CURRENT == 2 )); then\n    _describe command commands\n    return\n  fi\n  "
         "local command=$words[2]\n  shift words\n  (( CURRENT-- ))\n  case $command in\n" +
         cases + "  esac\n}\n_orrery \"$@\"\n";
}

}  // namespace

std::string help_of(const Command& command, size_t width, bool brief) {
  constexpr size_t kIndent = 6;
  std::string text = std::string(command.summary) + ".\n\n  " + usage_of(command) + "\n";
  for (std::string_view group : groups_of(command)) {
    std::string part;
    for (const FieldInfo& field : command.fields) {
      if (field.group != group || (brief && !field.essential)) continue;
      part += "  " + heading(field) + "\n" + words_to_lines(sentence(field), kIndent, width);
    }
    if (!part.empty()) text += "\n" + std::string(group) + "\n" + part;
  }
  if (brief) text += "\nAll flags: orrery " + std::string(command.name) + " --help\n";
  if (!command.example.empty())
    text += "\nExample\n" + words_to_lines(std::string(command.example), 2, width);
  return text;
}

std::string help_of_all(size_t width) {
  constexpr size_t kNameWidth = 18;
  std::string text =
      "Native inference for NVIDIA Cosmos 3 world models.\n\n  orrery COMMAND [flags]\n\n";
  for (const Command& command : command_table()) {
    if (command.hidden) continue;
    std::string name = "  " + std::string(command.name);
    name.resize(kNameWidth, ' ');
    text +=
        name + words_to_lines(std::string(command.summary), kNameWidth, width).substr(kNameWidth);
  }
  return text + "\norrery COMMAND --help lists the flags of a command, -h the most used ones.\n";
}

int reference(const Call& call) {
  const std::string format = call.flags.has("format") ? call.flags.text("format") : "markdown";
  std::string text = markdown_page();
  if (format == "man") text = man_page();
  if (format == "bash") text = bash_completion();
  if (format == "zsh") text = zsh_completion();
  std::fputs(text.c_str(), stdout);
  return 0;
}

}  // namespace orrery::cli
