#include "bench/bench.h"
#include "engine/fields.h"

namespace orrery {

namespace {

// No rows: attention, which is the engine's, and command, which is the line that was typed.
static_assert(member_count<BenchOptions>() == 20);

const std::vector<Field<BenchOptions>>& table() {
  using B = BenchOptions;
  constexpr auto kGroup = "Measurement";
  static const auto make = [](auto member, std::string_view name, std::string_view help,
                              std::string_view otherwise) {
    FieldInfo info{.name = name, .group = kGroup, .help = help, .otherwise = otherwise};
    if (name != "sparsity" && name != "guidance_scale") info.least = 0;
    return field(member, info);
  };
  static const std::vector<Field<B>> rows = [] {
    std::vector<Field<B>> list{
        make(&B::what, "what", "What to measure", "step"),
        make(&B::model, "model", "Model folder to load, of load", "none"),
        make(&B::config, "config", "Published size", "nano"),
        make(&B::num_layers, "num_layers", "Layers; 0: the config's", "0"),
        make(&B::height, "height", "Height in pixels", "720"),
        make(&B::width, "width", "Width in pixels", "1280"),
        make(&B::num_frames, "num_frames", "Frames", "189"),
        make(&B::num_inference_steps, "num_inference_steps", "Steps", "35"),
        make(&B::guidance_scale, "guidance_scale", "1 runs one branch", "6"),
        make(&B::text_tokens, "text_tokens", "Tokens of each prompt", "512"),
        make(&B::query_tokens, "query_tokens", "Of attention; 0: the request's tokens", "0"),
        make(&B::key_tokens, "key_tokens", "Of attention; 0: the queries and the text tokens", "0"),
        make(&B::heads, "heads", "Of attention; 0: the config's", "0"),
        make(&B::kv_heads, "kv_heads", "Of attention; 0: the config's", "0"),
        make(&B::head_dim, "head_dim", "Of attention; 0: the config's", "0"),
        make(&B::sparsity, "sparsity", "Share of key blocks left out, of attention", "0.75"),
        make(&B::meshes, "meshes",
             "step, vae and link: meshes of ranks beside one device, as in cp2,cfg2,tp2cp2; cp2@N: "
             "at least N rows travel at once",
             "that of the degrees"),
        make(&B::timeline, "timeline", "step: the times of every operation of one layer too",
             "off"),
    };
    const auto choose = [&](size_t row, std::vector<std::string_view> choices) {
      list[row].type = FieldType::choice;
      list[row].choices = std::move(choices);
    };
    choose(0, {"layer", "step", "vae", "e2e", "attention", "load", "link"});
    choose(2, {"nano", "super", "edge"});
    return list;
  }();
  return rows;
}

}  // namespace

const std::vector<FieldInfo>& bench_fields() {
  static const std::vector<FieldInfo> infos = infos_of(table());
  return infos;
}

BenchOptions bench_options_of(const Draft& draft) {
  BenchOptions options;
  for (const Field<BenchOptions>& row : table()) {
    if (const Draft::Value* value = draft.find(row.name)) row.read(options, *value->json);
  }
  options.attention = draft.text("attention");
  return options;
}

}  // namespace orrery
