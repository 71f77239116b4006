// Samplers as plain numbers: sigma grids, timesteps and, per step, the coefficients of the linear
// combinations that a step is. Solver applies them to tensors of one modality.
//
// The model: x_sigma = (1 - sigma) x0 + sigma noise, and the network predicts velocity = noise -
// x0.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "backend/backend.h"
#include "base/json.h"

namespace orrery {

inline constexpr int kMaxSolverOrder = 16;

struct SchedulerConfig {
  enum class Kind { unipc, flow_match_euler };
  Kind kind = Kind::unipc;
  int64_t num_train_timesteps = 1000;
  int solver_order = 2;
  bool use_karras_sigmas = false;  // precedes the shifted grid: flow_shift then has no effect
  double flow_shift = 1;           // "shift" of flow_match_euler
  // Karras range; a missing end comes from the training schedule.
  std::optional<double> sigma_max, sigma_min;
  double beta_start = 1e-4, beta_end = 0.02;
  bool final_sigma_zero = true;      // else the last sigma of the grid is repeated
  bool stochastic_sampling = false;  // flow_match_euler
  std::vector<double>
      fixed_sigmas;              // flow_match_euler: fixed_step_sampler_config.t_list, may be empty
  bool native_schedule = false;  // model_index.json: use_native_flow_schedule
  // Reads scheduler_config.json. A key or value that changes the sampler in a way not built here is
  // refused by name.
  static SchedulerConfig from_json(const Json& config);
};

struct Schedule {
  std::vector<float> sigmas;  // num_steps + 1, ends with 0 (or a repeated last sigma)
  // What the network's time embedder is fed, 0 to num_train_timesteps: whole numbers for UniPC. Not
  // sigma, and not 1000 sigma.
  std::vector<float> timesteps;  // num_steps
  int num_steps() const { return static_cast<int>(timesteps.size()); }
};

// custom_sigmas: the grid before the shift, in place of the configured one (distilled checkpoints);
// num_steps long.
Schedule make_schedule(const SchedulerConfig& config, int num_steps,
                       const std::vector<double>& custom_sigmas = {});

// One UniPC step i as two linear combinations, with m_i = x_i - sigma_i v_i the x0 prediction.
struct UnipcStep {
  int order = 1;     // of the predictor
  double sigma = 0;  // sigma_i
  // Corrected sample = corrector[0] last + corrector[1] m_i + corrector[2] m_{i-1} + ..., `last`
  // being the corrected sample of step i - 1. Empty: the corrected sample is x_i.
  std::vector<double> corrector;
  // x_{i+1} = predictor[0] corrected + predictor[1] m_i + predictor[2] m_{i-1} + ...
  // Empty: x_{i+1} = m_i exactly, and no corrected sample is needed.
  std::vector<double> predictor;
};
std::vector<UnipcStep> unipc_steps(const std::vector<float>& sigmas, int solver_order);

// Sampler state of one modality: tensors of equal shape, f32, on the backend's device, which must
// outlive it.
class Solver {
 public:
  // Allocates the history: solver_order + 1 tensors at most for UniPC, none for flow-match Euler.
  Solver(Backend& backend, const SchedulerConfig& config, const Schedule& schedule, Shape shape);
  // Turns `sample` (x_i) into x_{i+1} in place, given the velocity at x_i. Steps come in order, 0
  // to num_steps - 1, counted by i and never looked up by timestep: whole-number timesteps may
  // repeat. noise: the step's fresh standard normals when needs_noise(), drawn by the caller at
  // every step, the last one included, from the request's one generator.
  void step(int i, MutView sample, View velocity, View noise = {});
  bool needs_noise() const { return stochastic_; }
  void reset() { steps_done_ = 0; }

 private:
  void step_unipc(int i, MutView sample, View velocity);
  void step_euler(int i, MutView sample, View velocity, View noise);

  Backend& backend_;
  std::vector<float> sigmas_;
  bool stochastic_ = false;
  std::vector<UnipcStep> unipc_;  // empty: flow-match Euler
  std::vector<Tensor> history_;   // m_i lies in history_[i % size]
  Tensor last_sample_;            // corrected sample of the step before
  Shape shape_;
  int steps_done_ = 0;
};

}  // namespace orrery
