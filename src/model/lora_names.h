// How trainers spell the keys of an adapter, brought to the names of a checkpoint.
//
//   PEFT, diffusers   <module>.lora_A[.<adapter>].weight, .lora_B
//   ComfyUI           diffusion_model.<module>.lora_A.weight, or lora_down and lora_up
//   kohya, musubi     lora_unet_<module with _ for .>.lora_down.weight, .lora_up, .alpha
//   NVIDIA framework  [net.]language_model.model.<module in the framework's names>
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace orrery {

struct LoraKey {
  enum class Part { down, up, alpha, other } part = Part::other;
  std::string module;  // as the file spells it
};
LoraKey parse_lora_key(const std::string& key);

// The method that a key belongs to where it is not the LoRA of a linear layer: "LoHa", "DoRA"; ""
// when nothing is known of it.
std::string_view other_method(std::string_view key);

// "layers.3.self_attn.add_q_proj" of "transformer.layers.3.self_attn.q_proj_moe_gen".
std::string lora_module(std::string_view dotted);

// The linear layers of a network, found by any spelling.
class LoraModules {
 public:
  explicit LoraModules(const std::vector<std::string>& layers);
  // The layer's own name, or the module in the checkpoint's spelling when there is no such layer.
  std::string layer_of(const std::string& module) const;

 private:
  std::map<std::string, std::string> underscored_;  // spelling without dots, layer
};

}  // namespace orrery
