// Which attention method runs at which denoising step, layer and role (docs/attention.md).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attention/sequence.h"
#include "base/json.h"

namespace orrery {

enum class AttentionRole : uint8_t { und, gen, gen_multi_control };
inline constexpr int kNumRoles = 3;
std::string_view name_of(AttentionRole role);  // "cosmos3.und", "cosmos3.gen", ...
// True for the text tower: its keys are computed once per prompt, so its method cannot change, and
// it is causal.
constexpr bool is_invariant(AttentionRole role) { return role == AttentionRole::und; }

// One attention call site of the model, and for whom it is called.
struct AttentionSite {
  int layer = 0;
  AttentionRole role = AttentionRole::gen;
  int evaluation = 0;  // generation tower: index of the guidance evaluation
  int branch = 0;      // text tower: index of the prompt
};

// What a model declares: its attention call sites, one per (layer, role).
struct AttentionInventory {
  int num_layers = 0;
  std::vector<AttentionRole> roles;  // every role a site of this model can take
  std::string component = "transformer";
  // Heads of the checkpoint; 0 when they are not known (nothing is checked then).
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
};

class AttentionMethod;  // method.h

// What warm-up must run once: a layout at a role.
struct WarmUpTarget {
  int layout = 0;
  AttentionRole role = AttentionRole::gen;
  bool operator==(const WarmUpTarget&) const = default;
};

// Immutable once made; it holds no reference to the documents it came from. One serves every
// request.
class AttentionStrategy {
 public:
  // First match wins: `checkpoint_policy: ignore`, any run-time configuration, the checkpoint's
  // runtime.attention_strategy, dense. Throws Error{invalid_argument} naming the place of each
  // fault. Either document may be null. `checkpoint` is the strategy itself: see
  // checkpoint_strategy().
  static AttentionStrategy resolve(const AttentionInventory& inventory, const Json* runtime,
                                   const Json* checkpoint);
  static AttentionStrategy dense(const AttentionInventory& inventory);
  // runtime.attention_strategy of a transformer's config.json, or null.
  static const Json* checkpoint_strategy(const Json& transformer_config);

  AttentionStrategy(AttentionStrategy&&) noexcept;
  AttentionStrategy& operator=(AttentionStrategy&&) noexcept;
  ~AttentionStrategy();

  std::string_view source() const;  // "runtime", "runtime_disabled", "checkpoint", "default"
  const AttentionInventory& inventory() const;
  const TokenOrder& token_order() const;

  bool has_schedule() const;
  // The layout of zero-based logical step `step` of `num_steps`. Without a schedule any arguments
  // do; with one they must be valid progress.
  int layout_at(int step, int num_steps) const;
  // Steps since the schedule's current phase began; the step itself without a schedule.
  int step_in_phase(int step, int num_steps) const;
  int num_layouts() const;
  const std::string& layout_name(int layout) const;
  // "steps 0 to 9: dense", one phase each, for a run of num_steps; empty without a schedule.
  std::vector<std::string> phases(int num_steps) const;

  int num_presets() const;
  const std::string& preset_name(int preset) const;
  const AttentionMethod& preset_method(int preset) const;
  int preset(int layout, int layer, AttentionRole role) const;
  const std::string& preset_name(int layout, int layer, AttentionRole role) const;
  const AttentionMethod& method(int layout, int layer, AttentionRole role) const;

  // Every reachable layout at each of `roles` that the model has; an invariant role once.
  std::vector<WarmUpTarget> warm_up_targets(const std::vector<AttentionRole>& roles) const;

 private:
  struct State;
  explicit AttentionStrategy(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace orrery
