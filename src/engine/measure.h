// What a request needs, by a dry run.
#pragma once

#include "attention/strategy.h"
#include "backend/backend.h"
#include "dist/mesh.h"
#include "engine/forecast.h"
#include "engine/model_weights.h"
#include "engine/settings.h"
#include "orrery/engine.h"
#include "text/tokenizer.h"

namespace orrery {

// Where and how a request would run.
struct Placement {
  DeviceKind device = DeviceKind::cpu;
  bool fuses_weights = false;
  DType dtype = DType::f32;
  VaeTiling tiling;
  Mesh mesh;     // of the ranks that share it
  int rank = 0;  // the one that is measured
  Offload offload = Offload::none;
  Resident resident = Resident::off;
  int64_t budget = 0;  // device bytes for weights and all else: what Resident::automatic goes by
};

// Conditional ids, then unconditional ones when guidance needs them.
std::vector<std::vector<int64_t>> prompt_lists(const Checkpoint& checkpoint,
                                               const Tokenizer& tokenizer,
                                               const Settings& settings);

VaeOptions vae_options(DeviceKind device, DType dtype);

// Whether the text tower runs beside the first denoising step (RunOptions). The CPU has its weights
// in place and nothing to hide.
bool text_runs_with_first_step(DeviceKind device);

struct Measured {
  Plan plan;
  StageCosts costs;
};
Measured measure(const Checkpoint& checkpoint, const Settings& settings,
                 const AttentionStrategy& strategy, std::vector<std::vector<int64_t>> ids,
                 const Placement& placement);

// Flops a second that this backend reaches on one large matrix product in `dtype`: the ceiling that
// times are held against.
double gemm_ceiling(Backend& backend, DType dtype);
// Bytes read and written a second by one large copy.
double copy_ceiling(Backend& backend);

}  // namespace orrery
