// One request under several attention strategies: what each costs and how far it strays.
#pragma once

#include <filesystem>
#include <stop_token>
#include <string>
#include <vector>

#include "orrery/engine.h"
#include "orrery/export.h"

namespace ORRERY_API orrery {

struct ComparedStrategy {
  std::string name;       // for labels; see strategy_name()
  std::string attention;  // as in EngineOptions
};

struct CompareOptions {
  std::vector<ComparedStrategy> strategies;  // two or more; the others are held against the first
  // How often each runs, in turns. A step's time is that of its fastest run, which keeps other load
  // on the machine out of the figures.
  int repeats = 1;
};

struct StrategyOutcome {
  std::string name;
  std::string attention;
  double denoise_seconds = 0;
  double processor_seconds = 0;  // of denoising, all threads; the least of the runs
  double speed_up = 1;           // the first's time over this one's
  double kept_share = 1;         // of key blocks over the run: kept_share() of result.h
  double latent_error = 0;       // relative, of the final latents
  double psnr = 0;               // dB, of the frames; infinite for equal ones
  double ssim = 1;               // of luma, 11 x 11 Gaussian window
  Result result;
};

// "dense" for itself, a file's name without extension, "strategy N" for JSON text.
std::string strategy_name(const std::string& attention, size_t index);

// The checkpoint is opened once; a strategy that cannot run here is refused before anything is
// generated.
std::vector<StrategyOutcome> compare(const std::filesystem::path& model, const Request& request,
                                     const CompareOptions& options, EngineOptions engine,
                                     const ProgressCallback& progress = {},
                                     std::stop_token stop = {});
// On an open engine, which has its own strategy again afterwards.
std::vector<StrategyOutcome> compare(Engine& engine, const Request& request,
                                     const CompareOptions& options,
                                     const ProgressCallback& progress = {},
                                     std::stop_token stop = {});

// A table for people, and a JSON array of objects.
std::string to_text(const std::vector<StrategyOutcome>& outcomes);
std::string to_json(const std::vector<StrategyOutcome>& outcomes);

}  // namespace orrery
