// `orrery bench` without the command line's media libraries, for machines that lack them:
//   model_bench what config [key=value ...]   keys as the flags of `orrery bench`
#include <algorithm>
#include <cstdio>
#include <string>

#include "bench/bench.h"

namespace {

using namespace orrery;

// key=value, or the name of a mark alone.
void set(Draft& draft, const std::string& word) {
  const size_t at = word.find('=');
  std::string name = word.substr(0, at);
  const bool is_off = at == std::string::npos && name.starts_with("no-");
  if (is_off) name.erase(0, 3);
  std::replace(name.begin(), name.end(), '-', '_');
  const FieldInfo* field = find_field(bench_fields(), name);
  if (field == nullptr) field = find_field(engine_fields(), name);
  if (field == nullptr) throw Error(ErrorKind::invalid_argument, word + " is not known");
  const std::string value = at == std::string::npos ? (is_off ? "off" : "on") : word.substr(at + 1);
  draft.set(*field, {value}, name);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Draft draft;
    set(draft, "device=cuda");
    if (argc > 1) set(draft, std::string("what=") + argv[1]);
    if (argc > 2) set(draft, std::string("config=") + argv[2]);
    for (int i = 3; i < argc; ++i) set(draft, argv[i]);
    BenchOptions options = bench_options_of(draft);
    for (int i = 0; i < argc; ++i) options.command += (i ? " " : "") + std::string(argv[i]);
    run_bench(options, engine_options_of(draft),
              [](const std::string& line) { std::puts(line.c_str()), std::fflush(stdout); });
  } catch (const Error& error) {
    std::fprintf(stderr, "model_bench: %s\n", error.what());
    return error.kind() == ErrorKind::invalid_argument ? 2 : 1;
  }
  return 0;
}
