// Commands that generate nothing.
#include <cstdio>
#include <iostream>
#include <iterator>

#include "bench/bench.h"
#include "commands.h"
#include "interrupt.h"
#include "progress.h"
#include "published/make_checkpoint.h"

namespace orrery::cli {

int inspect(const Call& call) {
  const auto model = model_of(call.flags);
  if (call.flags.has("verify")) {
    std::cout << verify(model);
    return 0;
  }
  std::cout << (call.flags.has("attention") ? inspect_attention(model, call.flags.text("attention"),
                                                                engine_options_of(call.flags))
                                            : orrery::inspect(model, call.flags.has("json")));
  return 0;
}

int tokenize(const Call& call) {
  const auto model = model_of(call.flags);
  if (call.flags.has("decode")) {
    if (call.flags.has("text"))
      throw Error(ErrorKind::invalid_argument, "--decode and --text exclude each other");
    std::cout << detokenize(model, call.flags.integers("decode")) << "\n";
    return 0;
  }
  const std::string text = call.flags.has("text")
                               ? call.flags.text("text")
                               : std::string(std::istreambuf_iterator<char>(std::cin), {});
  const char* separator = "";
  for (int64_t id : orrery::tokenize(model, text)) {
    std::cout << separator << id;
    separator = " ";
  }
  std::cout << "\n";
  return 0;
}

int make_checkpoint(const Call& call) {
  if (!call.flags.has("out"))
    throw Error(ErrorKind::invalid_argument, "--out is needed: name the folder to write");
  const std::filesystem::path folder = call.flags.text("out");
  ProgressPrinter printer(false);
  CheckpointOptions options;
  if (call.flags.has("config")) options.config = call.flags.text("config");
  options.num_layers = call.flags.integer("num_layers");
  options.seed = call.flags.integer("seed");
  options.tokenizer = call.flags.text("tokenizer");
  options.log = [&](const std::string& sentence) { printer.line("note: " + sentence); };
  watch_interrupts();
  std::stop_source stop;
  orrery::make_checkpoint(
      folder, options,
      [&](const Progress& progress) {
        printer(progress);
        if (interrupted()) stop.request_stop();
      },
      stop.get_token());
  std::printf("%s\n", folder.string().c_str());
  return 0;
}

int bench(const Call& call) {
  BenchOptions options = bench_options_of(call.flags);
  options.command = call.line;
  EngineOptions engine = engine_options_of(call.flags);
  engine.job = &call.job;
  run_bench(options, engine, [](const std::string& line) { std::cout << line << std::endl; });
  return 0;
}

}  // namespace orrery::cli
