// Tokenizer speed on one core, in bytes of text per second, and the time to load a tokenizer.
// Reads the shipped vocabulary and, where the golden data has it, the Qwen3 one
// (ORRERY_GOLDEN_DIR names another folder, as for the tests).
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "text/tokenizer.h"

namespace orrery {
namespace {

constexpr size_t kTextBytes = 512 * 1024;

std::filesystem::path repository() {
  return std::filesystem::path(__FILE__).parent_path().parent_path();
}

// Sentences drawn at random, so that no two stretches of the text are the same.
std::string text_of(const std::vector<std::string>& words, const std::vector<std::string>& stops) {
  std::mt19937 random(1);
  std::string text;
  while (text.size() < kTextBytes) {
    text += words[random() % words.size()];
    text += stops[random() % stops.size()];
  }
  return text;
}

std::string english() {
  return text_of({"the",         "robot",     "arm",        "slowly",   "lifts",    "a",
                  "red",         "cup",       "from",       "table",    "camera",   "dolly",
                  "forward",     "through",   "evening",    "light",    "While",    "soft",
                  "shadows",     "fall",      "across",     "polished", "concrete", "warehouse",
                  "workers",     "it's",      "don't",      "scene",    "depth",    "cinematic",
                  "reflections", "stainless", "countertop", "gently",   "2026",     "35mm"},
                 {" ", " ", " ", " ", " ", " ", " ", ", ", ". ", " - ", ".\n\n"});
}

std::string json() {
  return text_of({"\"subject\": \"robot arm\"", "\"fps\": 24.0",
                  "\"resolution\": {\"H\": 720, \"W\": 1280}", "\"time\": \"0:00-0:03\"",
                  "\"description\": \"Pick up the cup.\"", "\"tags\": [\"indoor\", 1, true]",
                  "\"lighting\": \"soft, warm\"", "\"aspect_ratio\": \"16,9\""},
                 {", ", ", ", ",\n    ", "}, {"});
}

std::string mixed_cjk() {
  return text_of(
      {"\u673a\u5668\u4eba", "\u7f13\u6162\u5730", "\u62ff\u8d77", "\u7ea2\u8272\u7684\u676f\u5b50",
       "\u684c\u5b50\u4e0a", "\u955c\u5934\u5411\u524d\u63a8\u8fdb", "\u30ed\u30dc\u30c3\u30c8",
       "\u304c", "\u30c6\u30fc\u30d6\u30eb", "\u306e\u4e0a\u306e", "\u8d64\u3044\u30ab\u30c3\u30d7",
       "\ub85c\ubd07", "\ucc9c\ucc9c\ud788", "\ub4e4\uc5b4", "camera", "4K", "\U0001f916"},
      {"", "", "", "\uff0c", "\u3002", " ", "\n"});
}

// Every mark decomposed: all of it goes through normalization.
std::string decomposed() {
  return text_of(
      {"cafe\u0301", "nai\u0308ve", "\u1112\u1161\u11ab", "\u304b\u3099", "A\u030angstro\u0308m"},
      {" ", ", "});
}

void encode(benchmark::State& state, const std::filesystem::path& folder, const std::string& text) {
  const Tokenizer tokenizer = Tokenizer::load(folder);
  size_t tokens = 0;
  for (auto _ : state) {
    const std::vector<int64_t> ids = tokenizer.encode(text);
    tokens = ids.size();
    benchmark::DoNotOptimize(ids.data());
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * text.size()));
  state.counters["bytes_per_token"] =
      static_cast<double>(text.size()) / static_cast<double>(tokens);
}

void load(benchmark::State& state, const std::filesystem::path& folder) {
  for (auto _ : state) benchmark::DoNotOptimize(Tokenizer::load(folder));
}

void register_all(const std::string& name, const std::filesystem::path& folder) {
  benchmark::RegisterBenchmark((name + "/load").c_str(), [=](benchmark::State& state) {
    load(state, folder);
  })->Unit(benchmark::kMillisecond);
  const std::vector<std::pair<std::string, std::string>> texts = {{"english", english()},
                                                                  {"json", json()},
                                                                  {"mixed_cjk", mixed_cjk()},
                                                                  {"decomposed", decomposed()}};
  for (const auto& [kind, text] : texts) {
    const std::string copy = text;
    benchmark::RegisterBenchmark((name + "/encode/" + kind).c_str(), [=](benchmark::State& state) {
      encode(state, folder, copy);
    })->Unit(benchmark::kMillisecond);
  }
}

}  // namespace
}  // namespace orrery

int main(int argc, char** argv) {
  const char* golden = std::getenv("ORRERY_GOLDEN_DIR");
  const std::filesystem::path qwen3 =
      (golden != nullptr ? std::filesystem::path(golden)
                         : orrery::repository() / "tests/golden/data") /
      "tokenizer_qwen3";
  orrery::register_all("pico", orrery::repository() / "models/cosmos3-pico/text_tokenizer");
  if (std::filesystem::exists(qwen3 / "tokenizer.json")) orrery::register_all("qwen3", qwen3);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
