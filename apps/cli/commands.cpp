#include "commands.h"

#include <algorithm>
#include <initializer_list>

#include "bench/bench.h"

namespace orrery::cli {

namespace {

constexpr auto kFiles = "Files";

const FieldInfo& known(const std::vector<FieldInfo>& fields, std::string_view name) {
  const FieldInfo* field = find_field(fields, name);
  if (field == nullptr) {
    throw Error(ErrorKind::unsupported, "the command line has no field " + std::string(name));
  }
  return *field;
}

std::vector<FieldInfo> some(const std::vector<FieldInfo>& fields,
                            std::initializer_list<std::string_view> names) {
  std::vector<FieldInfo> chosen;
  for (std::string_view name : names) chosen.push_back(known(fields, name));
  return chosen;
}

std::vector<FieldInfo> joined(std::initializer_list<std::vector<FieldInfo>> parts) {
  std::vector<FieldInfo> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

std::vector<Command> make_table() {
  const auto& files = file_fields();
  const auto device =
      some(engine_fields(), {"device", "dtype", "threads", "offload", "resident", "graphs"});
  const auto mesh = some(engine_fields(), {"tp_degree", "cp_degree", "cfg_degree"});
  const auto attention = some(engine_fields(), {"attention"});
  FieldInfo strategies = attention.front();
  strategies.type = FieldType::texts;
  strategies.help =
      "Strategy, several times; the first is the yardstick: a JSON file, text or dense";
  FieldInfo output = known(files, "output");
  output.help = "Video, or a folder for compare.mp4; a .png, .json and .txt lie beside it";

  return {
      {"generate",
       "Make an image or a video from a prompt",
       "orrery generate --model models/cosmos3-pico --prompt \"A small red circle moves left on a "
       "black background.\" --height 256 --width 256 --num-frames 33 --num-inference-steps 20 "
       "--guidance-scale 4 --output circle.mp4",
       joined({some(files, {"model", "output", "prompt_file", "from", "report", "save_latents",
                            "save_action", "save_sound", "quiet"}),
               request_fields(), engine_fields()}),
       {"model", "prompt"},
       generate,
       false,
       true},
      {"compare",
       "One request under several attention strategies, side by side",
       "",
       joined({some(files, {"model", "prompt_file", "quiet", "repeats"}),
               {output, strategies},
               request_fields(),
               device,
               some(engine_fields(), {"warm_up"})}),
       {"model"},
       compare},
      {"plan",
       "Memory, flops and time floor of a request, before loading",
       "",
       joined({some(files, {"model", "prompt_file", "from", "json"}), request_fields(), device,
               attention, mesh}),
       {"model"},
       plan},
      {"inspect",
       "Components, parameters and abilities of a model folder",
       "",
       joined({some(files, {"model", "json", "verify"}),
               some(engine_fields(), {"attention", "device"})}),
       {"model"},
       inspect},
      {"tokenize",
       "Token ids of a text, or the text of ids",
       "",
       some(files, {"model", "text", "decode"}),
       {"model", "text"},
       tokenize},
      {"make-checkpoint",
       "Write a model folder of a published size with random weights",
       "",
       checkpoint_fields(),
       {},
       make_checkpoint},
      {"bench",
       "Measure a published model size with random weights; JSON lines",
       "",
       joined({bench_fields(), device, attention, mesh}),
       {"what"},
       bench,
       false,
       true},
      {"reference",
       "Man page, reference page or shell completion of this program",
       "",
       some(files, {"format"}),
       {"format"},
       reference,
       true},
  };
}

}  // namespace

const std::vector<FieldInfo>& file_fields() {
  using Info = FieldInfo;
  static const std::vector<FieldInfo> fields{
      Info{.name = "model",
           .group = kFiles,
           .help = "Model folder (diffusers layout)",
           .otherwise = "needed",
           .flags = "-m",
           .essential = true,
           .type = FieldType::file},
      Info{.name = "output",
           .group = kFiles,
           .help = "File (.mp4 .png .jpg), or a folder for sample.mp4 or sample.png",
           .otherwise = "the current folder",
           .flags = "-o",
           .essential = true,
           .type = FieldType::file},
      Info{.name = "prompt_file",
           .group = kFiles,
           .help = "File with the prompt as text, or with a request in JSON by the names of the "
                   "public entry points; - is standard input; flags win over it",
           .otherwise = "none",
           .essential = true,
           .type = FieldType::file},
      Info{.name = "from",
           .group = kFiles,
           .help = "Repeat the run that made this report, video or picture; flags win over it",
           .otherwise = "none",
           .essential = true,
           .type = FieldType::file},
      Info{.name = "report",
           .group = kFiles,
           .help = "Write a JSON report: settings, times, memory, dispatch",
           .otherwise = "none",
           .type = FieldType::file},
      Info{.name = "save_latents",
           .group = kFiles,
           .help = "Write the final latents here (safetensors)",
           .otherwise = "none",
           .type = FieldType::file},
      Info{.name = "save_action",
           .group = kFiles,
           .help = "Write predicted actions here (.json or .safetensors)",
           .otherwise = "none",
           .type = FieldType::file},
      Info{.name = "save_sound",
           .group = kFiles,
           .help = "Write the sound here too (.wav)",
           .otherwise = "none",
           .type = FieldType::file},
      Info{.name = "quiet",
           .group = kFiles,
           .help = "Print nothing but the result",
           .otherwise = "off",
           .flags = "-q",
           .type = FieldType::mark},
      Info{.name = "repeats",
           .group = kFiles,
           .help = "Runs of each strategy; the fastest counts, step by step",
           .otherwise = "1",
           .least = 1,
           .most = 100,
           .type = FieldType::integer},
      Info{.name = "json",
           .group = kFiles,
           .help = "Print JSON",
           .otherwise = "off",
           .type = FieldType::mark},
      Info{.name = "verify",
           .group = kFiles,
           .help =
               "Read every byte: values finite and likely, checksums where they lie beside files",
           .otherwise = "off",
           .type = FieldType::mark},
      Info{.name = "text", .group = kFiles, .help = "Text", .otherwise = "empty"},
      Info{.name = "decode",
           .group = kFiles,
           .help = "Ids to turn into text",
           .otherwise = "none",
           .type = FieldType::integers},
      Info{.name = "format",
           .group = kFiles,
           .help = "man, markdown, bash or zsh",
           .otherwise = "markdown",
           .type = FieldType::choice,
           .choices = {"man", "markdown", "bash", "zsh"}},
  };
  return fields;
}

const std::vector<FieldInfo>& checkpoint_fields() {
  using Info = FieldInfo;
  static const std::vector<FieldInfo> fields{
      Info{.name = "config",
           .group = kFiles,
           .help = "Published size",
           .otherwise = "nano",
           .type = FieldType::choice,
           .choices = {"nano", "super", "edge"}},
      Info{.name = "num_layers",
           .group = kFiles,
           .help = "Layers; 0: the config's",
           .otherwise = "0",
           .least = 0,
           .type = FieldType::integer},
      Info{.name = "seed",
           .group = kFiles,
           .help = "Seed of the weights",
           .otherwise = "0",
           .type = FieldType::integer},
      Info{.name = "tokenizer",
           .group = kFiles,
           .help = "Folder of a tokenizer to copy",
           .otherwise = "one token a byte",
           .type = FieldType::file},
      Info{.name = "out",
           .group = kFiles,
           .help = "Folder to write, new or empty",
           .otherwise = "needed",
           .type = FieldType::file},
  };
  return fields;
}

const std::vector<Command>& command_table() {
  static const std::vector<Command> table = make_table();
  return table;
}

std::filesystem::path model_of(const Draft& draft) {
  if (!draft.has("model"))
    throw Error(ErrorKind::invalid_argument, "--model is needed: name the folder of a model");
  return draft.text("model");
}

Draft completed(const Draft& flags, const std::function<void(const std::string&)>& note) {
  Draft draft = flags;
  const auto take = [&](const Draft& other) {
    for (const std::string& sentence : draft.fill_from(other)) note(sentence);
  };
  if (draft.has("prompt_file")) {
    const std::string file = draft.text("prompt_file");
    const std::vector<Draft> requests = read_requests(file);
    if (requests.size() > 1) {
      throw Error(ErrorKind::unsupported,
                  file + " holds " + std::to_string(requests.size()) +
                      " requests; this version runs one at a time: give each a file of its own");
    }
    take(requests.front());
  }
  if (draft.has("from")) take(read_run(draft.text("from")));
  return draft;
}

}  // namespace orrery::cli
