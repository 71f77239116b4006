// Mutated inputs by seed, each read in a process of its own: without a crash, more than kCpuSeconds
// of work or kMemory bytes, and with orrery::Error as the only complaint.
//
//   mutation_run COUNT [SEED [KIND]]
//
// An input that fails is kept in ./mutation-failures, and the run ends with status 1. What is
// mutated: the JSON of headers, indexes, configs, strategies, adapters and actions as trees, so
// that mutations get past the grammar; templates and prompts as texts; media as bytes.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "backend/dry_run.h"
#include "base/error.h"
#include "base/json.h"
#include "io/safetensors.h"
#include "model/lora.h"
#include "model/transformer.h"
#include "orrery/engine.h"
#include "orrery/fields.h"
#include "orrery/media.h"
#include "support/source_dir.h"
#include "text/chat_template.h"

namespace orrery {
namespace {

namespace fs = std::filesystem;

constexpr rlim_t kCpuSeconds = 10;
constexpr int64_t kMemory = int64_t{1} << 30;
// Exit statuses of a child.
constexpr int kRefused = 1, kUndocumented = 2, kMemoryGone = 3;

std::string read_file(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_file(const fs::path& file, std::string_view bytes) {
  fs::remove(file);  // it may be a link to what must stay
  std::ofstream(file, std::ios::binary) << bytes;
}

// --- mutations

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  size_t below(size_t n) {
    return n == 0 ? 0 : std::uniform_int_distribution<size_t>(0, n - 1)(random_);
  }
  bool one_in(size_t n) { return below(n) == 0; }

  // A few bytes changed, removed, doubled, or the end cut off.
  std::string bytes(std::string data) {
    for (size_t i = 1 + below(8); i > 0 && !data.empty(); --i) {
      const size_t at = below(data.size());
      const size_t length = 1 + below(std::min<size_t>(64, data.size() - at));
      switch (below(6)) {
        case 0: data[at] = static_cast<char>(below(256)); break;
        case 1: data[at] = static_cast<char>(data[at] ^ (1 << below(8))); break;
        case 2: data.erase(at, length); break;
        case 3: data.insert(at, data.substr(at, length)); break;
        case 4: data.replace(at, length, std::string(length, one_in(2) ? '\xff' : '\0')); break;
        default:
          if (one_in(4)) data.resize(at);
      }
    }
    return data;
  }

  // Pieces of the text and words of its language exchanged.
  std::string text(std::string data, const std::vector<std::string>& words) {
    for (size_t i = 1 + below(6); i > 0; --i) {
      const size_t at = below(data.size() + 1);
      const size_t length = below(std::min<size_t>(40, data.size() - at) + 1);
      if (one_in(3))
        data.replace(at, length, data.substr(below(data.size() + 1), 40));
      else
        data.replace(at, one_in(2) ? 0 : length, words[below(words.size())]);
    }
    return data;
  }

  Json tree(const Json& json, int changes) {
    Json out = json;
    for (int i = 0; i < changes; ++i) out = changed(out);
    return out;
  }

 private:
  Json extreme() {
    switch (below(16)) {
      case 0: return {};
      case 1: return one_in(2);
      case 2: return 0;
      case 3: return -1;
      case 4: return int64_t{1} << below(63);
      case 5: return INT64_MAX;
      case 6: return 1e308;
      case 7: return -0.0;
      case 8: return 1e-308;
      case 9: return "";
      case 10: return std::string(below(2000), 'x');
      case 11: return "../\x1b[31m\n";
      case 12: return Json::array();
      case 13: return Json::object();
      case 14: return Json::array(std::vector<Json>(below(300), Json(1)));
      default: return static_cast<int64_t>(below(100));
    }
  }

  // One place of the tree replaced, removed, doubled or renamed.
  Json changed(const Json& json) {
    if (json.is_object() && !json.members().empty() && !one_in(24)) {
      std::vector<Json::Member> members = json.members();
      const size_t at = below(members.size());
      switch (below(8)) {
        case 0: members.erase(members.begin() + static_cast<ptrdiff_t>(at)); break;
        case 1: members[at].first += one_in(2) ? "_" : "\xc3\xa9"; break;
        case 2: members.emplace_back("novel", extreme()); break;
        case 3: members[at].second = members[below(members.size())].second; break;
        default: members[at].second = changed(members[at].second);
      }
      return Json::object(std::move(members));
    }
    if (json.is_array() && !json.items().empty() && !one_in(6)) {
      std::vector<Json> items = json.items();
      const size_t at = below(items.size());
      if (one_in(4))
        items.erase(items.begin() + static_cast<ptrdiff_t>(at));
      else if (one_in(4))
        items.insert(items.begin() + static_cast<ptrdiff_t>(at), items[at]);
      else
        items[at] = changed(items[at]);
      return Json::array(std::move(items));
    }
    return extreme();
  }

  std::mt19937_64 random_;
};

// A safetensors file with another header; the data stay.
std::string with_header(const std::string& file, Mutator& mutate) {
  uint64_t length = 0;
  for (int i = 0; i < 8; ++i) length |= uint64_t{static_cast<uint8_t>(file[size_t(i)])} << 8 * i;
  const Json header = Json::parse(file.substr(8, length), "header");
  const std::string text = mutate.tree(header, 1 + static_cast<int>(mutate.below(3))).dump();
  std::string out;
  uint64_t stated = text.size();
  if (mutate.one_in(12)) stated = uint64_t{1} << mutate.below(64);
  for (int i = 0; i < 8; ++i) out += static_cast<char>(stated >> 8 * i);
  return out + text + file.substr(8 + length);
}

// --- what is mutated

struct Kind {
  std::string name;
  // Writes a mutated input into the folder; returns what reads it.
  std::function<std::function<void()>(Mutator&, const fs::path& folder)> make;
};

const fs::path& tiny_model() {
  static const fs::path model = source_dir() / "tests/golden/data/pipeline/model";
  return model;
}

// The tiny checkpoint in links, with one file of it changed.
fs::path variant(const fs::path& folder, const std::string& changed, std::string_view bytes) {
  const fs::path model = folder / "model";
  fs::remove_all(model);
  for (const auto& entry : fs::recursive_directory_iterator(tiny_model())) {
    const fs::path to = model / fs::relative(entry.path(), tiny_model());
    if (entry.is_directory())
      fs::create_directories(to);
    else if (fs::create_directories(to.parent_path()); !fs::exists(to))
      fs::create_symlink(fs::canonical(entry.path()), to);
  }
  write_file(model / changed, bytes);
  return model;
}

Request small_request() {
  Request request;
  request.prompt = "A red circle.";
  request.height = request.width = 32;
  request.num_frames = 5;
  request.num_inference_steps = 2;
  return request;
}

// Everything that reads a checkpoint's configs, headers and tokenizer.
std::function<void()> reads_model(const fs::path& model) {
  return [model] {
    inspect(model, false);
    check_request(model, small_request(), {});
  };
}

Kind json_of_model(const std::string& name, const std::vector<std::string>& files) {
  return {name, [files](Mutator& mutate, const fs::path& folder) {
            const std::string& file = files[mutate.below(files.size())];
            const Json json = Json::load(tiny_model() / file);
            const int changes = 1 + static_cast<int>(mutate.below(3));
            const std::string text = mutate.tree(json, changes).dump();
            return reads_model(variant(folder, file, text));
          }};
}

Kind header_kind() {
  return {"header", [](Mutator& mutate, const fs::path& folder) {
            const char* files[]{"transformer/diffusion_pytorch_model-00001-of-00003.safetensors",
                                "vae/diffusion_pytorch_model-00002-of-00017.safetensors",
                                "sound_tokenizer/diffusion_pytorch_model.safetensors"};
            const std::string file = files[mutate.below(3)];
            const std::string bytes = read_file(tiny_model() / file);
            return reads_model(variant(folder, file, with_header(bytes, mutate)));
          }};
}

Kind template_kind() {
  return {"template", [](Mutator& mutate, const fs::path&) {
            static const std::vector<std::string> words{"{% for i in [1,2,3,4,5,6,7,8] %}",
                                                        "{% endfor %}",
                                                        "{% set ns=namespace(l=[0]) %}",
                                                        "{% set ns.l=ns.l+ns.l %}",
                                                        "{% if ",
                                                        " %}",
                                                        "{% endif %}",
                                                        "{{",
                                                        "}}",
                                                        "messages",
                                                        "[::-1]",
                                                        "ns.l==ns.l",
                                                        " in ",
                                                        "|length",
                                                        ".split('a')",
                                                        "~ns.t",
                                                        "loop.last",
                                                        "{% macro m(a) %}",
                                                        "{% endmacro %}",
                                                        "{{ m(m(1)) }}",
                                                        "'aaaaaaaaaaaaaaaa'",
                                                        "-1",
                                                        "999999999999",
                                                        "{#",
                                                        "#}",
                                                        "\xff",
                                                        "raise_exception('x')",
                                                        "{% else %}"};
            std::vector<fs::path> sources{tiny_model() / "text_tokenizer/chat_template.jinja"};
            for (const auto& entry : fs::directory_iterator(source_dir() / "tests/data/jinja"))
              sources.push_back(entry.path());
            std::sort(sources.begin(), sources.end());
            const std::string text =
                mutate.text(read_file(sources[mutate.below(sources.size())]), words);
            return [text] {
              ChatTemplate(text, "chat.jinja").render({{"user", "Hello."}}, {{"eos_token", "x"}});
            };
          }};
}

Kind strategy_kind() {
  return {"strategy", [](Mutator& mutate, const fs::path&) {
            std::vector<fs::path> recipes;
            for (const auto& entry : fs::directory_iterator(source_dir() / "recipes/attention"))
              if (entry.path().extension() == ".json") recipes.push_back(entry.path());
            std::sort(recipes.begin(), recipes.end());
            const Json recipe = Json::load(recipes[mutate.below(recipes.size())]);
            const std::string text = mutate.tree(recipe, 1 + int(mutate.below(3))).dump();
            return [text] { inspect_attention(tiny_model(), text, {}); };
          }};
}

Kind lora_kind() {
  return {
      "lora", [](Mutator& mutate, const fs::path& folder) {
        const std::vector<float> zeros(4096);
        std::vector<NamedTensor> tensors;
        for (const char* layer : {"layers.0.self_attn.to_q", "lora_unet_layers_0_self_attn_to_k",
                                  "diffusion_model.layers.1.mlp.up_proj"}) {
          const View down = make_view(zeros.data(), {2, 64}, DType::f32);
          const View up = make_view(zeros.data(), {64, 2}, DType::f32);
          tensors.push_back({std::string(layer) + ".lora_down.weight", down});
          tensors.push_back({std::string(layer) + ".lora_up.weight", up});
        }
        const Json config = Json::parse(
            R"({"peft_type": "LORA", "lora_alpha": 2, "use_rslora": true,
                    "alpha_pattern": {"to_q": 3}, "bias": "none", "r": 2})",
            "config");
        const fs::path file = folder / "adapter.safetensors";
        write_safetensors(file, tensors,
                          {{"lora_adapter_metadata", mutate.tree(config, 2).dump()}});
        write_file(file, with_header(read_file(file), mutate));
        return [file] {
          DryRunBackend dry(DeviceKind::cpu);
          const Json json = Json::load(tiny_model() / "transformer/config.json");
          Transformer network(dry, TransformerConfig::from_json(json), DType::f32);
          LoraAdapters({{file}},
                       [&](WeightVisitor& v) { network.visit_und(v), network.visit_gen(v); });
        };
      }};
}

Kind prompt_kind() {
  return {"prompt", [](Mutator& mutate, const fs::path& folder) {
            const Json sample = Json::parse(
                R"({"prompt": "A red circle.", "negative_prompt": "blurry", "seed": 1, "fps": 24,
                    "num_frames": 5, "height": 32, "width": 32, "num_inference_steps": 2,
                    "guidance_scale": 3.5, "use_system_prompt": true})",
                "prompt");
            const std::string json = mutate.tree(sample, 2).dump();
            write_file(folder / "prompt.json", mutate.one_in(2) ? mutate.bytes(json) : json);
            return [file = folder / "prompt.json"] {
              for (const Draft& draft : read_requests(file))
                check_request(tiny_model(), request_of(draft), {});
            };
          }};
}

Kind actions_kind() {
  return {"actions", [](Mutator& mutate, const fs::path& folder) {
            const Json actions = Json::parse(
                R"({"actions": [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]]})", "actions");
            write_file(folder / "actions.json", mutate.tree(actions, 3).dump());
            return [file = folder / "actions.json"] { load_actions(file); };
          }};
}

Kind media_kind() {
  return {"media", [](Mutator& mutate, const fs::path& folder) {
            std::vector<fs::path> files;
            for (const auto& entry : fs::directory_iterator(source_dir() / "tests/data/media"))
              if (entry.path().extension() != ".md") files.push_back(entry.path());
            std::sort(files.begin(), files.end());
            const fs::path& from = files[mutate.below(files.size())];
            const fs::path file = folder / ("media" + from.extension().string());
            write_file(file, mutate.bytes(read_file(from)));
            return [file] {
              try {
                load_image(file);
              } catch (const Error&) {
              }
              load_video(file, 8);
            };
          }};
}

std::vector<Kind> kinds() {
  return {
      header_kind(),
      json_of_model("index", {"model_index.json", "vae/" + std::string(kWeightsIndexName),
                              "transformer/" + std::string(kWeightsIndexName)}),
      json_of_model("config", {"transformer/config.json", "vae/config.json",
                               "sound_tokenizer/config.json", "scheduler/scheduler_config.json"}),
      json_of_model("tokenizer",
                    {"text_tokenizer/tokenizer.json", "text_tokenizer/tokenizer_config.json"}),
      template_kind(),
      strategy_kind(),
      lora_kind(),
      prompt_kind(),
      actions_kind(),
      media_kind()};
}

// --- one input in a process of its own

// "" when it went as it should.
std::string run_apart(const std::function<void()>& read) {
  const pid_t child = fork();
  if (child < 0) return "fork failed";
  if (child == 0) {
    const rlimit cpu{kCpuSeconds, kCpuSeconds};
    setrlimit(RLIMIT_CPU, &cpu);
    std::freopen("/dev/null", "w", stderr);
    int status = 0;
    try {
      read();
    } catch (const Error&) {
      status = kRefused;
    } catch (const std::bad_alloc&) {
      status = kMemoryGone;
    } catch (...) {
      status = kUndocumented;
    }
    std::_Exit(status);
  }
  int status = 0;
  rusage used{};
  wait4(child, &status, 0, &used);
  if (WIFSIGNALED(status)) {
    const bool slow = WTERMSIG(status) == SIGXCPU || WTERMSIG(status) == SIGKILL;
    return slow ? concat("more than ", kCpuSeconds, " seconds of work")
                : concat("signal ", WTERMSIG(status));
  }
  if (int64_t{used.ru_maxrss} * 1024 > kMemory)
    return concat(used.ru_maxrss / 1024, " MiB of memory");
  if (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == kRefused) return "";
  return WEXITSTATUS(status) == kMemoryGone ? "std::bad_alloc" : "an exception of another type";
}

int run(int64_t count, uint64_t seed, const std::string& only) {
  std::string scratch = (fs::temp_directory_path() / "orrery-mutation-XXXXXX").string();
  if (mkdtemp(scratch.data()) == nullptr) return 2;
  const std::vector<Kind> all = kinds();
  int64_t failed = 0, done = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Kind& kind = all[static_cast<size_t>(i) % all.size()];
    if (!only.empty() && kind.name != only) continue;
    Mutator mutate(seed * 1'000'003 + static_cast<uint64_t>(i));
    ++done;
    const std::string fault = run_apart(kind.make(mutate, scratch));
    if (fault.empty()) continue;
    ++failed;
    std::printf("input %lld of seed %llu (%s): %s\n", static_cast<long long>(i),
                static_cast<unsigned long long>(seed), kind.name.c_str(), fault.c_str());
    std::error_code none;
    fs::copy(scratch, concat("mutation-failures/", seed, "-", i, "-", kind.name),
             fs::copy_options::recursive | fs::copy_options::copy_symlinks, none);
  }
  fs::remove_all(scratch);
  std::printf("%lld mutated inputs, %lld failures\n", static_cast<long long>(done),
              static_cast<long long>(failed));
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace orrery

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: mutation_run COUNT [SEED [KIND]]\n");
    return 2;
  }
  return orrery::run(std::atoll(argv[1]), argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1,
                     argc > 3 ? argv[3] : "");
}
