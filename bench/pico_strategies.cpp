// Fidelity and speed of attention strategies on the shipped checkpoint at 512 x 512, 33 frames
// (2304 generation tokens): the table of docs/attention.md.
//
//   pico_strategies models/cosmos3-pico bench/pico_strategies.json docs/images/pico-strategies.png
//   5 [cpu | cuda] > bench/results/pico-strategies.jsonl
//   tools/strategy_table.py
//
// The list of strategies is an array of {"name", "attention": a file or a document, "in_sheet"};
// the first is the yardstick. Each runs once for each caption; figures are means over the captions,
// but for worst_psnr. Seconds are processor time of one thread on the CPU, time on a device.
// "shows" says whether every clip has the colour and the motion that its caption asks for.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../tests/e2e/moving_shape.h"
#include "base/error.h"
#include "base/json.h"
#include "base/provenance.h"
#include "compare/panels.h"
#include "orrery/media.h"

namespace {

using namespace orrery;

constexpr int kSteps = 10;
constexpr double kGuidance = 3, kFlowShift = 1;
constexpr int64_t kSheetColumns = 5, kSheetPanel = 96;

Request request_for(const e2e::Caption& caption) {
  Request request;
  request.prompt = caption.text;
  request.height = request.width = 512;
  request.num_frames = 33;
  request.num_inference_steps = kSteps;
  request.guidance_scale = kGuidance;
  request.flow_shift = kFlowShift;
  request.seed = 3;
  return request;
}

struct Figures {
  double seconds = 0, kept = 0, latent_error = 0, psnr = 0, worst_psnr = HUGE_VAL, ssim = 0;
  std::string fault;  // of the first clip that does not show its caption
};

Json finite(double value) { return std::isfinite(value) ? Json(value) : Json(); }

void run(const std::string& model, const std::string& list_file, const std::string& sheet_file,
         int count, const std::string& device_name, const std::string& command) {
  const Json list = Json::load(list_file);
  CompareOptions options;
  for (const Json& entry : list.items()) {
    const Json& attention = entry.at("attention");
    options.strategies.push_back({entry.at("name").as_string(), attention.is_string()
                                                                    ? attention.as_string()
                                                                    : attention.dump()});
  }
  EngineOptions engine;
  engine.num_threads = 1;
  engine.device = device_name;
  const bool on_cpu = device_name == "cpu";
  std::vector<Figures> figures(options.strategies.size());
  const std::vector<e2e::Caption> clips(e2e::kCaptions.begin(), e2e::kCaptions.begin() + count);
  const auto captions = static_cast<double>(clips.size());
  for (const e2e::Caption& caption : clips) {
    std::vector<StrategyOutcome> outcomes = compare(model, request_for(caption), options, engine);
    for (size_t i = 0; i < outcomes.size(); ++i) {
      const StrategyOutcome& o = outcomes[i];
      Figures& f = figures[i];
      f.seconds += (on_cpu ? o.processor_seconds : o.denoise_seconds) / captions;
      f.kept += o.kept_share / captions;
      f.latent_error += o.latent_error / captions;
      f.psnr += o.psnr / captions;
      f.worst_psnr = std::min(f.worst_psnr, o.psnr);
      f.ssim += o.ssim / captions;
      const std::string fault = e2e::fault_of(o.result.frames, caption);
      if (!fault.empty() && f.fault.empty()) f.fault = concat(caption.text, " ", fault);
    }
    std::fprintf(stderr, "%s\n%s\n", caption.text, to_text(outcomes).c_str());
    if (&caption != &clips.front()) continue;
    std::vector<StrategyOutcome> shown;
    for (size_t i = 0; i < outcomes.size(); ++i) {
      const Json* in_sheet = list.at(i).find("in_sheet");
      if (in_sheet != nullptr && in_sheet->as_bool()) shown.push_back(std::move(outcomes[i]));
    }
    Result sheet;
    sheet.frames = contact_sheet(shown, kSheetColumns, kSheetPanel);
    save_output(sheet_file, sheet);
  }
  const std::string device = Engine::open(model, engine).device_description();
  for (size_t i = 0; i < figures.size(); ++i) {
    const Figures& f = figures[i];
    std::printf("%s\n", Json::object()
                            .set("bench", "pico_strategies")
                            .set("case", options.strategies[i].name)
                            .set("device", device)
                            .set("driver", Json())
                            .set("commit", measured_commit())
                            .set("date", today())
                            .set("command", command)
                            .set("value", f.seconds)
                            .set("unit", on_cpu ? "s of one processor, denoising" : "s, denoising")
                            .set("floor", Json())
                            .set("peer", options.strategies.front().name)
                            .set("peer_value", figures.front().seconds)
                            .set("ratio", figures.front().seconds / f.seconds)
                            .set("kept_share", f.kept)
                            .set("latent_error", f.latent_error)
                            .set("psnr", finite(f.psnr))
                            .set("worst_psnr", finite(f.worst_psnr))
                            .set("ssim", f.ssim)
                            .set("shows", f.fault.empty() ? "yes" : f.fault)
                            .set("captions", static_cast<int64_t>(clips.size()))
                            .set("attention", options.strategies[i].attention)
                            .dump()
                            .c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int captions = argc == 5 || argc == 6 ? std::atoi(argv[4]) : 0;
  if (captions < 1 || captions > std::ssize(e2e::kCaptions)) {
    std::fprintf(stderr,
                 "usage: pico_strategies MODEL STRATEGIES.json SHEET.png CAPTIONS (1 to %d) "
                 "[cpu | cuda]\n",
                 static_cast<int>(e2e::kCaptions.size()));
    return 2;
  }
  std::string command;
  for (int i = 0; i < argc; ++i) command += concat(i > 0 ? " " : "", argv[i]);
  try {
    run(argv[1], argv[2], argv[3], captions, argc == 6 ? argv[5] : "cpu", command);
  } catch (const Error& error) {
    std::fprintf(stderr, "pico_strategies: %s\n", error.what());
    return 1;
  }
}
