// Orrery's engine: opens a checkpoint, generates.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "orrery/choices.h"
#include "orrery/error.h"
#include "orrery/export.h"
#include "orrery/request.h"
#include "orrery/result.h"

namespace ORRERY_API orrery {

class Job;  // job.h

// A low-rank adapter to merge into the transformer when it is loaded.
struct LoraFile {
  std::filesystem::path file;
  double scale = 1;
};

struct EngineOptions {
  std::string device = "cpu";  // cpu, cuda, cuda:1, or auto
  ComputeType dtype = ComputeType::automatic;
  int num_threads = 0;  // CPU threads; 0: all cores of this process
  // Strategy: JSON text, a file, or "dense"; empty: the checkpoint's, else dense.
  std::string attention;
  // Runs every layout of the strategy once before the first step. Results do not depend on it.
  WarmUpMode warm_up = WarmUpMode::automatic;
  std::vector<LoraFile> lora;  // summed in this order
  // A shell command that approves prompts and frames (docs/modes.md); empty: none.
  std::string guardrail;
  double guardrail_timeout = 300;  // seconds a verdict may take
  bool safety_check = true;        // false: none is wanted, and the result says so
  // Ranks that share one request (docs/parallelism.md): tp cuts the weights, cp the generation
  // sequence, cfg shares out the branches of the guidance. Their product is the number of ranks.
  int tp_degree = 1, cp_degree = 1, cfg_degree = 1;
  // Ranks are the processes of this job; null, or a job of one: threads of this process.
  const Job* job = nullptr;
  // Weights on a device (docs/cuda.md). The CPU reads weights in the mapped files and knows none
  // only.
  Offload offload = Offload::none;
  Resident resident = Resident::automatic;
  // Steps on CUDA run as recorded graphs where they can (docs/cuda.md, "Replay"). Results do not
  // depend on it.
  bool graphs = true;
  bool profile = false;  // time every operation for the report (slows CUDA down)
  std::function<void(const std::string&)> log;  // notices, one sentence each; may be empty
};

// Where an engine runs, as far as plans need to know. Taken while nothing runs; a plan that has one
// asks no device.
struct DeviceProfile {
  std::string description;
  bool is_cpu = true;
  bool fuses_weights = false;               // matrices that are read together lie together
  ComputeType dtype = ComputeType::fp32;    // never automatic
  int64_t free_bytes = 0, total_bytes = 0;  // of the device's memory, weights in place; 0: no limit
  double flops_per_second = 0;  // of one large matrix product; 0: not measured, plans have no floor
};

// What a request needs, computed by a dry run: no weight is read.
struct Plan {
  struct Stage {
    std::string name;
    double flops = 0;
    double bytes = 0;          // moved by its operations
    int64_t calls = 0;         // how often the stage runs in the request
    double floor_seconds = 0;  // flops at the ceiling
  };
  std::string summary;  // the request in one line
  std::string ceiling;  // what the floors are computed from
  std::vector<Stage> stages;
  int64_t weight_bytes = 0;
  int64_t activation_bytes = 0;       // arena
  int64_t state_bytes = 0;            // latents, solver history, text caches, tables
  int64_t resident_weight_bytes = 0;  // of the weights: those on the device between requests
  bool text_stays = false;            // whether the text tower is among them (Resident)
  int64_t pinned_bytes = 0;           // host memory that layers are copied from
  int64_t peak_bytes = 0;   // on the device at once, without what libraries keep for themselves
  int64_t tokens = 0;       // generation tokens
  int64_t text_tokens = 0;  // conditional branch
  int ranks = 1;            // that share the request; all numbers are those of rank 0
};

// What a request will make.
struct Outline {
  int64_t frames = 0, height = 0, width = 0;
  int64_t sampling_rate = 0;  // 0: no sound
  bool predicts_action = false;
  std::string summary;
  std::string fingerprint;  // equal for equal requests and options, on any machine
};

// One checkpoint on one device, or on several ranks. Several engines may be open at once and run
// side by side. One thread at a time may call what is not const; check() and plan() may be called
// beside generate(), from any thread. Settings of one request never reach the next.
class Engine {
 public:
  // Checks every config, tokenizer and tensor header before any weight is used. Throws Error.
  static Engine open(const std::filesystem::path& model, const EngineOptions& options = {});
  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;
  ~Engine();

  // Throws Error with a sentence when the request cannot run. Frames of the request may have sizes
  // and no pixels. Reads no file and asks no device.
  Outline check(const Request& request) const;
  // Memory, flops and, once measure_rate() has run, floors. As check(), under the strategy in use.
  Plan plan(const Request& request) const;
  const DeviceProfile& profile() const;
  // Takes the rate that floors are computed from: tenths of a second, on a device some memory.
  void measure_rate();

  // Ends soon after `stop` is requested, with Error{cancelled}: between layers, denoising steps and
  // frames that go through the VAE together; several ranks end together, between steps. Blocked by
  // the guardrail: Error{blocked}; without its verdict: Error{guardrail}. With several ranks events
  // are told on the thread of rank 0, and processes of other ranks get an empty Result.
  Result generate(const Request& request, const Events& events = {}, std::stop_token stop = {});

  // Replaces the strategy of later requests; weights stay. As at open(), its presets are tried
  // first, and when one cannot run here the strategy stays as it was.
  void use_attention(const std::string& attention);
  const std::string& attention() const;  // as it was given, at open() or since

  std::string device_description() const;
  double open_seconds() const;
  // One line: model, sizes, sampler, what was adjusted and why.
  std::string describe(const Request& request) const;

 private:
  struct Ranks;  // those of this process
  explicit Engine(std::unique_ptr<Ranks> ranks);
  std::unique_ptr<Ranks> ranks_;
};

// The same of a model that is not open: reads configs and tokenizer only.
Outline check_request(const std::filesystem::path& model, const Request& request,
                      const EngineOptions& options = {});

// The first measures the rate of the device for its floors; the second asks no device.
Plan plan_request(const std::filesystem::path& model, const Request& request,
                  const EngineOptions& options = {});
Plan plan_request(const std::filesystem::path& model, const Request& request,
                  const EngineOptions& options, const DeviceProfile& profile);
std::string to_json(const Plan& plan);

// Components, parameters, bytes and abilities of a model folder, as text for people or JSON.
std::string inspect(const std::filesystem::path& model, bool json);
// Reads every byte of a model folder: tensors against the networks, every value finite and within
// 1e4 times what is usual in its tensor, checksums where they lie beside the files (FILE.sha256,
// the Hub's metadata and cache names). Returns what was checked; throws Error with what is wrong.
std::string verify(const std::filesystem::path& model);
// The resolved attention table of a strategy on a model.
std::string inspect_attention(const std::filesystem::path& model, const std::string& attention,
                              const EngineOptions& options = {});
// Token ids of a text under a model's tokenizer.
std::vector<int64_t> tokenize(const std::filesystem::path& model, const std::string& text);
std::string detokenize(const std::filesystem::path& model, const std::vector<int64_t>& ids);

}  // namespace orrery
