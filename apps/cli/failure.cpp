#include "failure.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <numeric>
#include <vector>

namespace orrery::cli {

namespace {

// Letters to insert, delete or replace.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

// The flag of the subcommand in use that is nearest to `given`; empty when none is near.
std::string nearest_flag(const CLI::App& app, const std::string& given) {
  const CLI::App* used = &app;
  while (!used->get_subcommands().empty()) used = used->get_subcommands().front();
  std::string best;
  size_t least = std::max<size_t>(2, given.size() / 4) + 1;
  for (const CLI::Option* option : used->get_options()) {
    for (const std::string& name : option->get_lnames()) {
      const std::string flag = "--" + name;
      const size_t d = distance(given, flag);
      if (d < least) {
        least = d;
        best = flag;
      }
    }
  }
  return best;
}

}  // namespace

std::string explain_failure(const CLI::App* app, const CLI::Error& error) {
  std::string text;
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError)) {
    for (const std::string& extra : app->remaining(true)) {
      if (extra.empty() || extra.front() != '-') continue;
      const std::string flag = extra.substr(0, extra.find('='));
      text += flag + " is not known";
      if (const std::string near = nearest_flag(*app, flag); !near.empty())
        text += "; did you mean " + near + "?";
      text += '\n';
    }
  }
  if (text.empty()) text = std::string(error.what()) + '\n';
  return text + "Run with --help for the flags.\n";
}

}  // namespace orrery::cli
