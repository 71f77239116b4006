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

struct RunRecord {
  Times times;
  MemoryUse memory;
  OpTable operations;  // of all stages
  int64_t text_tokens = 0, negative_tokens = 0, generation_tokens = 0;
  std::string offload;
  bool text_stays = false;
  ModelWeights::LoadTime load;
  Mesh mesh;  // of the ranks that shared the run; all else is of rank 0
  std::string device;
  std::string dtype;
  std::string attention_source;
  Json warm_up;
  std::vector<DispatchRecord> dispatch;
  std::vector<std::string> evaluations;  // names, by the index in `dispatch`
  std::vector<LoraFile> lora;
  Json engine;            // engine_json() of the run
  std::string guardrail;  // verdict, as guardrail.h words it
};

// What a run can be repeated from: the model's folder and the options that change its result.
Json engine_json(const std::filesystem::path& model, const EngineOptions& options);
// Every field of the request that was given or resolved, by its name; "given" lists the former.
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
