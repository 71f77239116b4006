// The record of one run, as JSON.
#pragma once

#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/warm_up.h"
#include "base/json.h"
#include "dist/mesh.h"
#include "engine/model_weights.h"
#include "engine/settings.h"
#include "orrery/engine.h"

namespace orrery {

struct StageTime {
  std::string name;
  double seconds = 0;
  double flops = 0;
  double processor_seconds = 0;  // of all threads of this process
};

struct RunRecord {
  std::vector<StageTime> stages;
  std::vector<double> step_seconds;
  OpTable operations;  // of all stages
  int64_t text_tokens = 0, negative_tokens = 0, generation_tokens = 0;
  int64_t weight_bytes = 0, resident_weight_bytes = 0, pinned_bytes = 0, arena_bytes = 0;
  MemoryState device_memory;  // at the end; zeros without a device
  std::string offload;
  ModelWeights::LoadTime load;
  double first_step_seconds = 0;  // from the process's start to the end of the first denoising step
  double open_seconds = 0;
  Mesh mesh;  // of the ranks that shared the run; all else is of rank 0
  std::string device;
  std::string dtype;
  NoiseType noise_type = NoiseType::automatic;  // that was drawn; automatic: none
  std::string attention_source;
  Json warm_up;
  std::vector<DispatchRecord> dispatch;
  std::vector<std::string> evaluations;  // names, by the index in `dispatch`
  std::vector<LoraFile> lora;
  std::string guardrail;  // verdict, as guardrail.h words it
};

Json settings_json(const Request& request, const Settings& settings);
// What an output file carries: the settings, the adapters and the verdict.
Json metadata_json(const Request& request, const Settings& settings, const RunRecord& record);
Json report_json(const Request& request, const Settings& settings, const RunRecord& record);
// Layouts and whether they ran: {"summary", "layouts": [{layout, role, exercised, failure?}]}.
Json warm_up_json(const WarmUp& warm_up, const AttentionStrategy& strategy);
// What each preset did in the generation tower.
std::vector<AttentionUse> attention_use(const std::vector<DispatchRecord>& records);
// Since the system started this process; 0 when it does not say.
double seconds_since_process_start();
// Peak resident set of this process, bytes.
int64_t peak_resident_bytes();

}  // namespace orrery
